"""Handles a delivery for an agent: run one turn, commit what it asks for, or decide what follows from its failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from itertools import product
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Replies
from runtime_core.bus.spans import delivery_span
from runtime_core.bus.values import Delivery, RunFields
from runtime_core.consumer.attempt import give_up, hand_back, hand_on, schedule_retry
from runtime_core.consumer.decision import reason_of
from runtime_core.consumer.effects import Completed, Failed, Suspended, TurnResult
from runtime_core.engines.results import Results
from runtime_core.errors import InvalidInput, JournalMoved, LimitExceeded, TurnTaken
from runtime_core.record.step import ENCODER, StepError
from runtime_core.record.usage import total
from runtime_core.runs.calls import PROCESS_BYTES, Outflow
from runtime_core.runs.commit import answer_parts, parts, parts_of, row_of_run
from runtime_core.runs.definition import AgentDefinition
from runtime_core.runs.ports import Attempt, Compute, DeclaredApp, Meta, Workplace
from runtime_core.runs.run import Run
from runtime_core.runs.turn_port import HandedBack, Offers, TurnGone, TurnPort
from runtime_core.telemetry import gen_ai, trace_context
from runtime_core.telemetry.attributes import DUPLICATE
from runtime_core.telemetry.metrics import Metrics, count_model_calls
from runtime_core.telemetry.names import SHOWN_OUTCOMES
from runtime_core.telemetry.spans import Parent, task_traceparent, tracing, under, within
from runtime_core.telemetry.trace_context import Ids

logger = logging.getLogger(__name__)

# Runs that wait are kept warm up to this many; one that was dropped is replayed.
WARM_RUNS = 20_000


class _Warm:
    """A run in memory that waits, with the port of its last turn."""

    __slots__ = ("brought", "context", "input", "parent", "port", "run", "started_ms", "turn")

    def __init__(self, run: Run, port: TurnPort, turn: int, started_ms: int, data: bytes, context: bytes) -> None:
        self.run = run
        self.input = data
        self.port = port
        self.turn = turn
        self.started_ms = started_ms
        self.context = context
        """What travels with the events that it causes."""
        self.parent = Parent()
        self.brought: list[str] = []
        """The steps whose results have woken it this time."""


class TurnHandler:
    """Runs agents of one app for the deliveries of one consumer. A run that waits stays warm while there is room."""

    def __init__(
        self,
        bus: EventBus,
        app: DeclaredApp,
        metrics: Metrics,
        *,
        partitions: int = 1,
        warm_runs: int = WARM_RUNS,
        replies: Replies | None = None,
        compute: Compute | None = None,
        results: Results | None = None,
        outflow: Outflow | None = None,
    ) -> None:
        """`outflow` counts what all handlers of this process have on its way; None: those of this one."""
        self._bus = bus
        self._outflow = outflow or Outflow(PROCESS_BYTES)
        self._replies = replies
        self._workplace = Workplace(app.functions, compute, results or Results())
        self._app = app
        self._agents = app.agents
        self._hooks = app.hooks
        self._offers = Offers(bus)
        self._task_ended = app.hooks.of_ends_agent(app.name)
        self._metrics = metrics
        self._warm: OrderedDict[tuple[str, str], _Warm] = OrderedDict()
        self._warm_limit = warm_runs
        self._partitions = partitions
        self._running: dict[str, set[Run]] = {}
        self._draining = asyncio.Event()
        for place in product(app.agents, SHOWN_OUTCOMES):
            metrics.agent_turns[place]  # with 0, from the start

    async def handle(self, delivery: Delivery) -> None:
        definition = self._agents.get(delivery.name)
        if definition is None and delivery.name == self._task_ended.name:
            definition = self._task_ended
        if definition is None:
            await self._hand_on(delivery)
            return
        began, outcome = time.perf_counter(), "lost"
        try:
            outcome = await self._turn(delivery, definition)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            # Under a name that this app has declared: other names are in the hands of whoever submits.
            self._metrics.agent_turns[delivery.name, outcome].inc()
            self._metrics.agent_turn_seconds[delivery.name].observe(time.perf_counter() - began)

    async def _turn(self, delivery: Delivery, definition: AgentDefinition) -> str:
        """Run one turn and settle it; how it ended, as one of `TURN_OUTCOMES`."""
        warm = await self._open(delivery, definition)
        if warm is None:
            # The run or its task is over: settling acknowledges the entry and frees the instance.
            await self._bus.retry(delivery, 0, b"")
            return "cancelled"
        if tracing():
            return await self._traced(delivery, definition, warm)
        # A library in here may have an SDK of its own, that of nobody else: its spans are under who has asked.
        with within(trace_context.stated(delivery.context)[0] if delivery.context else ""):
            return await self._go_on(delivery, definition, warm)

    async def _go_on(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """Run one turn, and commit what it asks for: how it ended."""
        while True:
            try:
                result = await self._advance(delivery, warm)
                break
            except JournalMoved as moved:
                logger.info("%s: replaying it", moved)
                replayed = await self._replayed(delivery, definition)
            except (HandedBack, TurnTaken) as left:
                # The delivery stays as it is: the broker hands it to another process, or this one finds it again.
                raise asyncio.CancelledError(str(left)) from None
            except TurnGone:
                replayed = None
            if replayed is None:
                await self._bus.retry(delivery, 0, b"")
                return "repeated"
            replayed.parent = warm.parent
            warm = replayed
        match result:
            case Suspended():
                return await self._suspend(delivery, definition, warm, result)
            case Completed():
                return await self._complete(delivery, definition, warm, result)
            case Failed():
                warm.run.drop()
                return await self._fail(delivery, definition, result, warm)

    async def _advance(self, delivery: Delivery, warm: _Warm) -> TurnResult:
        """Run the turn until it ends or waits, with its writes in mid-turn. Drops the run where this raises."""
        running = self._running.setdefault(delivery.task, set())
        running.add(warm.run)
        try:
            result = await (self._advance_traced(delivery, warm) if delivery.span.recording else warm.run.advance())
            # Counted here: the calls were made, whatever becomes of this turn.
            if result.steps:
                count_model_calls(self._metrics, result.steps)
            try:
                await warm.port.flush()
            except LimitExceeded as error:
                return _over_output(error, result)
            return result
        except BaseException:
            warm.run.drop()
            raise
        finally:
            running.discard(warm.run)
            if not running:
                self._running.pop(delivery.task, None)

    async def _traced(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """One turn under a span of its own, in the trace of its task, with links to what has brought its results."""
        keys = self._bus.keys
        traceparent, tracestate = trace_context.stated(delivery.context)
        links = await self._bus.answered_by(delivery.task, delivery.run, warm.brought) if warm.brought else []
        if definition is self._task_ended and not traceparent:
            # Of a task whose trace nobody has named: its hooks are in a tree of their own, which says of whose end.
            links = [task_traceparent(keys.namespace, self._hooks.ended_task(warm.input), ""), *links]
        traceparent = task_traceparent(keys.namespace, delivery.task, traceparent)
        with delivery_span(
            delivery, keys, self._bus.owner, traceparent=traceparent, tracestate=tracestate, links=links
        ) as delivery.span:
            outcome = await self._go_on(delivery, definition, warm)
            # Not where this raises: the turn is done again, and who does that sends a span of the same id.
            warm.parent.span.release()
            return outcome

    async def _advance_traced(self, delivery: Delivery, warm: _Warm) -> TurnResult:
        """The agent's own part of the turn: the spans of its code are under this one, and what it asks others for."""
        session = str(_META.decode(delivery.context).get("session_id") or "") if delivery.context else ""
        # Whoever does this turn again, after a crash, makes the same span: what was asked meanwhile is under it.
        span = trace_context.span_of_entry(self._bus.keys.stream(delivery.stream), delivery.entry.decode())
        with (
            under(warm.parent),
            gen_ai.agent_span(delivery.name, session=session, ids=Ids(0, span, 0), held=True) as warm.parent.span,
        ):
            delivery.trace = warm.parent.span.traceparent
            result = await warm.run.advance()
            if isinstance(result, Failed):
                warm.parent.span.failed(result.type, result.message)
                delivery.span.failed(result.type, result.message)
            return result

    def forget(self) -> None:
        """Drop every warm run: this owner was declared dead, and others go on with them."""
        while self._warm:
            self._warm.popitem()[1].run.drop()

    def drain(self) -> None:
        self._draining.set()

    def stop_task(self, task: str) -> None:
        for run in self._running.get(task, ()):
            run.cancel("the task was cancelled or ended early")
        for place in [place for place in self._warm if place[0] == task]:
            self._warm.pop(place).run.drop()

    # -- opening -----------------------------------------------------------------------------------------------

    async def _open(self, delivery: Delivery, definition: AgentDefinition) -> _Warm | None:
        """The run, ready to go on: warm, fresh, or replayed from its journal."""
        warm = self._warm.pop((delivery.task, delivery.run), None)
        if warm is not None:
            # Of a failed attempt the run here may know too much: whoever made it may have been another process.
            if delivery.kind == "resume" and warm.turn == delivery.turn and delivery.attempt == 1:
                # First: a branch goes on as soon as it has its result, and what it emits is this delivery's.
                warm.port.resume(delivery)
                delivery.context = warm.context
                try:
                    warm.brought = await self._bring_results(delivery, warm.run)
                except BaseException:
                    # It is in nobody's hands by now, and would wait for ever.
                    warm.run.drop()
                    raise
                return warm
            warm.run.drop()
        if delivery.kind == "start" and delivery.turn == 0 and delivery.attempt == 1 and not delivery.key:
            # A first turn needs nothing of the broker until it does a step by itself: then its port looks whether
            # another process has begun this turn before (`TurnPort.confirm`).
            started = int(delivery.entry.partition(b"-")[0])
            fields = RunFields(data=delivery.data, started_ms=started, context=delivery.context)
            return self._made(delivery, definition, fields, self._port(delivery))
        return await self._replayed(delivery, definition)

    async def _replayed(self, delivery: Delivery, definition: AgentDefinition) -> _Warm | None:
        """The run as the broker's journal has it; None where the delivery is no longer its current one."""
        fields = await self._stored(delivery)
        if fields is None:
            return None
        return self._made(delivery, definition, fields, self._port(delivery, loaded=True))

    async def _bring_results(self, delivery: Delivery, run: Run) -> list[str]:
        """Give the run the result that woke it, and those of its other steps that have come in: which steps."""
        brought = []
        if delivery.step:
            run.deliver(delivery.step, delivery.data)
            brought.append(delivery.step)
        others = [step for step in run.awaited if step != delivery.step]
        if others:
            for step, value in zip(others, await self._bus.results(delivery.task, delivery.run, others), strict=True):
                if value is not None:
                    run.deliver(step, value)
                    brought.append(step)
        return brought

    async def _stored(self, delivery: Delivery) -> RunFields | None:
        """What the broker holds of the run; None where the delivery is no longer its current one."""
        fields = await self._bus.load(delivery)
        if fields is None or fields.cur != delivery.entry.decode() or fields.status not in _LIVE:
            return None
        # A resume carries none: the task's is the run's, and what the run asks for carries it on.
        delivery.context = fields.context = delivery.context or fields.context
        return fields

    def _made(self, delivery: Delivery, definition: AgentDefinition, fields: RunFields, port: TurnPort) -> _Warm:
        """A run from its beginning, or replayed as far as `fields` know it."""
        meta = _meta(delivery.context)
        attempt = Attempt(delivery.task, delivery.run, delivery.key, delivery.attempt, self._bus.owner)
        run = definition.run_type(definition, attempt, fields, port, self._workplace, meta)
        if definition.hooked and (self._hooks.everywhere or "hooks" in meta or definition is self._task_ended):
            run.hooks = self._hooks.of_run(
                run,
                of_end=definition is self._task_ended,
                retry=definition.retry,
                entry=lambda: port.delivery.entry.decode(),
                failed=lambda point: self._metrics.hook_failures[point].inc(),
            )
        if fields.withdrawn:
            run.cancel("nobody wants the task's answer any more")
        warm = _Warm(run, port, fields.turn, fields.started_ms, fields.data, delivery.context)
        if delivery.step:
            warm.brought.append(delivery.step)
        return warm

    def _port(self, delivery: Delivery, *, loaded: bool = False) -> TurnPort:
        return TurnPort(
            self._bus, delivery, self._app, self._partitions, self._replies, self._offers,
            loaded=loaded, draining=self._draining, process=self._outflow,
        )  # fmt: skip

    async def _hand_on(self, delivery: Delivery) -> None:
        """A handler that lacks a name hands the event back without counting, unless no app has it."""
        now = time.time() * 1000
        known, row = await self._bus.knows_agent(delivery.name), row_of_run(delivery, "failed", now, now, "")
        await hand_on(self._bus, self._metrics, delivery, known, f"no agent is named {delivery.name}", row)

    # -- ends of a turn ----------------------------------------------------------------------------------------

    async def _suspend(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm, result: Suspended) -> str:
        effects, count = parts_of(result, delivery, self._app, self._partitions)
        record = ENCODER.encode(result.steps) if result.steps else b""
        asked = time.perf_counter()
        try:
            committed = await self._bus.commit_turn(
                delivery, "w", _now(), record, len(result.steps), result.working_state or b"", b"", effects, count
            )
        except LimitExceeded as error:
            warm.run.drop()
            return await self._fail(delivery, definition, _over_limit(error, result), warm)
        except BaseException:
            warm.run.drop()
            raise
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
            warm.run.drop()
            return "repeated"
        warm.turn += 1
        place = (delivery.task, delivery.run)
        other = self._warm.pop(place, None)
        if other is not None:
            # A resume was read before the reply of the commit that caused it, and replayed beside this run.
            older, warm = sorted((other, warm), key=lambda each: each.turn)
            older.run.drop()
        self._warm[place] = warm
        if len(self._warm) > self._warm_limit:
            self._warm.popitem(last=False)[1].run.drop()
        return "suspended"

    async def _complete(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm, result: Completed) -> str:
        now = _now()
        row = row_of_run(delivery, "completed", warm.started_ms, now, self._bus.owner)
        row.input = msgspec.Raw(warm.input)
        row.output = msgspec.Raw(result.output)
        steps = [row, *result.steps]
        effects, count = parts_of(result, delivery, self._app, self._partitions)
        asked = time.perf_counter()
        try:
            answer = result.answer or result.output
            committed = await self._bus.commit_turn(
                delivery, "c", now, ENCODER.encode(steps), len(steps), answer, result.state or b"", effects, count
            )
        except LimitExceeded as error:
            return await self._fail(delivery, definition, _over_limit(error, result), warm)
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
            return "repeated"
        return "completed"

    async def _fail(self, delivery: Delivery, definition: AgentDefinition, failed: Failed, warm: _Warm) -> str:
        if not failed.counts:
            logger.info("%r waits: %s", delivery, failed.message)
            await hand_back(self._bus, delivery)
            return "waits"
        now = _now()
        error = StepError(failed.type, failed.message, failed.traceback, now)
        decision = await schedule_retry(self._bus, self._metrics, delivery, definition.retry, failed, error)
        if decision is None:
            return "retried"
        row = row_of_run(delivery, "failed", warm.started_ms, now, self._bus.owner)
        row.input = msgspec.Raw(warm.input)
        row.error = error
        if failed.rejected:
            steps = [row, *failed.steps]
            payload = ENCODER.encode({"type": error.type, "message": error.message})
            mode = "x" if failed.ends_task else "k" if failed.cancelled else "f"
            answer = answer_parts(delivery)
            used, count = parts(failed.spends, delivery, self._app), len(failed.spends) + bool(answer)
            await self._bus.commit_turn(
                delivery, mode, now, ENCODER.encode(steps), len(steps), payload, b"", used + answer, count
            )
        else:
            usage = total(spend.usage for spend in failed.spends)
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row, usage, failed.steps)
        return "failed"


def _over_limit(error: LimitExceeded, result: Suspended | Completed) -> Failed:
    """The end of the whole task, with what this turn has done and used."""
    return Failed(
        "LimitExceeded", str(error), retryable=False, rejected=True, ends_task=True, spends=result.spends,
        steps=result.steps,
    )  # fmt: skip


def _over_output(error: LimitExceeded, result: TurnResult) -> Failed:
    """The end of the run, with what this turn has done and used."""
    return Failed("LimitExceeded", str(error), retryable=False, spends=result.spends, steps=result.steps)


_LIVE = ("accepted", "running", "waiting")


def _now() -> int:
    return time.time_ns() // 1_000_000


_META = msgspec.json.Decoder(dict[str, object])


_KNOWN = ("session_id", "metadata", "tenant", "deadline", "topic", "sender", "hooks", "engine")


def _meta(context: bytes) -> Meta:
    if not context:
        return Meta()
    try:
        found = _META.decode(context)
    except msgspec.DecodeError as error:
        raise InvalidInput("x", f"the context cannot be read: {error}") from None
    known = {name: found[name] for name in _KNOWN if name in found}
    if "~chain" in found:
        known["asked"] = True
    return cast(Meta, known)  # the admission wrote it
