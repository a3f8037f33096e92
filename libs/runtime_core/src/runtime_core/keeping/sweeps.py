"""Forget what is past its time. Each sweep may be repeated, and run beside all other work."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from runtime_core.bus.event_bus import EventBus

SWEEP = 500
"""Entries that one call of a sweep takes at once."""
DEDUPE_MS = 24 * 3600 * 1000


async def sweep_index(bus: EventBus, retention_ms: int) -> None:
    """Forget tasks whose hash has expired; those that still run are looked at again a retention later."""
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
    """Forget deaths of entries that are no more: whoever ended them may not have known of their quarantine."""
    call, keys = bus.transport.call, bus.keys
    for field in cast(list[bytes], await call("HKEYS", keys.quarantine)):
        stream, _, entry = field.decode().rpartition("|")
        if stream and not await call("XRANGE", keys.stream(stream), entry, entry):
            await call("HDEL", keys.quarantine, field)
