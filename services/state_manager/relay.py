"""Relays final events to the `replyto` streams that users named: any key, any slot, at least once."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from runtime_core import submission
from runtime_core.bus.delivery import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.transport import Reply
from runtime_core.errors import BusUnavailable
from runtime_core.telemetry.metrics import Metrics
from services.state_manager.answers import Answers

IDLE_SECONDS = 0.02
BATCH = 100


class Relay:
    """Empties a partition's `replies` stream, oldest first; an entry goes when its answer is written."""

    def __init__(self, bus: EventBus, metrics: Metrics) -> None:
        self._bus = bus
        self._answers = Answers(bus, metrics)

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
        # A reply that cannot be written must not hold up those behind it.
        await self._answers.send(fields[b"to"].decode(), fact)
