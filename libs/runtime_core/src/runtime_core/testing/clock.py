"""The time of an app under test, which its test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput

POLL_SECONDS = 0.003
RETRY = "e|"
"""How the names of timers of retries begin."""


async def settle(bus: EventBus, timeout: float, *, retries: bool) -> None:
    """Wait until no handler has work. With `retries`, also until no retry waits for its backoff.

    Raises TimeoutError after `timeout` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            while await _open_work(bus, retries):  # noqa: ASYNC110  # the work is on the broker
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"the app is still busy after {timeout:g} s: a tool or an agent takes longer, or a retry waits; "
            "give a larger timeout, or override the slow tool"
        ) from None


async def _open_work(bus: EventBus, retries: bool) -> int:
    work, _ = await bus.idle()
    if retries or not work:
        return work
    # `idle` counts retries that wait for their backoff: the clock can bring them forward.
    return work - sum(member.startswith(RETRY) for member, _ in await bus.timers())


class Clock:
    """The time of an app's timers: sleeps, deadlines, time limits, retries.

    It starts at the real time and runs with it. Schedules keep to the real time.
    """

    def __init__(self, bus: Callable[[], EventBus]) -> None:
        self._bus = bus

    async def now(self) -> datetime:
        """Return the time that timers see, in UTC."""
        return datetime.fromtimestamp(await self._bus().clock_ms() / 1000, UTC)

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, timeout: float = 30
    ) -> None:
        """Move the time forward, and fire the timers that become due, in order.

        After each timer, wait until all work that it caused is done. A sleep that starts on the way counts from there.
        `timeout` is how long that work may take, in real seconds for each timer. Raises TimeoutError, and InvalidInput
        for a negative time.
        """
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if span < timedelta(0):
            raise InvalidInput("clock.advance", f"time cannot go back by {-span}: give a positive time")
        bus = self._bus()
        await settle(bus, timeout, retries=False)
        until = await bus.clock_ms() + round(span.total_seconds() * 1000)
        while (timers := await bus.timers()) and timers[0][1] <= until:
            await self._move_to(bus, timers[0][1])
            await bus.promote()
            await settle(bus, timeout, retries=False)
        await self._move_to(bus, until)

    async def _move_to(self, bus: EventBus, at_ms: int) -> None:
        missing = at_ms - await bus.clock_ms()
        if missing > 0:
            await bus.shift_clock(missing)
