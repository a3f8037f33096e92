"""Keeps a partition tidy while this process leads: its chores in turn, the server's clock and its memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER
from runtime_core.bus.namespace import server_memory
from runtime_core.errors import BusUnavailable, ServerError, is_temporary
from runtime_core.maintenance.engines import EngineWatch
from runtime_core.maintenance.sweeps import LetterKeeper, forget_old_submits, sweep_index, sweep_quarantine

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


Chore = Callable[[], Awaitable[object]]

INTERVAL_SECONDS = 0.5
REFILL = 32
"""Waiting tasks move onto a work stream up to this many unread entries."""
RETENTION_SECONDS = 3600
"""The retention of ended tasks, if neither the settings nor the namespace set it."""


class Keeper:
    """One partition's housekeeping; only the leader runs it."""

    def __init__(
        self,
        bus: EventBus,
        letters: LetterKeeper | None = None,
        *,
        retention_seconds: float | None = None,
        follow_record: Chore | None = None,
        measure: Chore | None = None,
    ) -> None:
        """`retention_seconds`: None reads the namespace's.

        `follow_record`: None forgets the record, because no service reads it.
        """
        self._bus = bus
        self._retention_seconds = retention_seconds
        self._chores: tuple[Chore, ...] = (
            follow_record or self._forget_record,
            # Agent-handlers do this themselves, unless all of them are of a release that does not know of queues.
            partial(bus.refill, REFILL),
            bus.trim_record,
            partial(watch_memory, bus),
            ClockWatch(bus).look,
            EngineWatch(bus).look,
            partial(forget_old_submits, bus),
            self._sweep_index,
            partial(sweep_quarantine, bus),
            (letters or LetterKeeper(bus)).look,
            *((measure,) if measure else ()),
        )

    async def run(self) -> None:
        """Run the housekeeping until cancelled; wait for an unavailable broker."""
        while True:
            try:
                await self.tidy()
            except BusUnavailable:
                logger.info("the broker is away; chores wait")
            await asyncio.sleep(INTERVAL_SECONDS)

    async def tidy(self) -> None:
        """Run each job once. At `maxmemory` the server refuses some, and the others free memory."""
        for chore in self._chores:
            try:
                await chore()
            except ServerError as error:
                if not is_temporary(error):
                    raise
                logger.debug("a chore waits: %s", error)

    async def _forget_record(self) -> None:
        for group in (STATE_MANAGER, TRAJECTORY_RECORDER):
            await self._bus.publish_cursor(group, "$")

    async def _sweep_index(self) -> None:
        seconds = self._retention_seconds
        if seconds is None:
            stored = await self._bus.transport.call("HGET", self._bus.keys.meta, "retention")
            seconds = float(cast("bytes | None", stored) or RETENTION_SECONDS)
        await sweep_index(self._bus, int(seconds * 1000))
