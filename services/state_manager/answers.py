"""Writes facts to the streams that users named with `replyto`: at least once, with the same event id."""

from __future__ import annotations

import logging
import time

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.transport import Transport
from runtime_core.envelope import Envelope, to_fields
from runtime_core.errors import ServerError
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

NOT_WRITABLE = "undeliverable"


class Answers:
    """Appends facts to any key; one that cannot be written (another type, no right) costs that answer only."""

    def __init__(self, edge: Transport, bus: EventBus, metrics: Metrics) -> None:
        """`edge` is a connection for keys of any slot; what cannot be delivered is kept in the partition of `bus`."""
        self._edge = edge
        self._bus = bus
        self._metrics = metrics

    async def send(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact`; where that is refused, keep it as a dead letter. Raises BusUnavailable only."""
        try:
            await self._edge.call("XADD", reply_to, "*", *to_fields(fact))
        except ServerError as error:
            logger.warning("replyto %r of task %s cannot be written: %s", reply_to, fact.taskid, error)
            reason = msgspec.json.encode({"type": "ServerError", "message": str(error)})
            await self._bus.transport.call(
                "XADD", self._bus.keys.dead, "*", "reason", NOT_WRITABLE, "stream", reply_to, "group", STATE_MANAGER,
                "time", time.time_ns() // 1_000_000, "taskid", fact.taskid, "error", reason, "errors", "[]",
                "d", fact.data,
            )  # fmt: skip
            self._metrics.dead_letters[NOT_WRITABLE].inc()
