"""Housekeeping of the partitions that this process leads: sweeps, the server's clock and memory, blobs, the record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from runtime_core.base.text import counted, shortened
from runtime_core.bus.connection import Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER
from runtime_core.bus.namespace import server_info
from runtime_core.bus.spans import task_span
from runtime_core.consumer.announcements import announced_names
from runtime_core.errors import BusUnavailable, ServerError, is_temporary
from runtime_core.settings import LEAST_DEAD_BYTES, Settings
from runtime_core.state_manager.dead_letters import trimmed_letters
from runtime_core.state_manager.stuck import EngineWatch
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.spans import tracing
from runtime_core.wire.blobs import open_blobs
from runtime_core.wire.step import ENDED, ErrorText, Status

logger = logging.getLogger(__name__)

LETTERS_INTERVAL_SECONDS = 2.0
"""The shortest time between two sweeps of the dead letters."""
LETTERS_RECOUNT_SECONDS = 60.0
"""The shortest time between two counts of all dead letters."""
LETTERS_MEMORY_DIVISOR = 10
"""Dead letters of all partitions may take one tenth of the server's `maxmemory`."""
SWEEP_BATCH = 500
"""Entries per page of a sweep."""
DEDUPE_WINDOW_MS = 24 * 3600 * 1000
"""How long the id of a submit is remembered."""
BLOB_SWEEP_SECONDS = 600.0
CLOCK_STEP_SECONDS = 3.0
MEMORY_LIMIT_SHARE = 0.8
"""Share of `maxmemory` above which submits are rejected as `overloaded`, while commits continue."""
TIDY_SECONDS = 0.5
REFILL_EVENTS = 32
"""Unread entries of a work stream up to which waiting tasks are moved onto it."""
DEFAULT_RETENTION_SECONDS = 3600
"""Retention of ended tasks if neither the settings nor the namespace set it."""

Chore = Callable[[], Awaitable[object]]


class LetterSweeper:
    """Trims the dead letters of one partition; its leader runs it. Functions of the bus enforce the bound."""

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

    async def sweep(self) -> None:
        """Trim old and excess dead letters, at most every 2 seconds."""
        if time.monotonic() - self._looked < LETTERS_INTERVAL_SECONDS:
            return
        self._looked = time.monotonic()
        await self.trim()

    async def trim(self) -> None:
        """Trim until the bounds hold, and log what any process has trimmed since the last call."""
        if self._seen is None:
            self._seen = await trimmed_letters(self._bus)
        bound = await self._bound()
        done = await self._bus.trim_letters(bound, self._retention_ms)
        if done.counted != done.stored and time.monotonic() - self._recounted >= LETTERS_RECOUNT_SECONDS:
            self._recounted = time.monotonic()
            await self._bus.recount_letters()
            done = await self._bus.trim_letters(bound, self._retention_ms)
        while done.old or done.large:
            done = await self._bus.trim_letters(bound, self._retention_ms)
        now = await trimmed_letters(self._bus)
        for (cause, share), count in now.items():
            if more := count - self._seen.get((cause, share), 0):
                why = (
                    f"over the limit of {bound} bytes (WEFT_DEAD_MAX_BYTES), of which {share} had the most"
                    if cause == "bytes"
                    else f"{share} had letters older than WEFT_DEAD_RETENTION_SECONDS"
                )
                logger.warning("partition %d: trimmed %d dead letters: %s", self._bus.keys.partition, more, why)
        self._seen = now

    async def _bound(self) -> int:
        """Return the limit: the setting, or less on a small server."""
        memory = await server_info(self._bus.transport, "memory")
        limit = int(memory.get("maxmemory", 0))
        if not limit:
            return self._most_bytes
        return min(self._most_bytes, max(LEAST_DEAD_BYTES, limit // LETTERS_MEMORY_DIVISOR // self._partitions))


async def sweep_index(bus: EventBus, retention_ms: int) -> None:
    """Forget tasks whose hash has expired; running ones are checked again a retention later."""
    call, keys = bus.transport.call, bus.keys
    before = f"({time.time_ns() // 1_000_000 - retention_ms}"
    await _sweep(bus, keys.index, before)
    while due := cast(list[bytes], await call("ZRANGEBYSCORE", keys.indexes, "-inf", before, "LIMIT", 0, SWEEP_BATCH)):
        for tenant in due:
            index = keys.index_of(tenant.decode())
            await _sweep(bus, index, before)
            # Removed first: a task that starts meanwhile names its tenant again.
            await call("ZREM", keys.indexes, tenant)
            if oldest := cast(list[bytes], await call("ZRANGE", index, 0, 0, "WITHSCORES")):
                await call("ZADD", keys.indexes, "NX", oldest[1], tenant)


async def _sweep(bus: EventBus, index: str, before: str) -> None:
    call, keys = bus.transport.call, bus.keys
    # Without a limit: a fixed number per sweep would fall behind a high rate of tasks for good.
    while old := cast(list[bytes], await call("ZRANGEBYSCORE", index, "-inf", before, "LIMIT", 0, SWEEP_BATCH)):
        there = await asyncio.gather(*(call("EXISTS", keys.task(task.decode())) for task in old))
        gone = [task for task, exists in zip(old, there, strict=True) if not exists]
        if gone:
            if index == keys.index:
                # Counted first, so that the number of tasks that have started never falls.
                await call("HINCRBY", keys.meta, "swept", len(gone))
            await call("ZREM", index, *gone)
        now = time.time_ns() // 1_000_000
        alive = [task for task, exists in zip(old, there, strict=True) if exists]
        if alive:
            await call("ZADD", index, "XX", *(part for task in alive for part in (now, task)))


async def forget_old_submits(bus: EventBus) -> None:
    """Forget the ids of submits that are older than 24 hours."""
    call, keys = bus.transport.call, bus.keys
    oldest = cast(list[bytes], await call("LRANGE", keys.submits_in_order, 0, SWEEP_BATCH - 1))
    limit = time.time_ns() // 1_000_000 - DEDUPE_WINDOW_MS
    for line in oldest:
        created, _, submit = line.partition(b"\n")
        if int(created) > limit:
            return
        await call("HDEL", keys.submits, submit)
        await call("LREM", keys.submits_in_order, 1, line)


async def sweep_quarantine(bus: EventBus) -> None:
    """Forget the quarantine of entries that no longer exist."""
    call, keys = bus.transport.call, bus.keys
    for field in cast(list[bytes], await call("HKEYS", keys.quarantine)):
        stream, _, entry = field.decode().rpartition("|")
        if stream and not await call("XRANGE", keys.stream(stream), entry, entry):
            await call("HDEL", keys.quarantine, field)


class BlobSweeper:
    """Deletes old blobs; the leader of the first partition runs it."""

    def __init__(self, settings: Settings, interval_seconds: float = BLOB_SWEEP_SECONDS) -> None:
        self._settings = settings
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Sweep until cancelled; an unreachable store is logged and retried."""
        if self._settings.blob_url is None:
            return
        while True:
            try:
                # In a thread: listing files blocks on a disk or network.
                erased = await asyncio.to_thread(self.sweep)
            except Exception as error:  # stores raise errors of many libraries
                logger.warning("cannot sweep the blob store %s: %s", self._settings.blob_url, error)
            else:
                if erased:
                    logger.info("deleted %d large results after their retention", erased)
            await asyncio.sleep(self._interval_seconds)

    def sweep(self) -> int:
        """Delete old blobs and return their number."""
        assert self._settings.blob_url is not None  # `run` has checked it
        before = time.time() - self._settings.blob_retention_seconds
        return open_blobs(self._settings.blob_url).sweep(self._settings.namespace, before)


class ClockWatch:
    """Compares the server's clock with this process's monotonic clock."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._clock: tuple[float, float] | None = None

    async def check(self) -> None:
        """Compensate for a step of the server's clock by an offset that readers of timers apply.

        A step forward would fire every retry and deadline at once, and a step back would stop them.
        """
        before = time.monotonic()
        seconds, micros = cast(list[bytes], await self._bus.transport.call("TIME"))
        after = time.monotonic()
        server = int(seconds) + int(micros) / 1e6
        if self._clock is not None and after - before < CLOCK_STEP_SECONDS / 2:
            step = (server - self._clock[0]) - (after - self._clock[1])
            if abs(step) > CLOCK_STEP_SECONDS:
                await self._bus.shift_clock(-round(step * 1000))
                logger.warning("the broker's clock stepped by %.1f s; timers are adjusted", step)
        self._clock = (server, after)


async def watch_memory(bus: EventBus) -> None:
    """Store in the partition's `meta` whether the broker is over the memory limit."""
    memory = await server_info(bus.transport, "memory")
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    over = limit > 0 and used > limit * MEMORY_LIMIT_SHARE
    text = f"the broker uses {used} of {limit} bytes of maxmemory" if over else ""
    await bus.transport.call("HSET", bus.keys.meta, "overload", text)


class Keeper:
    """The housekeeping of one partition; its leader runs it."""

    def __init__(
        self,
        bus: EventBus,
        letters: LetterSweeper | None = None,
        *,
        retention_seconds: float | None = None,
        follow_record: Chore | None = None,
        measure: Chore | None = None,
    ) -> None:
        """`retention_seconds`: None reads the namespace's value. `follow_record` and `measure` run in every round.

        Without `follow_record` the record is trimmed unread.
        """
        self._bus = bus
        self._retention_seconds = retention_seconds
        self._chores: tuple[Chore, ...] = (
            follow_record or self._forget_record,
            # A safety net: agent-handlers refill their streams themselves.
            partial(bus.refill, REFILL_EVENTS),
            bus.trim_record,
            partial(watch_memory, bus),
            ClockWatch(bus).check,
            EngineWatch(bus).check,
            partial(forget_old_submits, bus),
            self._sweep_index,
            partial(sweep_quarantine, bus),
            (letters or LetterSweeper(bus)).sweep,
            *((measure,) if measure else ()),
        )

    async def run(self) -> None:
        """Run until cancelled; wait while the broker is unavailable."""
        while True:
            try:
                await self.tidy()
            except BusUnavailable:
                logger.info("the broker is unavailable; housekeeping waits")
            await asyncio.sleep(TIDY_SECONDS)

    async def tidy(self) -> None:
        """Run each chore once. At `maxmemory` the server refuses some, while others free memory."""
        for chore in self._chores:
            try:
                await chore()
            except ServerError as error:
                if not is_temporary(error):
                    raise
                logger.debug("a chore of the housekeeping failed, retrying: %s", error)

    async def _forget_record(self) -> None:
        for group in (STATE_MANAGER, TRAJECTORY_RECORDER):
            await self._bus.publish_cursor(group, "$")

    async def _sweep_index(self) -> None:
        seconds = self._retention_seconds
        if seconds is None:
            stored = await self._bus.transport.call("HGET", self._bus.keys.meta, "retention")
            seconds = float(cast("bytes | None", stored) or DEFAULT_RETENTION_SECONDS)
        await sweep_index(self._bus, int(seconds * 1000))


LINES_MAX = 20
READ_BATCH = 5000
AGENTS_SECONDS = 5.0
"""How long the list of agents is cached."""
OTHER = "other"
"""Label of tasks of agents that no app declares, such as task-end hooks."""


REASON_MAX = 200
"""How many characters of an error the line of an ended task has."""


_ERROR = msgspec.json.Decoder(ErrorText)


class RecordFollower:
    """Reads the record as the group `state-manager`."""

    def __init__(self, bus: EventBus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._cursor = ""
        self._agents: set[str] = set()
        self._agents_read = float("-inf")
        for status in ENDED:
            metrics.task_seconds[status]  # exports 0 from the start, so that a first failure is an increase
            metrics.tasks_ended[OTHER, status]

    async def follow(self) -> None:
        """Count ended tasks, then publish this group's position: the record is trimmed behind its slowest group."""
        call, keys = self._bus.transport.call, self._bus.keys
        if not self._cursor:
            self._cursor = await self._published_cursor()
        self._cursor = await self._bus.within_record(self._cursor)
        if time.monotonic() - self._agents_read > AGENTS_SECONDS:
            await self._read_agents()
        while True:
            reply = cast(
                list[list[Reply]], await call("XRANGE", keys.record, f"({self._cursor}", "+", "COUNT", READ_BATCH)
            )
            if not reply:
                return
            ends = [end for entry in reply if (end := _task_end(cast(list[bytes], entry[1]))) is not None]
            if any(end.agent not in self._agents for end in ends):
                await self._read_agents()
            for end in ends:
                agent = end.agent if end.agent in self._agents else OTHER
                self._metrics.tasks_ended[agent, end.status].inc()
                self._metrics.task_seconds[end.status].observe(end.seconds)
            if tracing():
                for end in ends:
                    self._trace(end)
            _log(ends)
            self._cursor = cast(bytes, reply[-1][0]).decode()
            await self._bus.publish_cursor(STATE_MANAGER, self._cursor)

    async def _read_agents(self) -> None:
        """Read the declared agents: each has its own metric series from the start."""
        self._agents_read = time.monotonic()
        for agent in {*await announced_names(self._bus, "agent")} - self._agents:
            self._agents.add(agent)
            for status in ENDED:
                self._metrics.tasks_ended[agent, status]

    def _trace(self, end: _EndedTask) -> None:
        task_span(
            self._bus.keys.namespace,
            end.task,
            traceparent=end.trace,
            agent=end.agent,
            status=end.status,
            steps=int(end.steps),
            created_ms=end.created_ms,
            ended_ms=end.ended_ms,
            error=end.error,
            again=end.again,
        )

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


@dataclass(slots=True)
class _EndedTask:
    """An ended task in the record."""

    task: str
    status: str
    agent: str
    steps: str
    created_ms: float
    ended_ms: float
    error: str
    """The error type of a failed task."""
    reason: str
    """The error's message."""
    trace: str
    """The traceparent of its context, or empty."""
    again: bool
    """Whether it had ended before and was reopened."""

    @property
    def seconds(self) -> float:
        return max(0.0, (self.ended_ms - self.created_ms) / 1000)


def _task_end(fields: list[bytes]) -> _EndedTask | None:
    if len(fields) < 6 or fields[4] != b"e":
        return None
    status, agent, steps, created, ended, *_ = fields[5].decode().split("\n")
    failed = _ERROR.decode(fields[7]) if len(fields) > 7 and fields[7] else None
    error, reason = (failed.type, failed.message) if failed is not None else ("", "")
    more = dict(zip(fields[8::2], fields[9::2], strict=True))
    trace = more.get(b"x", b"").decode()
    times = float(created), float(ended)
    return _EndedTask(fields[1].decode(), status, agent, steps, *times, error, reason, trace, b"g" in more)


def _log(ends: list[_EndedTask]) -> None:
    """Log one line per task, or one line for many."""
    if len(ends) > LINES_MAX:
        counts = Counter(end.status for end in ends)
        logger.info("%d tasks ended: %s", len(ends), ", ".join(f"{count} {status}" for status, count in counts.items()))
        return
    for end in ends:
        level = logging.INFO if end.status == Status.COMPLETED else logging.WARNING
        why = f": {shortened(f'{end.error}: {end.reason}', REASON_MAX)}" if end.error else ""
        logger.log(
            level, "task %s (%s) %s in %.2f s, %s%s",
            end.task, end.agent, end.status, end.seconds, counted(int(end.steps or 0), "step"), why,
        )  # fmt: skip
