"""Forgets what is past its time: dead letters, dedupe entries, blobs, within their bounds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

from runtime_core.blobs.store import open_blobs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_memory
from runtime_core.config.settings import LEAST_DEAD_BYTES, Settings
from runtime_core.maintenance.dead_letters import trimmed_letters

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
RECOUNT_SECONDS = 60.0
"""The shortest time between two counts of all dead letters."""
MEMORY_SHARE = 10
"""Dead letters of all partitions take no more than this part (one tenth) of the server's `maxmemory`."""


class LetterKeeper:
    """The sweeps of one partition; run by its leader. Functions of the bus enforce the bound that it stores."""

    def __init__(
        self,
        bus: EventBus,
        most_bytes: int = Settings.dead_max_bytes,
        retention_seconds: float = Settings.dead_retention_seconds,
        partitions: int = 1,
    ) -> None:
        self._bus = bus
        self._most_bytes = most_bytes
        self._retention_ms = int(retention_seconds * 1000)
        self._partitions = partitions
        self._looked = self._recounted = float("-inf")
        self._seen: dict[tuple[str, str], int] | None = None

    async def look(self) -> None:
        """Trim old or excess dead letters, unless that was done a moment ago."""
        if time.monotonic() - self._looked < INTERVAL_SECONDS:
            return
        self._looked = time.monotonic()
        await self.trim()

    async def trim(self) -> None:
        """Trim until the bounds hold, and log everything trimmed since the last time, by any process."""
        if self._seen is None:
            self._seen = await trimmed_letters(self._bus)
        bound = await self._bound()
        done = await self._bus.trim_letters(bound, self._retention_ms)
        if done.counted != done.stored and time.monotonic() - self._recounted >= RECOUNT_SECONDS:
            self._recounted = time.monotonic()
            await self._bus.recount_letters()
            done = await self._bus.trim_letters(bound, self._retention_ms)
        while done.old or done.large:
            done = await self._bus.trim_letters(bound, self._retention_ms)
        now = await trimmed_letters(self._bus)
        for (cause, share), count in now.items():
            if more := count - self._seen.get((cause, share), 0):
                why = (
                    f"dead letters may have {bound} bytes (WEFT_DEAD_MAX_BYTES), and {share} had the most"
                    if cause == "bytes"
                    else "they were older than WEFT_DEAD_RETENTION_SECONDS"
                )
                logger.warning("partition %d: trimmed %d dead letters: %s", self._bus.keys.partition, more, why)
        self._seen = now

    async def _bound(self) -> int:
        """The setting; less on a small server, which dead letters must not fill."""
        memory = await server_memory(self._bus.transport)
        limit = int(memory.get("maxmemory", 0))
        if not limit:
            return self._most_bytes
        return min(self._most_bytes, max(LEAST_DEAD_BYTES, limit // MEMORY_SHARE // self._partitions))


SWEEP = 500
"""Entries that one call of a sweep takes at once."""
DEDUPE_MS = 24 * 3600 * 1000


async def sweep_index(bus: EventBus, retention_ms: int) -> None:
    """Forget tasks whose hash has expired; running ones are checked again a retention later."""
    call, keys = bus.transport.call, bus.keys
    before = time.time_ns() // 1_000_000 - retention_ms
    # All that is due, however much: a fixed share per interval would fall behind a high rate of tasks for good.
    while old := cast(list[bytes], await call("ZRANGEBYSCORE", keys.index, "-inf", f"({before}", "LIMIT", 0, SWEEP)):
        there = await asyncio.gather(*(call("EXISTS", keys.task(task.decode())) for task in old))
        gone = [task for task, exists in zip(old, there, strict=True) if not exists]
        if gone:
            await call("ZREM", keys.index, *gone)
        now = time.time_ns() // 1_000_000
        alive = [task for task, exists in zip(old, there, strict=True) if exists]
        if alive:
            await call("ZADD", keys.index, "XX", *(part for task in alive for part in (now, task)))


async def forget_old_submits(bus: EventBus) -> None:
    """Keep the dedupe window within 24 hours."""
    call, keys = bus.transport.call, bus.keys
    oldest = cast(list[bytes], await call("LRANGE", keys.submits_in_order, 0, SWEEP - 1))
    limit = time.time_ns() // 1_000_000 - DEDUPE_MS
    for line in oldest:
        created, _, submit = line.partition(b"\n")
        if int(created) > limit:
            return
        await call("HDEL", keys.submits, submit)
        await call("LREM", keys.submits_in_order, 1, line)


async def sweep_quarantine(bus: EventBus) -> None:
    """Forget deaths of entries that no longer exist: the process that ended them may not have known of their
    quarantine."""
    call, keys = bus.transport.call, bus.keys
    for field in cast(list[bytes], await call("HKEYS", keys.quarantine)):
        stream, _, entry = field.decode().rpartition("|")
        if stream and not await call("XRANGE", keys.stream(stream), entry, entry):
            await call("HDEL", keys.quarantine, field)


BLOB_INTERVAL_SECONDS = 600.0


class BlobSweeper:
    """The blob store's only housekeeping; the leader of the first partition runs it."""

    def __init__(self, settings: Settings, interval_seconds: float = BLOB_INTERVAL_SECONDS) -> None:
        self._settings = settings
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Sweep until cancelled; an unreachable store is logged and retried."""
        if self._settings.blob_url is None:
            return
        while True:
            try:
                # In a thread: what lists files waits for a disk, or for a network.
                erased = await asyncio.to_thread(self.sweep)
            except Exception as error:  # whatever the place of the blobs raises
                logger.warning("the blob store %s was not swept: %s", self._settings.blob_url, error)
            else:
                if erased:
                    logger.info("%d large results were erased, since their retention has ended", erased)
            await asyncio.sleep(self._interval_seconds)

    def sweep(self) -> int:
        """Erase old blobs and return their number."""
        assert self._settings.blob_url is not None  # `run` has looked
        before = time.time() - self._settings.blob_retention_seconds
        return open_blobs(self._settings.blob_url).sweep(self._settings.namespace, before)
