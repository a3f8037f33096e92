"""Keeps a partition tidy: runs its housekeeping, one job after the other, while this process leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER
from runtime_core.errors import BusUnavailable, ServerError, is_temporary
from runtime_core.maintenance.engines import EngineWatch
from runtime_core.maintenance.server import ClockWatch, watch_memory
from runtime_core.maintenance.sweeps import LetterKeeper, forget_old_submits, sweep_index, sweep_quarantine

logger = logging.getLogger(__name__)

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
