"""Watches the server's clock, which timers use, and its memory, before it is full."""

from __future__ import annotations

import logging
import time
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_memory

CLOCK_STEP_SECONDS = 3.0

logger = logging.getLogger(__name__)


class ClockWatch:
    """Compares the server's clock with this process's monotonic one, at each check."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._clock: tuple[float, float] | None = None

    async def look(self) -> None:
        """Undo a step of the server's clock with an offset that is applied when timers are read.

        A step forward would fire every retry and deadline immediately, and a step back would stop them.
        """
        call, keys = self._bus.transport.call, self._bus.keys
        before = time.monotonic()
        seconds, micros = cast(list[bytes], await call("TIME"))
        after = time.monotonic()
        server = int(seconds) + int(micros) / 1e6
        if self._clock is not None and after - before < CLOCK_STEP_SECONDS / 2:
            step = (server - self._clock[0]) - (after - self._clock[1])
            if abs(step) > CLOCK_STEP_SECONDS:
                await call("HINCRBY", keys.meta, "offset", -round(step * 1000))
                logger.warning("the broker's clock stepped by %.1f s; timers go on as if it had not", step)
        self._clock = (server, after)


MEMORY_LIMIT = 0.8
"""A share of `maxmemory`: above it submits get the answer `overloaded`, while commits continue."""


async def watch_memory(bus: EventBus) -> None:
    """Store in the partition's `meta` whether the broker is over its limit."""
    memory = await server_memory(bus.transport)
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    over = limit > 0 and used > limit * MEMORY_LIMIT
    text = f"the broker uses {used} of {limit} bytes of maxmemory" if over else ""
    await bus.transport.call("HSET", bus.keys.meta, "overload", text)
