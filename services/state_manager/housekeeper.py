"""Keeps a partition tidy: follows the record, trims it, sweeps the index, watches memory, measures lag."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, STATE_MANAGER, group_of
from runtime_core.bus.namespace import server_memory
from runtime_core.bus.transport import Reply
from runtime_core.errors import BusUnavailable, ServerError
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5
LINES_AT_ONCE = 20
READ_AT_ONCE = 5000
MEMORY_LIMIT = 0.8
"""Of `maxmemory`: above it submits are answered with `overloaded`, while commits go on."""
SWEEP = 500
CLOCK_STEP_SECONDS = 3.0
DEDUPE_MS = 24 * 3600 * 1000


class Housekeeper:
    """One partition's chores; run by the leader only."""

    def __init__(self, bus: EventBus, metrics: Metrics, retention_seconds: float) -> None:
        self._bus = bus
        self._metrics = metrics
        self._retention_ms = int(retention_seconds * 1000)
        self._cursor = ""
        self._clock: tuple[float, float] | None = None

    async def run(self) -> None:
        """Do the chores until cancelled; a broker that is away is waited for."""
        while True:
            try:
                await self._follow_record()
                await self._bus.trim_record()
                await self._watch_memory()
                await self.watch_clock()
                await self._forget_old_submits()
                await self._sweep_index()
                await self._sweep_quarantine()
                await self._measure()
            except BusUnavailable:
                logger.info("the broker is away; chores wait")
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _follow_record(self) -> None:
        """Count the tasks that ended, and publish how far this group has come: trimming follows the slower one."""
        call, keys = self._bus.transport.call, self._bus.keys
        if not self._cursor:
            self._cursor = await self._published_cursor()
        self._cursor = await self._bus.within_record(self._cursor)
        while True:
            reply = cast(
                list[list[Reply]], await call("XRANGE", keys.record, f"({self._cursor}", "+", "COUNT", READ_AT_ONCE)
            )
            if not reply:
                return
            ends = [end for entry in reply if (end := _task_end(cast(list[bytes], entry[1]))) is not None]
            for end in ends:
                self._metrics.tasks_ended[end.status].inc()
                self._metrics.task_seconds.observe(end.seconds)
            _tell(ends)
            self._cursor = cast(bytes, reply[-1][0]).decode()
            await self._bus.publish_cursor(STATE_MANAGER, self._cursor)

    async def _published_cursor(self) -> str:
        call, keys = self._bus.transport.call, self._bus.keys
        try:
            groups = cast(list[list[Reply]], await call("XINFO", "GROUPS", keys.record))
        except ServerError:
            await self._bus.make_groups(())
            return "0-0"
        for group in groups:
            named = dict(zip(group[::2], group[1::2], strict=True))
            if named[b"name"] == STATE_MANAGER.encode():
                return cast(bytes, named[b"last-delivered-id"]).decode()
        return "0-0"

    async def _watch_memory(self) -> None:
        memory = await server_memory(self._bus.transport)
        limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
        over = limit > 0 and used > limit * MEMORY_LIMIT
        text = f"the broker uses {used} of {limit} bytes of maxmemory" if over else ""
        await self._bus.transport.call("HSET", self._bus.keys.meta, "overload", text)

    async def watch_clock(self) -> None:
        """Undo a step of the server's clock by an offset that the timers are read with.

        A step forward would fire every retry and deadline at once, one back would stop them.
        """
        call, keys = self._bus.transport.call, self._bus.keys
        before = time.monotonic()
        seconds, micros = cast(list[bytes], await call("TIME"))
        after = time.monotonic()
        server = int(seconds) + int(micros) / 1e6
        if self._clock is not None and after - before < CLOCK_STEP_SECONDS / 2:
            step = (server - self._clock[0]) - (after - self._clock[1])
            if abs(step) > CLOCK_STEP_SECONDS:
                await call("HINCRBY", keys.meta, "offset", -round(step * 1000))
                logger.warning("the broker's clock stepped by %.1f s; timers go on as if it had not", step)
        self._clock = (server, after)

    async def _forget_old_submits(self) -> None:
        """Keep the dedupe window within 24 hours."""
        call, keys = self._bus.transport.call, self._bus.keys
        oldest = cast(list[bytes], await call("LRANGE", keys.submits_in_order, 0, SWEEP - 1))
        limit = time.time_ns() // 1_000_000 - DEDUPE_MS
        for line in oldest:
            created, _, submit = line.partition(b"\n")
            if int(created) > limit:
                return
            await call("HDEL", keys.submits, submit)
            await call("LREM", keys.submits_in_order, 1, line)

    async def _sweep_index(self) -> None:
        """Forget tasks whose hash has expired; those that still run are looked at again a retention later."""
        call, keys = self._bus.transport.call, self._bus.keys
        before = time.time_ns() // 1_000_000 - self._retention_ms
        # All that is due, however much: a fixed share per interval would fall behind a high rate of tasks for good.
        while old := cast(
            list[bytes], await call("ZRANGEBYSCORE", keys.index, "-inf", f"({before}", "LIMIT", 0, SWEEP)
        ):
            there = await asyncio.gather(*(call("EXISTS", keys.task(task.decode())) for task in old))
            gone = [task for task, exists in zip(old, there, strict=True) if not exists]
            if gone:
                await call("ZREM", keys.index, *gone)
            now = time.time_ns() // 1_000_000
            alive = [task for task, exists in zip(old, there, strict=True) if exists]
            if alive:
                await call("ZADD", keys.index, "XX", *(part for task in alive for part in (now, task)))

    async def _sweep_quarantine(self) -> None:
        """Forget deaths of entries that are no more: whoever ended them may not have known of their quarantine."""
        call, keys = self._bus.transport.call, self._bus.keys
        for field in cast(list[bytes], await call("HKEYS", keys.quarantine)):
            stream, _, entry = field.decode().rpartition("|")
            if stream and not await call("XRANGE", keys.stream(stream), entry, entry):
                await call("HDEL", keys.quarantine, field)

    async def _measure(self) -> None:
        """Lag and pending of every work stream: all on it is work to do, so the lag is what is not pending."""
        call, keys = self._bus.transport.call, self._bus.keys
        streams = {name.decode() for name in cast(list[bytes], await call("HVALS", keys.agents))}
        streams |= {name.decode() for name in cast(list[bytes], await call("HVALS", keys.tools))}
        for stream in streams | set(GROUPS):
            length = cast(int, await call("XLEN", keys.stream(stream)))
            place = (stream, group_of(stream))
            pending, oldest = 0, 0.0
            try:
                summary = cast(list[Reply], await call("XPENDING", keys.stream(stream), group_of(stream)))
                pending = cast(int, summary[0])
                if summary[1] is not None:
                    oldest = max(0.0, time.time() - int(cast(bytes, summary[1]).split(b"-")[0]) / 1000)
            except ServerError:
                if length == 0:
                    continue  # a stream that this namespace has no use for
            self._metrics.stream_lag[place].set(max(0, length - pending))
            self._metrics.stream_pending[place].set(pending)
            self._metrics.stream_oldest_pending[place].set(oldest)
        self._metrics.timers_due[str(keys.partition)].set(
            cast(int, await call("ZCOUNT", keys.timers, "-inf", time.time_ns() // 1_000_000))
        )


@dataclass(slots=True)
class _End:
    """What the record says of a task that has ended."""

    task: str
    status: str
    agent: str
    steps: str
    seconds: float


def _task_end(fields: list[bytes]) -> _End | None:
    if len(fields) < 6 or fields[4] != b"e":
        return None
    status, agent, steps, created, ended, *_ = fields[5].decode().split("\n")
    return _End(fields[1].decode(), status, agent, steps, max(0.0, (float(ended) - float(created)) / 1000))


def _tell(ends: list[_End]) -> None:
    """A line for each task, or one for many: a person reads these."""
    if len(ends) > LINES_AT_ONCE:
        counts = Counter(end.status for end in ends)
        logger.info("%d tasks ended: %s", len(ends), ", ".join(f"{count} {status}" for status, count in counts.items()))
        return
    for end in ends:
        level = logging.INFO if end.status == "completed" else logging.WARNING
        logger.log(
            level, "task %s (%s) %s in %.2f s, %s steps", end.task, end.agent, end.status, end.seconds, end.steps
        )
