"""A step of the broker's clock neither fires all timers at once nor stops them."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from runtime_core.bus.connection import Argument, Reply, RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.state_manager.keeper import ClockWatch
from tests.servers.process import Server

HOUR_MS = 3_600_000


class SteppingClock(RespTransport):
    """A server whose wall clock steps, for TIME and for the functions of one partition."""

    step_ms = 0

    async def step(self, meta: str, ms: int) -> None:
        # To the functions a step of the clock is the same as a step of the offset that they add to it.
        await self.call("HINCRBY", meta, "offset", ms)
        self.step_ms += ms

    def call(self, *args: Argument) -> asyncio.Future[Reply]:
        answer = super().call(*args)
        return asyncio.ensure_future(self._stepped(answer)) if args == ("TIME",) else answer

    async def _stepped(self, answer: asyncio.Future[Reply]) -> Reply:
        seconds, micros = cast(list[bytes], await answer)
        return [b"%d" % (int(seconds) + self.step_ms // 1000), micros]


async def due(bus: EventBus) -> int:
    """Return the milliseconds until the next timer, by the clock of the bus's functions."""
    return (await bus.promote())[1]


async def test_timers_ignore_a_step_of_the_clock(valkey: Server, namespace: str) -> None:
    server = SteppingClock(parse_address(valkey.url))
    await server.connect()
    bus = EventBus(server, Keys(namespace, 0))
    watch = ClockWatch(bus)
    await bus.load_library()
    await bus.transport.call("ZADD", bus.keys.timers, time.time_ns() // 1_000_000 + HOUR_MS // 2, "s|t|r|1")
    await watch.check()
    for step in (HOUR_MS, -2 * HOUR_MS, HOUR_MS):
        await server.step(bus.keys.meta, step)
        await watch.check()
        assert abs(await due(bus) - HOUR_MS // 2) < 10_000
    assert await bus.transport.call("ZCARD", bus.keys.timers) == 1
    await server.close()
