"""Keeps a partition tidy: the chores of `runtime_core.maintenance`, one after the other, while this replica leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusUnavailable, ServerError, is_temporary
from runtime_core.maintenance.ends import Ends
from runtime_core.maintenance.engines import EngineWatch
from runtime_core.maintenance.measures import Measures
from runtime_core.maintenance.server import ClockWatch, watch_memory
from runtime_core.maintenance.sweeps import LetterKeeper, forget_old_submits, sweep_index, sweep_quarantine
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5
REFILL = 32
"""Up to how many unread entries of a work stream tasks are moved that wait for their tenants' turns."""


class Housekeeper:
    """One partition's chores; run by the leader only."""

    def __init__(
        self, bus: EventBus, metrics: Metrics, retention_seconds: float, measures: Measures, letters: LetterKeeper
    ) -> None:
        self._bus = bus
        self._measures = measures
        self._letters = letters
        self._retention_ms = int(retention_seconds * 1000)
        self._ends = Ends(bus, metrics)
        self._clock = ClockWatch(bus)
        self._engines = EngineWatch(bus)

    async def run(self) -> None:
        """Do the chores until cancelled; a broker that is away is waited for."""
        chores: tuple[Callable[[], Awaitable[object]], ...] = (
            self._ends.follow,
            # Agent-handlers do this themselves, unless all of them are of a release that does not know of queues.
            lambda: self._bus.refill(REFILL),
            self._bus.trim_record,
            lambda: watch_memory(self._bus),
            self._clock.look,
            self._engines.look,
            lambda: forget_old_submits(self._bus),
            lambda: sweep_index(self._bus, self._retention_ms),
            lambda: sweep_quarantine(self._bus),
            self._letters.look,
            self._measures.look,
        )
        while True:
            try:
                for chore in chores:
                    await self._done(chore)
            except BusUnavailable:
                logger.info("the broker is away; chores wait")
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _done(self, chore: Callable[[], Awaitable[object]]) -> None:
        """Do one chore. At `maxmemory` some are refused, and the others make room."""
        try:
            await chore()
        except ServerError as error:
            if not is_temporary(error):
                raise
            logger.debug("a chore waits: %s", error)
