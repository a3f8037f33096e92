"""Keeps a namespace from growing where no services run beside a `Runtime`: nobody else reads its record.

What the services do more (the trajectory, `weft:tasks`, replies to streams of users' own, several partitions) is not
done here.
"""

from __future__ import annotations

import asyncio
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER
from runtime_core.consumer.leader import Leader
from runtime_core.maintenance.engines import EngineWatch
from runtime_core.maintenance.sweeps import LetterKeeper, forget_old_submits, sweep_index, sweep_quarantine
from runtime_core.periodic import Periodic

INTERVAL_SECONDS = 1.0


class Keeper:
    """One partition's. Of several processes one leads, in the role that the state-manager has where it runs."""

    def __init__(self, bus: EventBus, lease_seconds: float) -> None:
        self._bus = bus
        self._engines = EngineWatch(bus)
        self._letters = LetterKeeper(bus)
        self._leader = Leader(bus, "admit", "state-manager", lease_seconds, self._work)

    async def start(self) -> None:
        await self._leader.start()

    async def stop(self) -> None:
        await self._leader.stop()

    async def _work(self, epoch: int) -> None:
        chores = Periodic("keep the namespace", INTERVAL_SECONDS, self.tidy)
        chores.start()
        try:
            await asyncio.Event().wait()
        finally:
            await chores.stop()

    async def tidy(self) -> None:
        """Forget the record, tasks past their retention, submits past the dedupe window, and old deaths.

        And end steps that have waited long enough for an engine.
        """
        await self._engines.look()
        for group in (STATE_MANAGER, TRAJECTORY_RECORDER):
            await self._bus.publish_cursor(group, "$")
        await self._bus.trim_record()
        retention = await self._bus.transport.call("HGET", self._bus.keys.meta, "retention")
        await sweep_index(self._bus, int(cast(bytes, retention or b"3600")) * 1000)
        await forget_old_submits(self._bus)
        await sweep_quarantine(self._bus)
        await self._letters.look()
