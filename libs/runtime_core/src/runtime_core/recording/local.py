"""The trajectory store of an app that runs in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput
from runtime_core.recording.recorder import Recorder
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorded import TaskTrajectory
from runtime_core.trajectory.store import TrajectoryStore

LEASE_SECONDS = 3.0


class LocalTrajectories:
    """Records what the tasks of one process do, in the store at `url`; without one, in a folder that `stop` deletes."""

    def __init__(self, namespace: str, url: str | None = None, *, store_partition: int | None = None) -> None:
        """`store_partition` is as that of a Recorder."""
        self._namespace = namespace
        self._store_partition = store_partition
        self._url = url
        self._folder: TemporaryDirectory[str] | None = None
        self._store: TrajectoryStore | None = None
        self._recorder: Recorder | None = None
        self._written = asyncio.Event()

    @property
    def store(self) -> TrajectoryStore:
        """The store, from `start` until `stop`."""
        if self._store is None:
            raise InvalidInput("trajectories", "there is no store before the app is started and after it has stopped")
        return self._store

    async def start(self, bus: EventBus, metrics: Metrics) -> None:
        """Open the store and begin to copy the record of this bus, whose transport is closed at the end."""
        url = self._url
        if url is None:
            self._folder = TemporaryDirectory(prefix="weft-trajectory-", ignore_cleanup_errors=True)
            url = f"sqlite:///{Path(self._folder.name) / 'trajectory.db'}"
        self._store = await TrajectoryStore.open(url)
        self._recorder = Recorder(
            [bus],
            self._store,
            metrics,
            namespace=self._namespace,
            lease_seconds=LEASE_SECONDS,
            written=self._written.set,
            store_partition=self._store_partition,
        )
        await self._recorder.start()

    async def stop(self) -> None:
        """Stop copying, close the store, delete the folder."""
        if self._recorder is not None:
            await self._recorder.stop()  # closes the store too
        self._recorder = self._store = None
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)
            self._folder = None

    async def recorded(self, task: str, timeout: float = 10.0) -> TaskTrajectory:
        """Wait until all steps of an ended task are recorded, and return them. TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            while True:
                self._written.clear()
                found = await self.store.task(self._namespace, task)
                if found is not None and found.complete:
                    return found
                await self._written.wait()
