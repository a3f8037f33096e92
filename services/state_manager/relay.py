"""Relays final events to the `replyto` streams that users named: any key, any slot, at least once."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import msgspec

from runtime_core import submission
from runtime_core.bus.delivery import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.transport import Reply
from runtime_core.envelope import to_fields
from runtime_core.errors import BusUnavailable, ServerError
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.02
BATCH = 100


class Relay:
    """Empties a partition's `replies` stream, oldest first; an entry goes when its answer is written."""

    def __init__(self, bus: EventBus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics

    async def run(self) -> None:
        """Relay until cancelled."""
        call, keys = self._bus.transport.call, self._bus.keys
        while True:
            try:
                entries = pairs(cast(list[Reply], await call("XRANGE", keys.replies, "-", "+", "COUNT", BATCH)))
            except BusUnavailable:
                await asyncio.sleep(0.1)
                continue
            if not entries:
                await asyncio.sleep(IDLE_SECONDS)
                continue
            for entry, fields in entries:
                await self._one(dict(zip(fields[::2], fields[1::2], strict=True)))
                await call("XDEL", keys.replies, entry)

    async def _one(self, fields: dict[bytes, bytes]) -> None:
        task = fields[b"t"].decode()
        fact = submission.final(
            task,
            fields[b"type"].decode().rpartition(".")[2],
            fields[b"d"],
            at_ms=time.time_ns() // 1_000_000,
            cause=fields.get(b"id", b"").decode(),
        )
        try:
            await self._bus.transport.call("XADD", fields[b"to"], "*", *to_fields(fact))
        except ServerError as error:
            # A reply that cannot be written must not hold up those behind it.
            logger.warning("replyto %r of task %s cannot be written: %s", fields[b"to"].decode(), task, error)
            await self._bus.transport.call(
                "XADD", self._bus.keys.dead, "*", "reason", "reply_not_writable", "stream", fields[b"to"],
                "group", STATE_MANAGER, "time", time.time_ns() // 1_000_000, "taskid", task,
                "error", msgspec.json.encode({"type": "ServerError", "message": str(error)}), "errors", "[]",
                "d", fields[b"d"],
            )  # fmt: skip
            self._metrics.dead_letters["reply_not_writable"].inc()
