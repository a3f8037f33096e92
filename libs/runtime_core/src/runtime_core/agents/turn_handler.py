"""Handles a delivery for an agent: run one turn, commit what it asks for, or decide what follows from its failure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import product
from typing import cast

import msgspec

from runtime_core.agents.definition import AgentDefinition
from runtime_core.agents.offers import Offers
from runtime_core.agents.ports import Compute, Meta, TurnRun
from runtime_core.agents.run import Run
from runtime_core.agents.turn_commit import (
    answer_parts,
    parts_of,
    parts_of_calls,
    parts_of_sends,
    row_of_run,
    spend_parts,
)
from runtime_core.app import App
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import CallBegun, RunFields
from runtime_core.consumer.attempt import give_up, log_retry
from runtime_core.consumer.decision import RetryAt, decide, reason_of
from runtime_core.consumer.effects import Call, Completed, Failed, Publish, Send, Suspended, TurnResult
from runtime_core.engines.results import Results
from runtime_core.errors import BusError, Fenced, InvalidInput, LimitExceeded, WeftError
from runtime_core.hooks.around import RunHooks
from runtime_core.hooks.ended import HooksOfEnd, TaskEnded, ended_task
from runtime_core.manifest import Manifest
from runtime_core.replies import Answer, Replies, name_of_step
from runtime_core.telemetry import gen_ai, trace_context
from runtime_core.telemetry.attributes import DUPLICATE
from runtime_core.telemetry.messaging import delivery_span
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.model_calls import count_model_calls
from runtime_core.telemetry.names import SHOWN_OUTCOMES
from runtime_core.telemetry.spans import Parent, task_traceparent, tracing, under, within
from runtime_core.telemetry.trace_context import Ids
from runtime_core.trajectory.steps import ENCODER, StepError
from runtime_core.usage import total

logger = logging.getLogger(__name__)

# How long an event for an agent that this app lacks waits for a handler that has it.
LACKING_SECONDS = 1.0
# Runs that wait are kept warm up to this many; one that was dropped is replayed.
WARM_RUNS = 20_000


class _TurnGone(WeftError):
    """The turn is no longer this entry's: another owner goes on with the run."""


class TurnPort:
    """What a running turn writes on the broker before its commit, for the delivery that it handles now."""

    __slots__ = ("_app", "_bus", "_offers", "_partitions", "_replies", "_writes", "delivery")

    def __init__(
        self,
        bus: EventBus,
        delivery: Delivery,
        app: App,
        partitions: int = 1,
        replies: Replies | None = None,
        offers: Offers | None = None,
    ) -> None:
        self._bus = bus
        self._app = app
        self._offers = offers or Offers(bus)
        self._partitions = partitions
        self._replies = replies
        self.delivery = delivery
        self._writes: list[asyncio.Task[object]] = []

    async def record(self, step: str, digest: str, status: bytes, payload: bytes) -> bytes:
        stored = await self._bus.record(
            self.delivery, step, b"%b%b%013d%b" % (digest.encode(), status, _now(), payload)
        )
        if stored is None:
            raise _TurnGone(f"{self.delivery!r} is handled by another owner")
        return stored

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        begun = await self._bus.begin_call(self.delivery, step, reserve)
        if begun is None:
            raise _TurnGone(f"{self.delivery!r} is handled by another owner")
        return begun

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes
    ) -> tuple[bytes, str]:
        # What was streamed comes before the result, for who reads the stream and the final event.
        await self.flush()
        value = b"%b%b%013d%b" % (digest.encode(), status, _now(), payload)
        settled = await self._bus.settle_call(self.delivery, step, value, usage)
        if settled is None:
            raise _TurnGone(f"{self.delivery!r} is handled by another owner")
        return settled

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        self._write(self._bus.stream(self.delivery, step, attempt, data))

    async def usage(self) -> bytes:
        return await self._bus.usage(self.delivery.task)

    async def manifests(self) -> Sequence[Manifest]:
        return await self._offers.manifests()

    def progress(self, step: str, data: bytes) -> None:
        self._write(self._bus.stream(self.delivery, step, self.delivery.attempt, data, progress=True))

    def emit(self, step: str, digest: str, data: bytes) -> None:
        value = b"%bK%013dnull" % (digest.encode(), _now())
        self._write(self._bus.emit(self.delivery, step, value, data))

    def note(self, step: str, digest: str) -> None:
        value = b"%bK%013dnull" % (digest.encode(), _now())
        self._write(self._bus.record(self.delivery, step, value))

    def _write(self, writing: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(writing)
        # A turn that is dropped does not wait for them: it is lost, and whoever dropped it knows why.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writes.append(task)

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Send | Publish] = (), state: bytes = b""
    ) -> dict[str, asyncio.Future[Answer]]:
        """Ask for results, and send messages, while the turn goes on: a future of the answer for each call's step.

        A repeat asks for nothing twice and sends nothing twice. `state` (JSON; empty: unchanged) is what a call back
        into this instance sees. Who gives up waiting cancels the future. Raises `Fenced`, `BusError`, and
        `LimitExceeded` where the task would go over its `max_steps`.
        """
        if self._replies is None:
            raise WeftError("nothing can be asked in mid-turn here: this handler has no reply stream")
        delivery, replies = self.delivery, self._replies
        names = {call.step: name_of_step(delivery.task, delivery.run, call.step) for call in calls}
        futures = {step: replies.expect(name) for step, name in names.items()}
        for step, future in futures.items():
            delivery.waits += 1
            future.add_done_callback(partial(self._answered, delivery, names[step]))
        parts = parts_of_sends(sends, delivery, self._partitions)
        parts += parts_of_calls(calls, delivery, self._app, self._partitions)
        try:
            known = await self._bus.ask(delivery, _now(), replies.name, state, parts, len(calls) + len(sends))
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        if known is None:
            for future in futures.values():
                future.cancel()
            raise _TurnGone(f"{delivery!r} is handled by another owner")
        for step, value in known.items():
            replies.hand_out(names[step], Answer(value))
        if delivery.quarantined and not all(future.done() for future in futures.values()):
            # Whom it asked may need this very process. It has lived until here, and once it has its answer on record
            # it comes to whatever follows without a wait: what kills its process then is convicted by that.
            delivery.quarantined = False
            await self._bus.leave_quarantine(delivery)
        return futures

    def _answered(self, delivery: Delivery, name: str, future: asyncio.Future[Answer]) -> None:
        delivery.waits -= 1
        if self._replies is not None:
            self._replies.forget(name, future)

    async def flush(self) -> None:
        """Wait for the deltas and notes on their way: the commit must not overtake them. Raises what they raised."""
        if self._writes:
            writes, self._writes = self._writes, []
            for result in await asyncio.gather(*writes, return_exceptions=True):
                if isinstance(result, Fenced | BusError):
                    raise result


class _Warm:
    """A run in memory that waits, with the port of its last turn."""

    __slots__ = ("brought", "context", "input", "parent", "port", "run", "started_ms", "turn")

    def __init__(self, run: TurnRun, port: TurnPort, turn: int, started_ms: int, data: bytes, context: bytes) -> None:
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
        app: App,
        metrics: Metrics,
        *,
        partitions: int = 1,
        warm_runs: int = WARM_RUNS,
        replies: Replies | None = None,
        compute: Compute | None = None,
        results: Results | None = None,
    ) -> None:
        self._bus = bus
        self._replies = replies
        self._compute = compute
        self._results = results or Results()
        self._app = app
        self._agents = app.agents
        self._hooks = app.hooks
        self._offers = Offers(bus)
        self._task_ended = TaskEnded(app.name)
        self._metrics = metrics
        self._warm: OrderedDict[tuple[str, str], _Warm] = OrderedDict()
        self._warm_limit = warm_runs
        self._partitions = partitions
        self._running: dict[str, set[TurnRun]] = {}
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
        with within(trace_context.stated(delivery.context)[0]):
            return await self._go_on(delivery, definition, warm)

    async def _go_on(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """Run one turn, and commit what it asks for: how it ended."""
        running = self._running.setdefault(delivery.task, set())
        running.add(warm.run)
        try:
            result = await (self._advance_traced(delivery, warm) if delivery.span.recording else warm.run.advance())
            # Counted here: the calls were made, whatever becomes of this turn.
            count_model_calls(self._metrics, result.steps)
            await warm.port.flush()
        except _TurnGone:
            warm.run.drop()
            await self._bus.retry(delivery, 0, b"")
            return "repeated"
        except BaseException:
            warm.run.drop()
            raise
        finally:
            running.discard(warm.run)
            if not running:
                self._running.pop(delivery.task, None)
        match result:
            case Suspended():
                return await self._suspend(delivery, definition, warm, result)
            case Completed():
                return await self._complete(delivery, definition, warm, result)
            case Failed():
                warm.run.drop()
                return await self._fail(delivery, definition, result, warm)

    async def _traced(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """One turn under a span of its own, in the trace of its task, with links to what has brought its results."""
        keys = self._bus.keys
        traceparent, tracestate = trace_context.stated(delivery.context)
        links = await self._bus.answered_by(delivery.task, delivery.run, warm.brought) if warm.brought else []
        if definition is self._task_ended and not traceparent:
            # Of a task whose trace nobody has named: its hooks are in a tree of their own, which says of whose end.
            links = [task_traceparent(keys.namespace, ended_task(warm.input), ""), *links]
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
            # A delivery that another process had in hand may have steps in the journal that this run does not know.
            untouched = delivery.attempt == 1 and delivery.deliveries == 1
            if delivery.kind == "resume" and warm.turn == delivery.turn and untouched:
                # First: a branch goes on as soon as it has its result, and what it emits is this delivery's.
                warm.port.delivery = delivery
                delivery.context = warm.context
                try:
                    warm.brought = await self._bring_results(delivery, warm.run)
                except BaseException:
                    # It is in nobody's hands by now, and would wait for ever.
                    warm.run.drop()
                    raise
                return warm
            warm.run.drop()
        if (
            delivery.kind == "start"
            and delivery.deliveries == 1
            and delivery.attempt == 1
            and delivery.turn == 0  # a redriven one has another
            and not delivery.key
        ):
            # The very first turn: there is nothing to load.
            started = int(delivery.entry.partition(b"-")[0])
            return self._made(delivery, definition, RunFields(data=delivery.data, started_ms=started))
        fields = await self._stored(delivery)
        return None if fields is None else self._made(delivery, definition, fields)

    async def _bring_results(self, delivery: Delivery, run: TurnRun) -> list[str]:
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
        delivery.context = delivery.context or fields.context
        return fields

    def _made(self, delivery: Delivery, definition: AgentDefinition, fields: RunFields) -> _Warm:
        """A run from its beginning, or replayed as far as `fields` know it."""
        port = self._port(delivery)
        meta = _meta(delivery.context)
        run = definition.make_run(
            task_id=delivery.task,
            run_id=delivery.run,
            key=delivery.key,
            input=fields.data,
            attempt=delivery.attempt,
            started_ms=fields.started_ms,
            journal=fields.journal,
            pending=fields.pending,
            state=fields.state,
            port=port,
            owner=self._bus.owner,
            meta=meta,
            unrecorded=fields.unrecorded,
            overrides=fields.overrides,
            functions=self._app.functions,
            carried=delivery.context,
        )
        if isinstance(run, Run):
            run.compute = self._compute
            run.results = self._results
        if self._hooks.everywhere or "hooks" in meta or definition is self._task_ended:
            self._add_hooks(run, definition, port)
        if fields.withdrawn:
            run.cancel("nobody wants the task's answer any more")
        warm = _Warm(run, port, fields.turn, fields.started_ms, fields.data, delivery.context)
        if delivery.step:
            warm.brought.append(delivery.step)
        return warm

    def _add_hooks(self, run: TurnRun, definition: AgentDefinition, port: TurnPort) -> None:
        if not isinstance(run, Run):
            return  # an actor's messages pass its runtime's intervention handlers instead
        kind = HooksOfEnd if definition is self._task_ended else RunHooks
        run.hooks = kind(
            run,
            self._hooks,
            run.meta.get("hooks", {}),
            retry=definition.retry,
            entry=lambda: port.delivery.entry.decode(),
            failed=lambda point: self._metrics.hook_failures[point].inc(),
        )

    def _port(self, delivery: Delivery) -> TurnPort:
        return TurnPort(self._bus, delivery, self._app, self._partitions, self._replies, self._offers)

    async def _hand_on(self, delivery: Delivery) -> None:
        """A handler that lacks a name hands the event back without counting, unless no app has it."""
        if await self._bus.knows_agent(delivery.name):
            await self._bus.retry(delivery, int(LACKING_SECONDS * 1000), b"", counts=False)
            return
        now = time.time() * 1000
        error = StepError("UnknownName", f"no agent is named {delivery.name}", at=now)
        await give_up(
            self._bus, self._metrics, delivery, "unknown_name", error, row_of_run(delivery, "failed", now, now, "")
        )

    # -- ends of a turn ----------------------------------------------------------------------------------------

    async def _suspend(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm, result: Suspended) -> str:
        parts, count = parts_of(result, delivery, self._app, self._partitions)
        record = ENCODER.encode(result.steps) if result.steps else b""
        asked = time.perf_counter()
        try:
            committed = await self._bus.commit_turn(
                delivery, "w", _now(), record, len(result.steps), result.working_state or b"", b"", parts, count
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
        parts, count = parts_of(result, delivery, self._app, self._partitions)
        asked = time.perf_counter()
        try:
            answer = result.answer or result.output
            committed = await self._bus.commit_turn(
                delivery, "c", now, ENCODER.encode(steps), len(steps), answer, result.state or b"", parts, count
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
            await self._bus.retry(delivery, int(LACKING_SECONDS * 1000), b"", counts=False)
            return "waits"
        now = _now()
        error = StepError(failed.type, failed.message, failed.traceback, now)
        decision = decide(delivery.attempt, definition.retry, failed, random.random)
        if isinstance(decision, RetryAt):
            self._metrics.retries.inc()
            log_retry(delivery, error, decision.delay_seconds)
            await self._bus.retry(delivery, int(decision.delay_seconds * 1000), ENCODER.encode(error))
            return "retried"
        row = row_of_run(delivery, "failed", warm.started_ms, now, self._bus.owner)
        row.input = msgspec.Raw(warm.input)
        row.error = error
        if failed.rejected:
            steps = [row, *failed.steps]
            payload = ENCODER.encode({"type": error.type, "message": error.message})
            mode = "x" if failed.ends_task else "k" if failed.cancelled else "f"
            answer = answer_parts(delivery)
            parts, count = spend_parts(failed.spends) + answer, len(failed.spends) + bool(answer)
            await self._bus.commit_turn(
                delivery, mode, now, ENCODER.encode(steps), len(steps), payload, b"", parts, count
            )
        else:
            used = total(spend.usage for spend in failed.spends)
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row, used, failed.steps)
        return "failed"


def _over_limit(error: LimitExceeded, result: Suspended | Completed) -> Failed:
    """The end of the whole task, with what this turn has done and used."""
    return Failed(
        "LimitExceeded", str(error), retryable=False, rejected=True, ends_task=True, spends=result.spends,
        steps=result.steps,
    )  # fmt: skip


_LIVE = ("accepted", "running", "waiting")


def _now() -> int:
    return time.time_ns() // 1_000_000


_META = msgspec.json.Decoder(dict[str, object])


_KNOWN = ("session_id", "metadata", "deadline", "topic", "sender", "hooks", "engine")


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
