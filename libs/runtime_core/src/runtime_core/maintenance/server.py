"""Watches the server's clock, by which timers run, and its memory, before it is full."""

from __future__ import annotations

import logging
import time
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_memory

CLOCK_STEP_SECONDS = 3.0

logger = logging.getLogger(__name__)


class ClockWatch:
    """Compares the server's clock with this process's monotonic one, from look to look."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._clock: tuple[float, float] | None = None

    async def look(self) -> None:
        """Undo a step of the server's clock by an offset that the timers are read with.

        A step forward would fire every retry and deadline at once, one back would stop them.
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
"""Of `maxmemory`: above it submits are answered with `overloaded`, while commits go on."""


async def watch_memory(bus: EventBus) -> None:
    """Say in the partition's `meta` that the broker is over its limit, or that it is no more."""
    memory = await server_memory(bus.transport)
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    over = limit > 0 and used > limit * MEMORY_LIMIT
    text = f"the broker uses {used} of {limit} bytes of maxmemory" if over else ""
    await bus.transport.call("HSET", bus.keys.meta, "overload", text)
