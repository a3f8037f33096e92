"""The recorder: copies the record stream of each partition that it leads into the trajectory store."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from runtime_core.base.periodic import Slices
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.bus.spans import record_spans
from runtime_core.consumer.leader import Leader, Leaders
from runtime_core.errors import BusUnavailable, InvalidInput
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import redactor
from runtime_core.telemetry.spans import tracing
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.step import StepFailure, TaskEnd

logger = logging.getLogger(__name__)

_BY_A_PROCESS = re.compile(rb'"owner":"[^"]*"\}\]\Z')
"""The end of rows written by a process. The broker writes rows too: human answers, refused calls."""
_TAIL_BYTES = 300
_ERROR = msgspec.json.Decoder(StepFailure)
_steps_of = attrgetter("steps")
READ_BATCH = 2000
POLL_SECONDS = 0.02
"""The pause between reads: entries that arrive within it share a transaction."""
SLICE_BYTES = 1_000_000
BUSY_ENTRIES, BUSY_BYTES = 50, 1_000_000
BUSY_POLL_SECONDS = 0.1
"""The pause after this many entries, unless they are large: an entry costs less in a larger transaction."""
LOCAL_LEASE_SECONDS = 3.0


def record_entry(entry: bytes, fields: list[bytes]) -> RecordEntry:
    """Parse an entry. Fields: `t` task, `d` steps (JSON array or empty). The entry of the commit that ended the task
    also has `e` (status, agent, steps, created ms, ended ms, session; one per line), `f` (the error object, or empty),
    `x` (the traceparent, if the task has a trace) and `g` (if the task had ended before)."""
    task, rows = fields[1].decode(), fields[3]
    if len(fields) < 6:
        return RecordEntry(entry.decode(), task, rows, None)
    status, agent, steps, created, ended, session = fields[5].decode().split("\n")
    error = _ERROR.decode(fields[7]) if len(fields) > 7 and fields[7] else None
    end = TaskEnd(task, status, agent, int(steps), float(created or 0), float(ended), error, session)
    trace = dict(zip(fields[8::2], fields[9::2], strict=True)).get(b"x", b"").decode()
    return RecordEntry(entry.decode(), task, rows, end, trace)


async def record_entries(entries: Sequence[tuple[bytes, list[bytes]]]) -> list[RecordEntry]:
    """Parse entries without secrets. Processes have removed them from the rows that they wrote. Other work of the event
    loop runs after each megabyte of the broker's own rows."""
    slices = Slices(SLICE_BYTES)
    parsed = []
    for entry, fields in entries:
        rows = fields[3]
        if rows and _BY_A_PROCESS.search(rows[-_TAIL_BYTES:]) is None:
            fields = [*fields[:3], await redactor().rows(rows), *fields[4:]]
            await slices.worked(len(rows))
        parsed.append(record_entry(entry, fields))
    return parsed


def pause_after_many(rows: Sequence[RecordEntry]) -> float:
    """Return the seconds between a batch of `BUSY_ENTRIES` or more and the next read."""
    return BUSY_POLL_SECONDS if sum(map(len, map(_steps_of, rows))) < BUSY_BYTES else POLL_SECONDS


class Recorder(Leaders):
    """One replica of the trajectory-recorder, with one bus per partition. Calls `written` after each batch.

    The store keeps the cursor under the partition's number, or under `store_partition`: with a different number, this
    recorder can share store and namespace with the recorder of another broker.
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
        self._store = store
        self._namespace = namespace
        self._written = written
        self._store_partition = store_partition
        super().__init__(buses, ["record"] * len(buses), TRAJECTORY_RECORDER, lease_seconds, metrics)

    async def stop(self) -> None:
        await super().stop()
        await self._store.close()

    async def _lead(self, bus: EventBus, leader: Leader, epoch: int) -> None:
        # A flushed broker restarts its epochs, but the store remembers them: take the lead again with a higher one.
        stored = await self._store.epoch(self._namespace, self._in_store(bus))
        if epoch < stored:
            leader.floor = stored
        else:
            await self._record(bus, epoch)

    def _in_store(self, bus: EventBus) -> int:
        return bus.keys.partition if self._store_partition is None else self._store_partition

    async def _record(self, bus: EventBus, epoch: int) -> None:
        """Copy the record of one partition under this epoch until cancelled. Raises Fenced if another replica leads."""
        partition = self._in_store(bus)
        # Take the fence first: from now on no older epoch can move the cursor.
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
                entries = await bus.read_record(cursor, READ_BATCH)
            except BusUnavailable:
                await asyncio.sleep(0.1)
                continue
            if not entries:
                self._watch.waiting(False)
                continue
            self._watch.waiting(True)
            rows = await record_entries(entries)
            began = time.perf_counter()
            await self._store.write(self._namespace, partition, epoch, rows)
            commit_seconds.observe(time.perf_counter() - began)
            if tracing():
                self._trace(rows, time.perf_counter() - began)
            cursor = entries[-1][0].decode()
            # After the commit of the rows: entries before the published cursor may be trimmed.
            await bus.publish_cursor(TRAJECTORY_RECORDER, cursor)
            self._watch.progressed()
            if self._written is not None:
                self._written()
            self._metrics.events_handled["recorded"].inc(len(entries))
            recorded.inc(len(entries))
            if len(rows) < READ_BATCH:
                await asyncio.sleep(POLL_SECONDS if len(rows) < BUSY_ENTRIES else pause_after_many(rows))

    def _trace(self, rows: Sequence[RecordEntry], seconds: float) -> None:
        ended = [(row.task, row.entry_id, row.trace) for row in rows if row.end is not None]
        record_spans(self._namespace, TRAJECTORY_RECORDER, ended, entries=len(rows), seconds=seconds)


class LocalTrajectories:
    """Records the tasks of one process in the store at `url`, or in a temporary folder that `stop` deletes."""

    def __init__(self, namespace: str, url: str | None = None, *, store_partition: int | None = None) -> None:
        """`store_partition`: see Recorder."""
        self._namespace = namespace
        self._store_partition = store_partition
        self._url = url
        self._folder: TemporaryDirectory[str] | None = None
        self._store: TrajectoryStore | None = None
        self._recorder: Recorder | None = None
        self._written = asyncio.Event()

    @property
    def store(self) -> TrajectoryStore:
        """The store, between `start` and `stop`."""
        if self._store is None:
            raise InvalidInput("trajectories", "the trajectory store is only open while the app runs")
        return self._store

    async def start(self, bus: EventBus, metrics: Metrics) -> None:
        """Open the store and start copying the record of this bus."""
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
            lease_seconds=LOCAL_LEASE_SECONDS,
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

    async def forget(self, task: str) -> None:
        """Delete what another broker has recorded under this task's id."""
        if await self.store.task(self._namespace, task) is not None:
            await self.store.delete(self._namespace, task)

    async def call_of(self, task: str, run: str, step: str, /) -> str:
        """Return a recorded step as the call that made it; empty if it is not recorded."""
        return await self.store.call_of(self._namespace, task, run, step)

    async def recorded(self, task: str, timeout: float = 10.0) -> TaskTrajectory:
        """Wait until all steps of an ended task are recorded, and return them. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while True:
                self._written.clear()
                found = await self.store.task(self._namespace, task)
                if found is not None and found.complete:
                    return found
                await self._written.wait()
