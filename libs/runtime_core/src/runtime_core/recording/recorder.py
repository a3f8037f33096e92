"""The role: leads the recording of each partition, and copies the record into the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.consumer.leader import Leader
from runtime_core.errors import BusUnavailable
from runtime_core.progress import Health, ProgressWatch
from runtime_core.recording.entries import record_entry
from runtime_core.telemetry.messaging import record_spans
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.spans import tracing
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore

logger = logging.getLogger(__name__)

READ_AT_ONCE = 2000
PAUSE_SECONDS = 0.02
"""Entries that come in within one pause are written in one transaction."""


class Recorder:
    """One replica of the trajectory-recorder, on one bus per partition. `written` is called after each batch.

    How far it has come stands in the store under the partition's number, or under `store_partition`: with a number of
    its own it may share store and namespace with the recorder of another broker.
    """

    def __init__(
        self,
        buses: Sequence[EventBus],
        store: TrajectoryStore,
        metrics: Metrics,
        *,
        namespace: str,
        lease_seconds: float,
        written: Callable[[], None] | None = None,
        store_partition: int | None = None,
    ) -> None:
        self._buses = buses
        self._store = store
        self._namespace = namespace
        self._lease = lease_seconds
        self._metrics = metrics
        self._written = written
        self._store_partition = store_partition
        self._stop = asyncio.Event()
        self._watch = ProgressWatch(limit_seconds=max(30.0, 10 * lease_seconds))
        self._leaders = [self._leader(bus) for bus in buses]
        metrics.show_owner(self._silent_seconds, lease_seconds)
        metrics.stalled.set_function(lambda: self._watch.stalled_seconds)
        for bus, leader in zip(buses, self._leaders, strict=True):
            metrics.show_lead(bus.keys.partition, leader)

    async def start(self) -> None:
        for bus, leader in zip(self._buses, self._leaders, strict=True):
            await bus.make_groups(())
            await leader.start()

    async def run(self) -> None:
        await self._stop.wait()

    async def stop(self) -> None:
        self._stop.set()
        for leader in self._leaders:
            await leader.stop()
        await self._store.close()
        for bus in self._buses:
            await bus.transport.close()

    def ready(self) -> bool:
        return self._silent_seconds() < self._lease

    def _silent_seconds(self) -> float:
        return max(leader.silent_seconds for leader in self._leaders)

    def progress(self) -> Health:
        return self._watch.health()

    def _leader(self, bus: EventBus) -> Leader:
        async def work(epoch: int) -> None:
            # A broker that was flushed counts its epochs anew, while the store remembers: lead again, above it.
            stored = await self._store.epoch(self._namespace, self._in_store(bus))
            if epoch < stored:
                leader.floor = stored
            else:
                await self._record(bus, epoch)

        leader = Leader(bus, "record", TRAJECTORY_RECORDER, self._lease, work, self._watch)
        return leader

    def _in_store(self, bus: EventBus) -> int:
        return bus.keys.partition if self._store_partition is None else self._store_partition

    async def _record(self, bus: EventBus, epoch: int) -> None:
        """Copy the record of one partition, under this epoch, until cancelled. Raises Fenced where another leads."""
        partition = self._in_store(bus)
        # Take the fence first: from here on no older epoch can move the cursor that is read.
        await self._store.write(self._namespace, partition, epoch, ())
        cursor = await bus.within_record(await self._store.cursor(self._namespace, partition))
        reconnects = bus.transport.reconnects
        commit_seconds = self._metrics.recorder_commit_seconds[str(bus.keys.partition)]
        recorded = self._metrics.recorded_entries[str(bus.keys.partition)]
        while True:
            try:
                if bus.transport.reconnects != reconnects:
                    reconnects = bus.transport.reconnects
                    cursor = await bus.within_record(cursor)
                entries = await bus.read_record(cursor, READ_AT_ONCE, 500)
            except BusUnavailable:
                await asyncio.sleep(0.1)
                continue
            if not entries:
                self._watch.waiting(False)
                continue
            self._watch.waiting(True)
            rows = [record_entry(entry, fields) for entry, fields in entries]
            began = time.perf_counter()
            await self._store.write(self._namespace, partition, epoch, rows)
            commit_seconds.observe(time.perf_counter() - began)
            if tracing():
                self._trace(rows, time.perf_counter() - began)
            cursor = entries[-1][0].decode()
            # After the rows are committed: what is published may be trimmed.
            await bus.publish_cursor(TRAJECTORY_RECORDER, cursor)
            self._watch.progressed()
            if self._written is not None:
                self._written()
            self._metrics.events_handled["recorded"].inc(len(entries))
            recorded.inc(len(entries))
            if len(entries) < READ_AT_ONCE:
                await asyncio.sleep(PAUSE_SECONDS)

    def _trace(self, rows: Sequence[RecordEntry], seconds: float) -> None:
        ended = [(row.task, row.entry_id, row.trace) for row in rows if row.end is not None]
        record_spans(self._namespace, TRAJECTORY_RECORDER, ended, entries=len(rows), seconds=seconds)
