"""Handles a delivery for an agent: runs one turn, then commits its effects or decides what follows its failure."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import OrderedDict
from itertools import product
from typing import cast

import msgspec

from runtime_core.bus.commits import TurnMode
from runtime_core.bus.deliveries import Delivery, RunFields
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Replies
from runtime_core.bus.spans import delivery_span, unsampled_ids
from runtime_core.consumer.announcements import ManifestCache, is_announced
from runtime_core.consumer.effects import Completed, Failed, Suspended, TurnResult, finished_steps
from runtime_core.consumer.heartbeat import EndedPart
from runtime_core.consumer.settle import (
    error_text,
    failure_of,
    give_up,
    hand_back,
    hand_on,
    reason_of,
    schedule_retry,
    take_slots,
)
from runtime_core.errors import (
    BlockedEventLoop,
    InvalidInput,
    JournalLost,
    JournalMoved,
    LimitExceeded,
    OutputChanged,
    TurnTaken,
)
from runtime_core.runs.commit import (
    HandedBack,
    TurnGone,
    TurnPort,
    answer_parts,
    parts,
    parts_of,
    row_of_run,
)
from runtime_core.runs.definition import AgentDefinition, DeclaredApp
from runtime_core.runs.execution import NO_META
from runtime_core.runs.model_step import count_model_calls
from runtime_core.runs.output import PROCESS_BYTES, Outflow
from runtime_core.runs.ports import Attempt, Meta, RecordedCalls, Workplace
from runtime_core.runs.run import Run
from runtime_core.telemetry import gen_ai, trace_context
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import SHOWN_OUTCOMES
from runtime_core.telemetry.spans import (
    DUPLICATE,
    NO_SPAN,
    Parent,
    Unsampled,
    task_traceparent,
    tracing,
    under,
    within,
)
from runtime_core.telemetry.trace_context import Ids
from runtime_core.wire.codec import quoted
from runtime_core.wire.step import ENCODER, Status, StepFailure, total_usage

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 60.0
"""How much longer than its agent's limit a turn may take until it is committed."""
NESTED_LIMIT = 400
"""How many runs of a task may wait inside one another, in one partition. See PLACE_MAX of the record."""
TAKEN_MAX = 1000
"""How many turns of other processes are remembered."""
WARM_RUNS = 20_000
"""How many waiting runs stay in memory. A run that was dropped is replayed."""


class _Warm:
    """A run in memory, with the port of its last turn."""

    __slots__ = (
        "connection", "context", "input", "parent", "port", "received", "run", "started_ms", "turn", "unsampled",
    )  # fmt: skip

    def __init__(
        self, run: Run, port: TurnPort, turn: int, started_ms: int, data: bytes, context: bytes, connection: int
    ) -> None:
        self.run = run
        self.input = data
        self.port = port
        self.turn = turn
        self.started_ms = started_ms
        self.context = context
        """The context of the events that it causes (JSON)."""
        self.connection = connection
        """The number of the connection over which it was read. A server that is back may have lost its last writes."""
        self.parent: Parent | None = None
        """Holds the parent of its spans; None until a turn is traced."""
        self.unsampled: Ids | None = None
        """The ids of its trace if that is not sampled; None: sampled, or this process does not trace."""
        self.received: list[str] = []
        """The steps whose results it got for this turn."""


class TurnHandler:
    """Runs the agents of one app for one consumer. Waiting runs stay in memory, up to a limit."""

    def __init__(
        self,
        bus: EventBus,
        app: DeclaredApp,
        metrics: Metrics,
        *,
        partitions: int = 1,
        warm_runs: int = WARM_RUNS,
        replies: Replies | None = None,
        workplace: Workplace | None = None,
        outflow: Outflow | None = None,
        recorded: RecordedCalls | None = None,
    ) -> None:
        """`outflow` bounds the unanswered writes of all handlers of this process; None: of this handler alone.

        `recorded` finds a step of a task as the call that made it, for errors.
        """
        self._recorded = recorded
        self._bus = bus
        self._outflow = outflow or Outflow(PROCESS_BYTES)
        self._replies = replies
        self._workplace = workplace or Workplace(app.functions)
        self._app = app
        self._agents = app.agents
        self._hooks = app.hooks
        self._manifest_cache = ManifestCache(bus)
        self._task_ended = app.hooks.of_ends_agent(app.name)
        self._metrics = metrics
        self._warm: OrderedDict[tuple[str, str], _Warm] = OrderedDict()
        self._warm_limit = warm_runs
        self._lost_state: set[str] = set()
        """The agents whose loss of state is logged."""
        self._partitions = partitions
        self._running: dict[Delivery, Run] = {}
        self._draining = asyncio.Event()
        self._taken: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        """When this process first found another one in the turn of an entry (`time.monotonic`)."""
        for place in product(app.agents, SHOWN_OUTCOMES):
            metrics.agent_turns[place]  # shown as 0 from the start

    async def handle(self, delivery: Delivery) -> None:
        definition = self._agents.get(delivery.name)
        if definition is None and delivery.name == self._task_ended.name:
            definition = self._task_ended
        if definition is None:
            await self._hand_on(delivery)
            return
        began, outcome = time.perf_counter(), "lost"
        try:
            if definition.limits and (delivery.kind == "start" or delivery.turn < 0):
                taken = await take_slots(
                    self._bus,
                    delivery,
                    definition.limits,
                    self._partitions,
                    counted_as=delivery.name,
                    each_attempt=False,
                )
                if taken is None:
                    await self._bus.retry(delivery, 0, b"")
                if not taken:
                    outcome = "cancelled" if taken is None else "waits"
                    return
            warm = await self._open(delivery, definition)
            if warm is None:
                # The run or its task has ended: settling acknowledges the entry and frees the instance.
                await self._bus.retry(delivery, 0, b"")
                outcome = "cancelled"
            elif "opentelemetry.trace" in sys.modules and tracing():  # nothing is traced without OpenTelemetry's API
                warm.unsampled = unsampled_ids(delivery, self._bus.keys.namespace)
                if warm.unsampled is None:
                    outcome = await self._traced(delivery, definition, warm)
                else:
                    outcome = await self._run_turn(delivery, definition, warm)
            elif delivery.context and (caller := trace_context.stated(delivery.context)[0]):
                # The agent's code may configure its own SDK of OpenTelemetry: its spans belong under the caller's.
                with within(caller):
                    outcome = await self._run_turn(delivery, definition, warm)
            else:
                outcome = await self._run_turn(delivery, definition, warm)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            # Only names that this app has declared become labels: submitters choose the others.
            self._metrics.agent_turns[delivery.name, outcome].value += 1
            self._metrics.agent_turn_seconds[delivery.name].observe(time.perf_counter() - began)

    async def _run_turn(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """Run one turn until it ends or waits, and commit its effects. Return its outcome."""
        if delivery.run.count("/") >= NESTED_LIMIT:
            return await self._fail(delivery, definition, _too_deep(delivery.name), warm)
        if delivery.silenced:
            silenced = BlockedEventLoop(delivery.silenced, repeatable=False)
            return await self._fail(delivery, definition, failure_of(silenced), warm)
        while True:
            try:
                self._running[delivery] = warm.run
                try:
                    if delivery.span is not NO_SPAN and delivery.span.recording:
                        result = await self._advance_traced(delivery, warm)
                    elif warm.unsampled is not None and not warm.run.begun:
                        with Unsampled(warm.unsampled):  # the run's asyncio tasks begin in it, and stay in it
                            result = await warm.run.advance()
                    else:
                        result = await warm.run.advance()
                    if warm.run.recarried:
                        delivery.context = warm.context = warm.run.carried
                    # Counted before the commit: the calls were made even if it fails.
                    if result.steps:
                        count_model_calls(self._metrics, result.steps)
                    if warm.port.wrote:
                        result = await _flushed(warm.port, result)
                finally:
                    self._running.pop(delivery, None)
                if warm.connection != self._bus.transport.reconnects and (result.journaled or warm.port.last_output):
                    result = await _stored_again(warm, result)
                if isinstance(result, Failed):
                    return await self._fail(delivery, definition, result, warm)
                return await self._commit(delivery, definition, warm, result)
            except BaseException as error:
                warm.run.drop()
                replayed = await self._replay_after(error, delivery, definition, anyway=warm.port.anyway)
            if replayed is None:
                await self._bus.retry(delivery, 0, b"")
                return "repeated"
            replayed.parent, replayed.unsampled = warm.parent, warm.unsampled
            warm = replayed

    async def _replay_after(
        self, error: BaseException, delivery: Delivery, definition: AgentDefinition, *, anyway: bool
    ) -> _Warm | None:
        """Return the run as the journal has it, if others have written there; None if the turn is not this delivery's.

        `anyway` is as in `begin_turn`. Raises any other error.
        """
        match error:
            case JournalMoved():
                logger.info("%s: replaying it", error)
                return await self._replay(delivery, definition)
            case OutputChanged(attempt=attempt):
                try:
                    # A recreated group delivers a turn that another process works on: that one's output stays.
                    begun = await self._bus.begin_turn(delivery, anyway=anyway)
                except TurnTaken as taken:
                    return await self._replay_after(taken, delivery, definition, anyway=anyway)
                if begun is None or not await self._bus.restart_output(delivery, attempt):
                    return None
                logger.warning("%r: %s, so its output starts over", delivery, error)
                return await self._replay(delivery, definition)
            case HandedBack() | TurnTaken():
                if isinstance(error, TurnTaken):
                    self._taken.setdefault((delivery.stream, delivery.entry), time.monotonic())
                    if len(self._taken) > TAKEN_MAX:
                        self._taken.popitem(last=False)
                # The delivery stays pending: another process reclaims it, or this one finds it again.
                raise asyncio.CancelledError(str(error)) from None
            case TurnGone():
                return None
        raise error

    async def _traced(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm) -> str:
        """Run one turn in a span of the task's trace, with links to the spans that produced its results."""
        keys = self._bus.keys
        traceparent, tracestate = trace_context.stated(delivery.context)
        links = await self._bus.answered_by(delivery.task, delivery.run, warm.received) if warm.received else []
        if definition is self._task_ended and not traceparent:
            # The ended task named no trace: its hooks get their own trace, with a link to the task.
            links = [task_traceparent(keys.namespace, self._hooks.ended_task(warm.input), ""), *links]
        traceparent = task_traceparent(keys.namespace, delivery.task, traceparent)
        with delivery_span(
            delivery, keys, self._bus.owner, traceparent=traceparent, tracestate=tracestate, links=links
        ) as delivery.span:
            outcome = await self._run_turn(delivery, definition, warm)
            # Not if this raises: then the turn runs again and sends a span with the same id.
            if warm.parent is not None:
                warm.parent.span.release()
            return outcome

    async def _advance_traced(self, delivery: Delivery, warm: _Warm) -> TurnResult:
        """Run the agent's code in a span, the parent of its code's spans and of the calls that it makes."""
        session = str(_META.decode(delivery.context).get("session_id") or "") if delivery.context else ""
        # A turn that is repeated after a crash gets the same span id, so its earlier calls stay under it.
        span = trace_context.span_of_entry(self._bus.keys.stream(delivery.stream), delivery.entry.decode())
        parent = warm.parent = warm.parent or Parent()
        with (
            under(parent),
            gen_ai.agent_span(delivery.name, session=session, ids=Ids(0, span, 0), held=True) as parent.span,
        ):
            delivery.trace = parent.span.traceparent
            result = await warm.run.advance()
            if isinstance(result, Failed):
                parent.span.failed(result.type, result.message)
                delivery.span.failed(result.type, result.message)
            return result

    def forget(self) -> None:
        """Drop all warm runs: this owner was declared dead, and other processes continue them."""
        while self._warm:
            self._warm.popitem()[1].run.drop()

    def drain(self) -> None:
        self._draining.set()

    def stop_task(self, task: str) -> None:
        ended = EndedPart.of(task)
        for run in [run for run in self._running.values() if run.task_id == ended.task and ended.has(run.run_id)]:
            run.cancel("its caller no longer waits" if ended.path else "the task was cancelled or ended early")
        for place in [place for place in self._warm if place[0] == ended.task and ended.has(place[1])]:
            self._warm.pop(place).run.drop()

    # -- opening -----------------------------------------------------------------------------------------------

    async def _open(self, delivery: Delivery, definition: AgentDefinition) -> _Warm | None:
        """Return the run, ready for its turn: warm, fresh, or replayed from its journal. None: the run has ended."""
        warm = self._warm.pop((delivery.task, delivery.run), None)
        if warm is not None:
            # After a failed attempt the warm run may be ahead of the journal, since another process may have made it.
            same_server = warm.connection == self._bus.transport.reconnects
            if warm.turn == delivery.turn and delivery.attempt == 1 and same_server:
                # First, since a branch continues as soon as it has its result, and emits for this delivery.
                warm.port.resume(delivery)
                delivery.context = warm.context
                warm.received = []
                if delivery.step:
                    warm.run.deliver(delivery.step, delivery.data)
                    warm.received.append(delivery.step)
                if warm.run.flow.waiting:
                    await self._deliver_others(delivery, warm)
                return warm
            warm.run.drop()
        if delivery.kind == "start" and delivery.turn == 0 and delivery.attempt == 1 and not delivery.key:
            # A first turn reads nothing from the broker. Before its first own step, the port checks whether another
            # process has begun this turn (`TurnPort.confirm`).
            started = int(delivery.entry.partition(b"-")[0])
            fields = RunFields(data=delivery.data, started_ms=started, context=delivery.context)
            return self._new_warm(delivery, definition, fields, self._bus.transport.reconnects)
        return await self._replay(delivery, definition)

    async def _replay(self, delivery: Delivery, definition: AgentDefinition) -> _Warm | None:
        """Return the run as the journal has it; None if the delivery is no longer the run's current one."""
        connection = self._bus.transport.reconnects
        fields = await self._load(delivery)
        if fields is None:
            return None
        return self._new_warm(delivery, definition, fields, connection, loaded=True)

    async def _deliver_others(self, delivery: Delivery, warm: _Warm) -> None:
        """Give the run the other results that have arrived."""
        awaited = list(warm.run.awaited)
        try:
            results = await self._bus.results(delivery.task, delivery.run, awaited)
        except BaseException:
            # Nothing refers to it any more, so it would wait forever.
            warm.run.drop()
            raise
        for step, value in zip(awaited, results, strict=True):
            if value is not None:
                warm.run.deliver(step, value)
                warm.received.append(step)

    async def _load(self, delivery: Delivery) -> RunFields | None:
        """Return the stored run; None if the delivery is no longer the run's current one."""
        fields = await self._bus.load(delivery)
        if fields is None or fields.cur != delivery.entry.decode() or fields.status not in _LIVE:
            return None
        # A resume event has no context: the run keeps its task's and passes it on.
        delivery.context = fields.context = delivery.context or fields.context
        return fields

    def _new_warm(
        self,
        delivery: Delivery,
        definition: AgentDefinition,
        fields: RunFields,
        connection: int,
        *,
        loaded: bool = False,
    ) -> _Warm:
        """Return a run from its beginning, with the results in `fields` to replay; `loaded`: the broker had them."""
        port = TurnPort(
            self._bus, delivery, self._app, self._partitions, self._replies, self._manifest_cache,
            loaded=loaded, output_attempt=fields.output.attempt if fields.output is not None else 1,
            draining=self._draining, process=self._outflow,
        )  # fmt: skip
        taken_at = self._taken.get((delivery.stream, delivery.entry)) if self._taken else None
        # The other process has probably ended the turn with a commit that the server lost: no turn lasts this long.
        limit = definition.timeout_seconds + SETTLE_SECONDS
        port.anyway = taken_at is not None and time.monotonic() >= taken_at + limit
        meta = _meta(delivery.context) if delivery.context else NO_META
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
            run.cancel("the caller no longer wants the task's answer")
        warm = _Warm(run, port, fields.turn, fields.started_ms, fields.data, delivery.context, connection)
        if delivery.step:
            warm.received.append(delivery.step)
        return warm

    async def _hand_on(self, delivery: Delivery) -> None:
        """Hand an event for an unknown agent back without counting an attempt, unless no app has that agent."""
        now = time.time() * 1000
        known = await is_announced(self._bus, "agent", delivery.name)
        row = row_of_run(delivery, Status.FAILED, now, now, "")
        await hand_on(self._bus, self._metrics, delivery, known, f"no agent is named {delivery.name}", row)

    # -- ends of a turn ----------------------------------------------------------------------------------------

    async def _commit(
        self, delivery: Delivery, definition: AgentDefinition, warm: _Warm, result: Suspended | Completed
    ) -> str:
        """Commit the turn, and keep a run that waits. Return its outcome."""
        now, steps = time.time_ns() // 1_000_000, result.steps
        if isinstance(result, Suspended):
            mode, body, state = TurnMode.WAITS, result.working_state or b"", b""
        else:
            mode, body, state = TurnMode.COMPLETED, result.answer or result.output, result.state or b""
            row = row_of_run(delivery, Status.COMPLETED, warm.started_ms, now, self._bus.owner, warm.run.attempts_read)
            row.input, row.output = msgspec.Raw(warm.input), msgspec.Raw(result.output)
            steps = [row, *steps]
        record = ENCODER.encode(steps) if steps else b""
        parts, count = parts_of(result, delivery, self._app, self._partitions, warm.port.last_output)
        try:
            if result.journaled and not warm.port.begun and not all(step.message for step in result.journaled):
                await warm.port.begin(warm.run.journal.values)  # all of these steps are another process's
            sent_at = time.perf_counter()
            while True:
                try:
                    committed = await self._bus.commit_turn(
                        delivery, mode, now, record, len(steps), body, state, parts, count
                    )
                    break
                except JournalLost as lost:
                    # A replay would run the steps again, and take a different path with different results.
                    logger.warning("%s: storing it again", lost)
                    run, journaled = warm.run, result.journaled
                    if over := await warm.port.store_again(journaled, run.journal.values, run.answered):
                        raise LimitExceeded(over) from None
        except LimitExceeded as error:
            return await self._fail(delivery, definition, _over_limit(error, result), warm)
        self._metrics.commit_seconds.observe(time.perf_counter() - sent_at)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
            warm.run.drop()
            return "repeated"
        if mode == TurnMode.COMPLETED:
            if state and not delivery.key:
                self._warn_of_lost_state(delivery, warm.run)
            return "completed"
        warm.turn += 1
        place = (delivery.task, delivery.run)
        other = self._warm.pop(place, None)
        if other is not None:
            # A resume was read before the reply to the commit that caused it, and replayed together with this run.
            older, warm = sorted((other, warm), key=lambda each: each.turn)
            older.run.drop()
        self._warm[place] = warm
        if len(self._warm) > self._warm_limit:
            self._warm.popitem(last=False)[1].run.drop()
        return "suspended"

    def _warn_of_lost_state(self, delivery: Delivery, run: Run) -> None:
        name = delivery.name
        if name not in self._lost_state and (lost := run.state.lost_without_key()):
            self._lost_state.add(name)
            logger.warning(
                "agent %r changed ctx.state (%s) in a run without a key, so the change is lost now that the run has "
                "ended (task %s): give the agent a key, as in client.submit(%r, …, key=\"…\"), or use a variable. This "
                "is logged once",
                name, ", ".join(map(quoted, lost[:5])), delivery.task, name,
            )  # fmt: skip

    async def _fail(self, delivery: Delivery, definition: AgentDefinition, failed: Failed, warm: _Warm) -> str:
        warm.run.drop()
        if not failed.counts:
            logger.info("%r is delayed: %s", delivery, failed.message)
            await hand_back(self._bus, delivery)
            return "waits"
        now = time.time_ns() // 1_000_000
        if failed.divergence is not None and self._recorded is not None:
            found = await self._recorded(delivery.task, failed.divergence.run, failed.divergence.step)
            failed.message = error_text(str(failed.divergence.beside(failed.divergence.recorded or found)))
        error = StepFailure(failed.type, failed.message, failed.traceback, now)
        decision = await schedule_retry(self._bus, self._metrics, delivery, definition.retry, failed, error)
        if decision is None:
            return "retried"
        row = row_of_run(delivery, Status.FAILED, warm.started_ms, now, self._bus.owner, warm.run.attempts_read)
        row.input = msgspec.Raw(warm.input)
        row.error = error
        if failed.rejected:
            steps = [row, *failed.steps]
            said: dict[str, object] = {"type": error.type, "message": error.message}
            if failed.output:
                said["output"] = row.output = msgspec.Raw(failed.output)
            payload = ENCODER.encode(said)
            mode = (
                TurnMode.OVER_LIMIT if failed.ends_task else TurnMode.CANCELLED if failed.cancelled else TurnMode.FAILED
            )
            answer = answer_parts(delivery)
            used, count = parts(failed.spends, delivery, self._app), len(failed.spends) + bool(answer)
            await self._bus.commit_turn(
                delivery, mode, now, ENCODER.encode(steps), len(steps), payload, b"", used + answer, count
            )
        else:
            usage = total_usage(spend.usage for spend in failed.spends)
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row, usage, failed.steps)
        return "failed"


def _too_deep(name: str) -> Failed:
    """Return the end of the whole task: each of the runs above would only get the error of the one below."""
    return Failed(
        "LimitExceeded",
        f"more than {NESTED_LIMIT} agents wait inside one another, the last one for {name!r}: an agent that asks "
        "itself, even through others, needs an end, or use a loop",
        retryable=False, rejected=True, ends_task=True,
    )  # fmt: skip


def _over_limit(error: LimitExceeded, result: TurnResult, *, ends_task: bool = True) -> Failed:
    """Return the end of the whole task, or of this run alone, with the steps and the usage of this turn."""
    steps = result.steps if isinstance(result, Failed) else finished_steps(result.steps, result.sends)
    return Failed(
        "LimitExceeded", str(error), retryable=False, rejected=ends_task, ends_task=ends_task, spends=result.spends,
        steps=steps, journaled=result.journaled,
    )  # fmt: skip


async def _stored_again(warm: _Warm, result: TurnResult) -> TurnResult:
    """Store the turn's steps again: the server may have lost its last writes, and no later attempt may repeat them.

    Raises JournalMoved if the turn must be replayed first.
    """
    run = warm.run
    over = await warm.port.store_again(result.journaled, run.journal.values, run.answered)
    return _over_limit(LimitExceeded(over), result) if over else result


async def _flushed(port: TurnPort, result: TurnResult) -> TurnResult:
    """Wait for the turn's writes. If they exceed the limit of the output, the run ends, with its steps and usage."""
    try:
        await port.flush(ends=not isinstance(result, Suspended))
    except LimitExceeded as error:
        return _over_limit(error, result, ends_task=False)
    return result


_LIVE = ("accepted", "running", "waiting")


_META = msgspec.json.Decoder(dict[str, object])


_KNOWN = ("session_id", "metadata", "tenant", "deadline", "topic", "sender", "hooks", "engine", "tools")


def _meta(context: bytes) -> Meta:
    try:
        found = _META.decode(context)
    except msgspec.DecodeError as error:
        raise InvalidInput("x", f"the context cannot be read: {error}") from None
    known = {name: found[name] for name in _KNOWN if name in found}
    if "~chain" in found:
        known["asked"] = True
    return cast(Meta, known)  # the admission has checked it
