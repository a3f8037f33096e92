"""The services besides handlers, as simulated processes: the state-manager and the recorder, with a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from runtime_core.config.settings import Settings
from runtime_core.errors import BusError, Fenced
from runtime_core.host.manager import StateManager
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from tests.simulation.processes import LEASE_SECONDS, Process
from tests.simulation.scheduler import Scheduler


class MemoryStore:
    """What of a trajectory store the recorder needs. It outlives the processes that write to it."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], RecordEntry] = {}
        self._epochs: dict[int, int] = {}
        self._cursors: dict[int, str] = {}

    async def epoch(self, namespace: str, partition: int) -> int:
        return self._epochs.get(partition, 0)

    async def cursor(self, namespace: str, partition: int) -> str:
        return self._cursors.get(partition, "0-0")

    async def write(self, namespace: str, partition: int, epoch: int, entries: Sequence[RecordEntry]) -> None:
        if epoch < self._epochs.get(partition, 0):
            raise Fenced("another recorder writes")
        self._epochs[partition] = epoch
        for entry in entries:
            self.entries[partition, entry.entry_id] = entry
            self._cursors[partition] = entry.entry_id

    async def close(self) -> None:
        """Nothing is open."""

    def caught_up(self, partition: int, newest: str) -> bool:
        """Whether all entries up to this one are written."""
        return (partition, newest) in self.entries


class ServiceProcess(Process):
    """A state-manager (`admit`) or a recorder (`record`)."""

    def __init__(self, scheduler: Scheduler, name: str, role: str, store: MemoryStore, metrics: Metrics) -> None:
        super().__init__(scheduler, name)
        self._role = role
        self.leaving = False
        buses = self.buses()
        self._service: StateManager | Recorder
        if role == "admit":
            settings = Settings(
                data_dir=Path("/"),
                trajectory_url="",
                namespace=scheduler.namespace,
                partitions=len(buses),
                lease_seconds=LEASE_SECONDS,
            )
            self._service = StateManager(buses, self.transport(), settings, metrics)
        else:
            self._service = Recorder(
                buses,
                cast(TrajectoryStore, store),
                metrics,
                namespace=scheduler.namespace,
                lease_seconds=LEASE_SECONDS,
            )

    @property
    def serves(self) -> str:
        return "" if self.dead or self.leaving else self._role

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._service.start()
                break
            except BusError:
                await asyncio.sleep(0.1)
        await self._service.run()

    def leave(self) -> None:
        """SIGTERM: it gives up its lead, and ends."""
        self.leaving = True
        self.spawn(self._leave())

    async def _leave(self) -> None:
        await self._service.stop()
        self.scheduler.note(f"{self.name} has left")
        self.kill()
