"""Handles a delivery for an agent: run one turn, commit what it asks for, or decide what follows from its failure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from typing import cast

import msgspec

from runtime_core.agents.definition import AgentDefinition
from runtime_core.agents.ports import Meta
from runtime_core.agents.run import Run
from runtime_core.agents.turn_commit import parts_of, row_of_run
from runtime_core.app import App
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.attempt import give_up, log_retry
from runtime_core.consumer.decision import RetryAt, decide, reason_of
from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.errors import BusError, Fenced, InvalidInput, LimitExceeded, WeftError
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.steps import ENCODER, StepError

logger = logging.getLogger(__name__)

# How long an event for an agent that this app lacks waits for a handler that has it.
LACKING_SECONDS = 1.0
# Runs that wait are kept warm up to this many; one that was dropped is replayed.
WARM_RUNS = 20_000


class _TurnGone(WeftError):
    """The turn is no longer this entry's: another owner goes on with the run."""


class TurnPort:
    """What a running turn writes on the broker before its commit, for the delivery that it handles now."""

    __slots__ = ("_bus", "_emits", "delivery")

    def __init__(self, bus: EventBus, delivery: Delivery) -> None:
        self._bus = bus
        self.delivery = delivery
        self._emits: list[asyncio.Task[bool]] = []

    async def record(self, step: str, digest: str, status: bytes, payload: bytes) -> bytes:
        stored = await self._bus.record(
            self.delivery, step, b"%b%b%013d%b" % (digest.encode(), status, _now(), payload)
        )
        if stored is None:
            raise _TurnGone(f"{self.delivery!r} is handled by another owner")
        return stored

    def emit(self, step: str, digest: str, data: bytes) -> None:
        value = b"%bK%013dnull" % (digest.encode(), _now())
        task = asyncio.get_running_loop().create_task(self._bus.emit(self.delivery, step, value, data))
        self._emits.append(task)

    async def flush(self) -> None:
        """Wait for the deltas on their way: the commit must not overtake them. Raises what they raised."""
        if self._emits:
            emits, self._emits = self._emits, []
            for result in await asyncio.gather(*emits, return_exceptions=True):
                if isinstance(result, Fenced | BusError):
                    raise result


class _Warm:
    """A run in memory that waits, with the port of its last turn."""

    __slots__ = ("input", "port", "run", "started_ms", "turn")

    def __init__(self, run: Run, port: TurnPort, turn: int, started_ms: int, data: bytes) -> None:
        self.run = run
        self.input = data
        self.port = port
        self.turn = turn
        self.started_ms = started_ms


class TurnHandler:
    """Runs agents of one app for the deliveries of one consumer. A run that waits stays warm while there is room."""

    def __init__(
        self, bus: EventBus, app: App, metrics: Metrics, *, partitions: int = 1, warm_runs: int = WARM_RUNS
    ) -> None:
        self._bus = bus
        self._app = app
        self._agents = app.agents
        self._metrics = metrics
        self._warm: OrderedDict[tuple[str, str], _Warm] = OrderedDict()
        self._warm_limit = warm_runs
        self._partitions = partitions
        self._running: dict[str, set[Run]] = {}

    async def handle(self, delivery: Delivery) -> None:
        definition = self._agents.get(delivery.name)
        if definition is None:
            await self._hand_on(delivery)
            return
        warm = await self._open(delivery, definition)
        if warm is None:
            # The run or its task is over: settling acknowledges the entry and frees the instance.
            await self._bus.retry(delivery, 0, b"")
            return
        running = self._running.setdefault(delivery.task, set())
        running.add(warm.run)
        try:
            result = await warm.run.advance()
            await warm.port.flush()
        except _TurnGone:
            warm.run.drop()
            await self._bus.retry(delivery, 0, b"")
            return
        except BaseException:
            warm.run.drop()
            raise
        finally:
            running.discard(warm.run)
            if not running:
                self._running.pop(delivery.task, None)
        match result:
            case Suspended():
                await self._suspend(delivery, definition, warm, result)
            case Completed():
                await self._complete(delivery, warm, result)
            case Failed():
                warm.run.drop()
                await self._fail(delivery, definition, result, warm.started_ms)

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
            if delivery.kind == "resume" and warm.turn == delivery.turn and delivery.attempt == 1:
                # First: a branch goes on as soon as it has its result, and what it emits is this delivery's.
                warm.port.delivery = delivery
                try:
                    await self._bring_results(delivery, warm.run)
                except BaseException:
                    # It is in nobody's hands by now, and would wait for ever.
                    warm.run.drop()
                    raise
                return warm
            warm.run.drop()
        if delivery.kind == "start" and delivery.deliveries == 1 and delivery.attempt == 1 and not delivery.key:
            return self._fresh(delivery, definition)
        return await self._replayed(delivery, definition)

    async def _bring_results(self, delivery: Delivery, run: Run) -> None:
        """Give the run the result that woke it, and those of its other steps that have come in."""
        if delivery.step:
            run.deliver(delivery.step, delivery.data)
        others = [step for step in run.awaited if step != delivery.step]
        if others:
            for step, value in zip(others, await self._bus.results(delivery.task, delivery.run, others), strict=True):
                if value is not None:
                    run.deliver(step, value)

    def _fresh(self, delivery: Delivery, definition: AgentDefinition) -> _Warm:
        port = TurnPort(self._bus, delivery)
        started = int(delivery.entry.partition(b"-")[0])
        run = Run(
            definition=definition,
            task_id=delivery.task,
            run_id=delivery.run,
            key=delivery.key,
            input=delivery.data,
            attempt=delivery.attempt,
            started_ms=started,
            journal={},
            pending={},
            state=b"",
            port=port,
            owner=self._bus.owner,
            meta=_meta(delivery.context),
            functions=self._app.functions,
        )
        return _Warm(run, port, 0, started, delivery.data)

    async def _replayed(self, delivery: Delivery, definition: AgentDefinition) -> _Warm | None:
        fields = await self._bus.load(delivery)
        if fields is None or fields.cur != delivery.entry.decode() or fields.status not in _LIVE:
            return None
        port = TurnPort(self._bus, delivery)
        run = Run(
            definition=definition,
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
            meta=_meta(delivery.context or fields.context),
            unrecorded=fields.unrecorded,
            overrides=fields.overrides,
            functions=self._app.functions,
        )
        return _Warm(run, port, fields.turn, fields.started_ms, fields.data)

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

    async def _suspend(self, delivery: Delivery, definition: AgentDefinition, warm: _Warm, result: Suspended) -> None:
        parts, count = parts_of(result, delivery, self._app, self._partitions)
        record = ENCODER.encode(result.steps) if result.steps else b""
        asked = time.perf_counter()
        try:
            committed = await self._bus.commit_turn(
                delivery, "w", _now(), record, len(result.steps), result.working_state or b"", b"", parts, count
            )
        except LimitExceeded as error:
            warm.run.drop()
            await self._fail(
                delivery,
                definition,
                Failed("LimitExceeded", str(error), retryable=False, rejected=True),
                warm.started_ms,
            )
            return
        except BaseException:
            warm.run.drop()
            raise
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            warm.run.drop()
            return
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

    async def _complete(self, delivery: Delivery, warm: _Warm, result: Completed) -> None:
        now = _now()
        row = row_of_run(delivery, "completed", warm.started_ms, now, self._bus.owner)
        row.input = msgspec.Raw(warm.input)
        row.output = msgspec.Raw(result.output)
        steps = [row, *result.steps]
        parts, count = parts_of(result, delivery, self._app, self._partitions)
        asked = time.perf_counter()
        committed = await self._bus.commit_turn(
            delivery, "c", now, ENCODER.encode(steps), len(steps), result.output, result.state or b"", parts, count
        )
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()

    async def _fail(self, delivery: Delivery, definition: AgentDefinition, failed: Failed, started_ms: float) -> None:
        now = _now()
        error = StepError(failed.type, failed.message, failed.traceback, now)
        decision = decide(delivery.attempt, definition.retry, failed, random.random)
        if isinstance(decision, RetryAt):
            self._metrics.retries.inc()
            log_retry(delivery, error, decision.delay_seconds)
            await self._bus.retry(delivery, int(decision.delay_seconds * 1000), ENCODER.encode(error))
            return
        row = row_of_run(delivery, "failed", started_ms, now, self._bus.owner)
        row.error = error
        if failed.rejected:
            steps = [row, *failed.steps]
            payload = ENCODER.encode({"type": error.type, "message": error.message})
            await self._bus.commit_turn(delivery, "f", now, ENCODER.encode(steps), len(steps), payload, b"", (), 0)
        else:
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row)


_LIVE = ("accepted", "running", "waiting")


def _now() -> int:
    return time.time_ns() // 1_000_000


_META = msgspec.json.Decoder(dict[str, object])


def _meta(context: bytes) -> Meta:
    if not context:
        return Meta()
    try:
        found = _META.decode(context)
    except msgspec.DecodeError as error:
        raise InvalidInput("x", f"the context cannot be read: {error}") from None
    known = {name: found[name] for name in ("session_id", "metadata", "deadline") if name in found}
    return cast(Meta, known)  # the admission wrote it
