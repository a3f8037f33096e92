"""The services besides handlers, as simulated processes: the state-manager and the recorder, with a store in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from runtime_core.errors import Fenced
from runtime_core.host.host import Role
from runtime_core.host.state_manager import StateManagerReplica
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from tests.simulation.processes import LEASE_SECONDS, RoleProcess
from tests.simulation.scheduler import Scheduler

STOP_SECONDS = 3.0
"""How long a service may take to stop."""


MOST_ANSWER_BYTES = 3000
"""How much is kept of the answers, where that is bounded: three or four."""


class MemoryStore:
    """The part of a trajectory store that the recorder needs. It survives the processes that write to it."""

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


class ServiceProcess(RoleProcess):
    """A state-manager (`admit`) or a recorder (`record`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        serves: str,
        store: MemoryStore,
        metrics: Metrics,
        most_answer_bytes: int | None,
    ) -> None:
        super().__init__(scheduler, name, serves, STOP_SECONDS)
        self._most_answer_bytes = most_answer_bytes
        self._store = store
        self._metrics = metrics

    async def build(self) -> Role:
        buses, namespace = self.buses(), self.scheduler.namespace
        if self._serves == "record":
            store = cast(TrajectoryStore, self._store)
            return Recorder(buses, store, self._metrics, namespace=namespace, lease_seconds=LEASE_SECONDS)
        settings = Settings(
            data_dir=Path("/"),
            trajectory_url="",
            namespace=namespace,
            partitions=len(buses),
            lease_seconds=LEASE_SECONDS,
            answers_max_bytes=self._most_answer_bytes or Settings.answers_max_bytes,
        )
        return StateManagerReplica(buses, self.transport(), settings, self._metrics)
