"""Settles calls of tools and engine functions: result, error, retry or dead letter, and the row in the record."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.effects import Failed
from runtime_core.consumer.failure import NOTHING_USED, give_up, hand_back, hand_on, reason_of, schedule_retry
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.record.step import ENCODER, Step, StepError, Usage
from runtime_core.telemetry.attributes import DUPLICATE
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

WRITE_OVERHEAD_BYTES = 1024
"""The memory that one unanswered write takes besides its data: a task, its command and its reply."""
MAX_REPORTS_BYTES = 256 * 1024
"""How many bytes of one call's progress may be unanswered by the broker."""

Place = tuple[str, bytes]


class _Reports:
    """The unanswered progress reports of one call."""

    __slots__ = ("bytes", "latest", "sending")

    def __init__(self) -> None:
        self.sending: set[asyncio.Task[bool]] = set()
        self.bytes = 0
        self.latest: bytes | None = None
        """The report to send when there is room again."""


class Calls:
    """Settles calls of one kind (`tool`, `ray`, …) for one consumer. Times are epoch milliseconds."""

    def __init__(self, bus: EventBus, metrics: Metrics, kind: str) -> None:
        self._bus = bus
        self._metrics = metrics
        self._kind = kind
        self._reports: dict[Place, _Reports] = {}

    async def complete(self, delivery: Delivery, output: bytes, started: float, used: Usage = NOTHING_USED) -> bool:
        """Commit a result (JSON). Return False if the call already has an answer, or its task has ended."""
        ended = time.time() * 1000
        row = self._row(delivery, "completed", started, ended, used)
        row.output = msgspec.Raw(output)
        sent_at = time.perf_counter()
        committed = await self._bus.commit_call(
            delivery, b"K", int(ended), output, ENCODER.encode([row]), 1, _json(used)
        )
        self._metrics.commit_seconds.observe(time.perf_counter() - sent_at)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
        return committed

    async def fail(
        self, delivery: Delivery, retry: RetryPolicy, failed: Failed, started: float, used: Usage = NOTHING_USED
    ) -> bool:
        """Decide what follows a failed attempt, and do it. Return True if the call is retried."""
        now = time.time() * 1000
        error = StepError(failed.type, failed.message, failed.traceback, now)
        delivery.span.failed(failed.type, failed.message)
        decision = await schedule_retry(self._bus, self._metrics, delivery, retry, failed, error, used)
        if decision is None:
            return True
        if failed.rejected:
            await self.end(delivery, error, started, used)
        else:
            row = self._row(delivery, "failed", started, now, used)
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row, used)
        return False

    async def end(self, delivery: Delivery, error: StepError, started: float, used: Usage = NOTHING_USED) -> None:
        """Answer the waiting run with an expected error, without a dead letter."""
        now = time.time() * 1000
        row = self._row(delivery, "failed", started, now, used)
        row.error = error
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        await self._bus.commit_call(delivery, b"E", int(now), payload, ENCODER.encode([row]), 1, _json(used))

    async def wait(self, delivery: Delivery, seconds: float) -> None:
        """Delay the delivery without counting an attempt."""
        await hand_back(self._bus, delivery, seconds)

    async def hand_on(self, delivery: Delivery, known: bool, message: str) -> None:
        """Delay a call whose name this app lacks, for another app. If none has it (not `known`), give it up."""
        now = time.time() * 1000
        row = self._row(delivery, "failed", now, now, NOTHING_USED)
        await hand_on(self._bus, self._metrics, delivery, known, message, row)

    def report(self, delivery: Delivery, value: bytes) -> None:
        """Send progress (JSON) without delaying or failing the call.

        If the call reports faster than the broker accepts, only the latest report is sent.
        """
        reports = self._reports.setdefault((delivery.stream, delivery.entry), _Reports())
        if reports.bytes > MAX_REPORTS_BYTES:
            reports.latest = value
            return
        reports.bytes += len(value) + WRITE_OVERHEAD_BYTES
        sending = asyncio.get_running_loop().create_task(self._bus.progress(delivery, value))
        reports.sending.add(sending)
        sending.add_done_callback(partial(self._reported, delivery, len(value) + WRITE_OVERHEAD_BYTES))

    def _reported(self, delivery: Delivery, size: int, sending: asyncio.Task[bool]) -> None:
        place = (delivery.stream, delivery.entry)
        reports = self._reports[place]
        reports.sending.discard(sending)
        reports.bytes -= size
        if sending.cancelled():
            reports.latest = None
        elif (error := sending.exception()) is not None:
            logger.info("could not send progress: %s", error)
        if reports.latest is not None and reports.bytes <= MAX_REPORTS_BYTES:
            latest, reports.latest = reports.latest, None
            self.report(delivery, latest)
        if not reports.sending:
            del self._reports[place]

    def _row(self, delivery: Delivery, status: str, started: float, ended: float, used: Usage) -> Step:
        row = Step(delivery.run, self._kind, delivery.name, status, started, ended)
        row.attempt = delivery.attempt
        row.input = msgspec.Raw(delivery.data)
        row.owner = self._bus.owner
        row.usage = used.amounts
        if delivery.errors:
            row.errors = msgspec.json.decode(delivery.errors, type=list[StepError])
        return row


def _json(used: Usage) -> bytes:
    return used.to_json() if used else b""
