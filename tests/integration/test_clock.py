"""Hole 31: a step of the broker's clock neither fires every timer at once nor stops them."""

from __future__ import annotations

import time

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.memory.server import MemoryServer, MemoryTransport
from runtime_core.maintenance.server import ClockWatch

HOUR_MS = 3_600_000


class Clock:
    """The server's wall clock: it goes with the real one, but for its steps."""

    def __init__(self) -> None:
        self.step_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.step_ms


async def due(bus: EventBus) -> int:
    """How long until the next timer, in ms, as the functions of the bus count."""
    return (await bus.promote())[1]


async def test_timers_go_on_as_if_the_clock_had_not_stepped() -> None:
    clock = Clock()
    bus = EventBus(MemoryTransport(MemoryServer(time_ms=clock)), Keys("w", 0))
    watch = ClockWatch(bus)
    await bus.load_library()
    await bus.transport.call("ZADD", bus.keys.timers, clock() + HOUR_MS // 2, "s|t|r|1")
    await watch.look()
    for step in (HOUR_MS, -2 * HOUR_MS, HOUR_MS):
        clock.step_ms += step
        await watch.look()
        assert abs(await due(bus) - HOUR_MS // 2) < 10_000
    assert await bus.transport.call("ZCARD", bus.keys.timers) == 1
