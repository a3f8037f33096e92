"""Handles a delivery of a tool call: run the tool, commit its result, or decide what follows from its failure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from concurrent.futures import Executor

import msgspec

from runtime_core.app import App
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.attempt import NOTHING_USED, failed_from, give_up, log_retry
from runtime_core.consumer.decision import RetryAt, decide, reason_of
from runtime_core.consumer.effects import Failed
from runtime_core.errors import NotReady
from runtime_core.telemetry import gen_ai
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.call import AbandonedThreads, ToolContext
from runtime_core.tools.source import Away, CallableTool, ToolSource
from runtime_core.trajectory.steps import ENCODER, Step, StepError
from runtime_core.usage import Usage

logger = logging.getLogger(__name__)

# How long a call of a tool that this app lacks waits for a handler that has it (a rolling deploy, a wrong pool).
LACKING_SECONDS = 1.0
# How long a call waits whose tool was not ready for it.
NOT_READY_SECONDS = 0.5


class _Context(msgspec.Struct):
    """What a call's context may say; anything else in it is for others."""

    deadline: float | None = None
    traceparent: str = ""
    tracestate: str = ""


_CONTEXT = msgspec.json.Decoder(_Context)
_NO_CONTEXT = _Context()


class CallHandler:
    """Runs tools of one app for the deliveries of one consumer."""

    def __init__(
        self,
        bus: EventBus,
        app: App,
        threads: Executor,
        abandoned: AbandonedThreads,
        metrics: Metrics,
        others: ToolSource | None = None,
    ) -> None:
        """`others` has tools besides the app's own."""
        self._bus = bus
        self._others = others
        self._tools = app.tools
        self._threads = threads
        self._abandoned = abandoned
        self._metrics = metrics
        self._reports: set[asyncio.Task[bool]] = set()

    async def handle(self, delivery: Delivery) -> None:
        tool: CallableTool | None = self._tools.get(delivery.name)
        if tool is None and self._others is not None:
            away = self._others.away(delivery.name)
            if away is not None:
                await self._wait_or_fail(delivery, away)
                return
            tool = self._others.find(delivery.name)
        if tool is None:
            await self._hand_on(delivery)
            return
        started = time.time() * 1000
        if not tool.repeatable and not await self._mark_started(delivery, started):
            return
        known = _CONTEXT.decode(delivery.context) if delivery.context else _NO_CONTEXT
        context = ToolContext(
            task_id=delivery.task,
            run_id=delivery.run,
            attempt=delivery.attempt,
            idempotency_key=f"{delivery.task}/{delivery.run}",
            deadline=known.deadline,
            traceparent=known.traceparent,
            tracestate=known.tracestate,
            on_progress=lambda value: self._report(delivery, value),
        )
        try:
            with gen_ai.tool_span(tool.name, call=delivery.run, traceparent=known.traceparent) as span:
                output = await tool.call(delivery.data, context, self._threads, self._abandoned)
                span.used(delivery.data, output)
        except NotReady as reason:
            logger.info("%r waits: %s", delivery, reason)
            if not tool.repeatable:
                await self._bus.forget_started(delivery)
            await self._bus.retry(delivery, int(NOT_READY_SECONDS * 1000), b"", counts=False)
            return
        except Exception as error:
            failed = failed_from(error, repeatable=tool.repeatable)
            await self._fail(delivery, tool, failed, started, context.used())
            if not tool.repeatable:
                # It was given up: whoever drives its letter again has decided that it may run.
                await self._bus.forget_started(delivery)
            return
        ended = time.time() * 1000
        step = _step(delivery, "completed", started, ended, self._bus.owner)
        step.output = msgspec.Raw(output)
        used = context.used()
        step.usage = used.amounts
        asked = time.perf_counter()
        committed = await self._bus.commit_call(
            delivery, b"K", int(ended), output, ENCODER.encode([step]), 1, used.to_json() if used else b""
        )
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
        if not tool.repeatable:
            await self._bus.forget_started(delivery)

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def stop_task(self, task: str) -> None:
        """The consumer cancels what runs; nothing else is kept."""

    def _report(self, delivery: Delivery, value: bytes) -> None:
        """Send progress without holding up the tool; what cannot be sent is not worth failing for."""
        sending = asyncio.get_running_loop().create_task(self._bus.progress(delivery, value))
        self._reports.add(sending)
        sending.add_done_callback(self._reported)

    def _reported(self, sending: asyncio.Task[bool]) -> None:
        self._reports.discard(sending)
        if not sending.cancelled() and sending.exception() is not None:
            logger.info("progress was not sent: %s", sending.exception())

    async def _mark_started(self, delivery: Delivery, now: float) -> bool:
        if await self._bus.mark_started(delivery):
            return True
        error = StepError(
            "UnknownOutcome",
            f"the tool {delivery.name} may not be repeated, and the process that had started it died: "
            "find out whether it took effect",
            at=now,
        )
        await self._end(delivery, error, now, b"E")
        await self._bus.forget_started(delivery)
        return False

    async def _wait_or_fail(self, delivery: Delivery, away: Away) -> None:
        """A call of a tool that is away for a while is handed back without counting, or ends with an error."""
        if away.wait_seconds is not None:
            await self._bus.retry(delivery, int(away.wait_seconds * 1000), b"", counts=False)
            return
        now = time.time() * 1000
        await self._end(delivery, StepError("Unavailable", away.message, at=now), now, b"E")

    async def _hand_on(self, delivery: Delivery) -> None:
        """A handler that lacks a name hands the call back without counting, unless no app has it."""
        if await self._bus.knows_tool(delivery.name):
            await self._bus.retry(delivery, int(LACKING_SECONDS * 1000), b"", counts=False)
            return
        now = time.time() * 1000
        error = StepError("UnknownName", f"no tool is named {delivery.name}", at=now)
        await give_up(
            self._bus, self._metrics, delivery, "unknown_name", error, _step(delivery, "failed", now, now, "")
        )

    async def _fail(self, delivery: Delivery, tool: CallableTool, failed: Failed, started: float, used: Usage) -> None:
        now = time.time() * 1000
        error = StepError(failed.type, failed.message, failed.traceback, now)
        decision = decide(delivery.attempt, tool.retry, failed, random.random)
        if isinstance(decision, RetryAt):
            self._metrics.retries.inc()
            log_retry(delivery, error, decision.delay_seconds)
            await self._bus.retry(
                delivery,
                int(decision.delay_seconds * 1000),
                ENCODER.encode(error),
                usage=used.to_json() if used else b"",
            )
        elif failed.rejected:
            await self._end(delivery, error, started, b"E", used)
        else:
            step = _step(delivery, "failed", started, now, self._bus.owner)
            step.usage = used.amounts
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, step, used)

    async def _end(
        self, delivery: Delivery, error: StepError, started: float, status: bytes, used: Usage = NOTHING_USED
    ) -> None:
        """Answer the waiting run with an error that is no defect: nothing is kept as a dead letter."""
        now = time.time() * 1000
        step = _step(delivery, "failed", started, now, self._bus.owner)
        step.error = error
        step.usage = used.amounts
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        usage = used.to_json() if used else b""
        await self._bus.commit_call(delivery, status, int(now), payload, ENCODER.encode([step]), 1, usage)


def _step(delivery: Delivery, status: str, started: float, ended: float, owner: str) -> Step:
    step = Step(delivery.run, "tool", delivery.name, status, started, ended)
    step.attempt = delivery.attempt
    step.input = msgspec.Raw(delivery.data)
    step.owner = owner
    if delivery.errors:
        step.errors = msgspec.json.decode(delivery.errors, type=list[StepError])
    return step
