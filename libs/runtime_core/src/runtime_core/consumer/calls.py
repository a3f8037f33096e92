"""What handlers of tool calls and of engine steps share: settling an attempt, and its row in the record."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import Delivery
from runtime_core.consumer.attempt import NOTHING_USED, give_up, hand_back, hand_on, schedule_retry
from runtime_core.consumer.decision import reason_of
from runtime_core.consumer.effects import Failed
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.record.step import ENCODER, Step, StepError
from runtime_core.record.usage import Usage
from runtime_core.telemetry.attributes import DUPLICATE
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

PIECE_BYTES = 1024
"""The overhead of a report besides its data: a task, its command and its reply."""
REPORTED_BYTES = 256 * 1024
"""How much progress of one call may be on its way to the broker."""

Place = tuple[str, bytes]


class _Reports:
    """Progress of one call on its way."""

    __slots__ = ("bytes", "latest", "sending")

    def __init__(self) -> None:
        self.sending: set[asyncio.Task[bool]] = set()
        self.bytes = 0
        self.latest: bytes | None = None
        """The report to send once there is room."""


class Calls:
    """Settles calls of one kind (`tool`, `ray`, …) for the deliveries of one consumer. Times are epoch milliseconds."""

    def __init__(self, bus: EventBus, metrics: Metrics, kind: str) -> None:
        self._bus = bus
        self._metrics = metrics
        self._kind = kind
        self._reports: dict[Place, _Reports] = {}

    async def complete(self, delivery: Delivery, output: bytes, started: float, used: Usage = NOTHING_USED) -> bool:
        """Commit a result (JSON). Return False if the call already has an answer, or its task is over."""
        ended = time.time() * 1000
        row = self._row(delivery, "completed", started, ended, used)
        row.output = msgspec.Raw(output)
        asked = time.perf_counter()
        committed = await self._bus.commit_call(
            delivery, b"K", int(ended), output, ENCODER.encode([row]), 1, _json(used)
        )
        self._metrics.commit_seconds.observe(time.perf_counter() - asked)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
        return committed

    async def fail(
        self, delivery: Delivery, retry: RetryPolicy, failed: Failed, started: float, used: Usage = NOTHING_USED
    ) -> bool:
        """Apply the decision about a failed attempt. Return True if the call is retried."""
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
        """Answer the waiting run with an expected error: no dead letter is kept."""
        now = time.time() * 1000
        row = self._row(delivery, "failed", started, now, used)
        row.error = error
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        await self._bus.commit_call(delivery, b"E", int(now), payload, ENCODER.encode([row]), 1, _json(used))

    async def wait(self, delivery: Delivery, seconds: float) -> None:
        """Hand the delivery back for so long, without counting."""
        await hand_back(self._bus, delivery, seconds)

    async def hand_on(self, delivery: Delivery, known: bool, message: str) -> None:
        """This app lacks the name: others get the call, unless no app has it."""
        now = time.time() * 1000
        row = self._row(delivery, "failed", now, now, NOTHING_USED)
        await hand_on(self._bus, self._metrics, delivery, known, message, row)

    def report(self, delivery: Delivery, value: bytes) -> None:
        """Send progress (JSON) without delaying the call; a failure to send does not fail the call.

        If the call reports faster than the broker accepts, only its latest report is sent.
        """
        reports = self._reports.setdefault((delivery.stream, delivery.entry), _Reports())
        if reports.bytes > REPORTED_BYTES:
            reports.latest = value
            return
        reports.bytes += len(value) + PIECE_BYTES
        sending = asyncio.get_running_loop().create_task(self._bus.progress(delivery, value))
        reports.sending.add(sending)
        sending.add_done_callback(partial(self._reported, delivery, len(value) + PIECE_BYTES))

    def _reported(self, delivery: Delivery, size: int, sending: asyncio.Task[bool]) -> None:
        place = (delivery.stream, delivery.entry)
        reports = self._reports[place]
        reports.sending.discard(sending)
        reports.bytes -= size
        if sending.cancelled():
            reports.latest = None
        elif (error := sending.exception()) is not None:
            logger.info("progress was not sent: %s", error)
        if reports.latest is not None and reports.bytes <= REPORTED_BYTES:
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
