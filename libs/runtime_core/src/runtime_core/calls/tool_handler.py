"""Handles deliveries of tool calls: runs the tool and commits its result, or decides how to treat its error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from itertools import product
from typing import Any

import msgspec

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.spans import call_span
from runtime_core.consumer.announcements import is_announced
from runtime_core.consumer.effects import Failed
from runtime_core.consumer.in_flight import cancelled_by_code
from runtime_core.consumer.settle import Calls, failed_from, take_slots
from runtime_core.declare.tool import (
    AbandonedThreads,
    CallableTool,
    Tool,
    ToolContext,
    ToolSource,
    ToolUnavailable,
    is_allowed,
    not_allowed,
)
from runtime_core.errors import BlockedEventLoop, NotReady
from runtime_core.telemetry import gen_ai
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import SHOWN_OUTCOMES
from runtime_core.telemetry.spans import NO_SPAN, tracing
from runtime_core.wire.step import NOTHING_USED, StepFailure

logger = logging.getLogger(__name__)

# How long a call waits if its tool was not ready.
NOT_READY_SECONDS = 0.5
NOT_ALLOWED = "NotAllowed"
"""The type of the ToolError of a call that the task, or the calling agent, does not allow."""
NAMES_SHOWN = 20
"""How many of the app's tools an error about an unknown name lists."""


class _ToolContext(msgspec.Struct):
    """The members of a call's context that concern tools."""

    deadline: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    tools: list[list[str]] = []
    """The lists that must all allow a tool; see `is_allowed`."""
    tools_conf: dict[str, dict[str, Any]] = {}  # Any: JSON


_CONTEXT = msgspec.json.Decoder(_ToolContext)
_NO_CONTEXT = _ToolContext()


class CallHandler:
    """Runs an app's tools for the deliveries of one consumer."""

    def __init__(
        self,
        bus: EventBus,
        tools: Mapping[str, Tool],
        threads: Executor,
        abandoned: AbandonedThreads,
        metrics: Metrics,
        others: ToolSource | None = None,
        *,
        partitions: int = 1,
    ) -> None:
        """`others` has further tools, such as those of MCP servers."""
        self._partitions = partitions
        self._bus = bus
        self._others = others
        self._tools = tools
        self._threads = threads
        self._abandoned = abandoned
        self._metrics = metrics
        for name, outcome in product(tools, SHOWN_OUTCOMES):
            metrics.tool_calls[metrics.tool_label(name), outcome]  # exports 0 from the start
        self._calls = Calls(bus, metrics, "tool")

    async def handle(self, delivery: Delivery) -> None:
        if not tracing():
            await self._handle(delivery)
            return
        with call_span(delivery, self._bus.keys, self._bus.owner):
            await self._handle(delivery)

    async def _handle(self, delivery: Delivery) -> None:
        tool: CallableTool | None = self._tools.get(delivery.name)
        if tool is None and self._others is not None:
            away = self._others.away(delivery.name)
            if away is not None:
                await self._wait_or_fail(delivery, away)
                return
            tool = self._others.find(delivery.name)
        if tool is None:
            known = await is_announced(self._bus, "tool", delivery.name)
            names = ", ".join(sorted(self._tools)[:NAMES_SHOWN]) or "none"
            await self._calls.hand_on(delivery, known, f"no tool is named {delivery.name}; this app has {names}")
            return
        began, outcome = time.perf_counter(), "lost"
        try:
            outcome = await self._call(delivery, tool)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            # Only for existing tools: a model may call any name, which would create a metric series each.
            name = self._metrics.tool_label(tool.name)
            self._metrics.tool_calls[name, outcome].inc()
            self._metrics.tool_call_seconds[name].observe(time.perf_counter() - began)

    async def _call(self, delivery: Delivery, tool: CallableTool) -> str:
        """Make one attempt and settle it. Return its outcome."""
        started = time.time() * 1000
        members = _CONTEXT.decode(delivery.context) if delivery.context else _NO_CONTEXT
        # Before anything is marked as started: every call of a task passes here, whoever made it.
        if members.tools and not is_allowed(members.tools, delivery.name):
            refused = Failed(NOT_ALLOWED, not_allowed(members.tools, delivery.name), retryable=False, rejected=True)
            await self._calls.fail(delivery, tool.retry, refused, started, NOTHING_USED)
            return "failed"
        if tool.limits:
            taken = await take_slots(
                self._bus, delivery, tool.limits, self._partitions, counted_as=tool.counted_as, each_attempt=True
            )
            if not taken:
                if taken is None:
                    await self._bus.retry(delivery, 0, b"", counts=False)
                return "repeated" if taken is None else "waits"
        if not tool.repeatable:
            marked = await self._bus.mark_started(delivery)
            if marked is None:
                await self._bus.retry(delivery, 0, b"", counts=False)
                return "repeated"
            if not marked:
                await self._end_unknown(delivery, started)
                return "failed"
        if delivery.silenced:
            return await self._end_silenced(delivery, tool, started)
        context = ToolContext(
            task_id=delivery.task,
            run_id=delivery.run,
            attempt=delivery.attempt,
            idempotency_key=f"{delivery.task}/{delivery.run}",
            deadline=members.deadline,
            traceparent=members.traceparent,
            tracestate=members.tracestate,
            conf=members.tools_conf.get(tool.name),
            on_progress=lambda value: self._calls.report(delivery, value),
        )
        try:
            if delivery.span is NO_SPAN:
                output = await tool.call(delivery.data, context, self._threads, self._abandoned)
            else:
                output = await self._call_traced(delivery, tool, context)
        except NotReady as reason:
            logger.info("%r waits: %s", delivery, reason)
            if not tool.repeatable:
                await self._bus.forget_started(delivery)
            await self._calls.wait(delivery, NOT_READY_SECONDS)
            return "waits"
        except (Exception, asyncio.CancelledError) as error:
            failed = failed_from(_error_of(tool.name, error), repeatable=tool.repeatable)
            again = await self._calls.fail(delivery, tool.retry, failed, started, context.used())
            return "retried" if again else "failed"
        committed = await self._calls.complete(delivery, output, started, context.used())
        return "completed" if committed else "repeated"

    async def _call_traced(self, delivery: Delivery, tool: CallableTool, context: ToolContext) -> bytes:
        with gen_ai.tool_span(tool.name, call=delivery.run) as span:
            if span.recording:
                delivery.trace = context.traceparent = span.traceparent
            output = await tool.call(delivery.data, context, self._threads, self._abandoned)
            span.used(delivery.data, output)
        return output

    def forget(self) -> None:
        """Does nothing: a call keeps no state here."""

    def drain(self) -> None:
        """A call is one step: it has begun."""

    def stop_task(self, task: str) -> None:
        """Does nothing: the consumer cancels running calls."""

    async def _end_silenced(self, delivery: Delivery, tool: CallableTool, now: float) -> str:
        silenced = failed_from(BlockedEventLoop(delivery.silenced, repeatable=False))
        await self._calls.fail(delivery, tool.retry, silenced, now, NOTHING_USED)
        return "failed"

    async def _end_unknown(self, delivery: Delivery, now: float) -> None:
        error = StepFailure(
            "UnknownOutcome",
            f"the tool {delivery.name} may not be repeated, and the process that had started it died: "
            "find out whether it took effect",
            at=now,
        )
        await self._calls.end(delivery, error, now)

    async def _wait_or_fail(self, delivery: Delivery, away: ToolUnavailable) -> None:
        """Hand back a call of an unavailable tool without counting an attempt, or end it with an error."""
        if away.wait_seconds is not None:
            await self._calls.wait(delivery, away.wait_seconds)
            return
        now = time.time() * 1000
        await self._calls.end(delivery, StepFailure("Unavailable", away.message, at=now), now)


def _error_of(tool: str, error: Exception | asyncio.CancelledError) -> Exception:
    """Return the error of a call that ended with this one. Raises CancelledError unless the tool's code has cancelled
    itself.
    """
    if not isinstance(error, asyncio.CancelledError):
        return error
    if not cancelled_by_code():
        raise error
    return RuntimeError(f"tool {tool!r} cancelled its own task, asyncio.current_task()")
