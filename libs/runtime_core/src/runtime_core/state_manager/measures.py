"""Metrics that a leader reads from the broker: streams, lags, readers, mailboxes, timers, memory."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from runtime_core.bus.connection import Reply, Transport, fields, position
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, STATE_MANAGER, TRAJECTORY_RECORDER, group_of, ingress
from runtime_core.bus.namespace import server_info
from runtime_core.consumer.announcements import (
    HANDLED,
    announced_runtime_agents,
    announced_streams,
    forget_served,
    served_by_handlers,
)
from runtime_core.errors import ServerError
from runtime_core.state_manager.dead_letters import letter_bytes, trimmed_letters
from runtime_core.state_manager.publishers import ALL_OTHERS, Publishers, waiting_tasks
from runtime_core.state_manager.schedules import schedules_by_tenant
from runtime_core.telemetry import names
from runtime_core.telemetry.names import Sample
from runtime_core.wire.ids import DeliveryHeader, RunHeader

if TYPE_CHECKING:  # clients import this module, and need no client of Prometheus, which takes 40 ms
    from runtime_core.telemetry.metrics import PartitionMetrics

logger = logging.getLogger(__name__)

UNSERVED_TASKS = 200
"""The most open tasks whose agents are compared with what handlers can run."""
COUNT_PAGE = 100
COUNT_PAGES_MAX = 50
"""Pages of entries that a measurement counts from each end of a stream."""
Call = Callable[..., Awaitable[Reply]]
Fields = dict[bytes, bytes]
MEASURE_SECONDS = 2.0
"""The shortest time between two measurements."""
UNSERVED_LOOKS = 5
"""How many checks in a row must find work without a handler before a warning: a reload takes a few seconds."""
TENANTS_SHOWN = 20
SCHEDULES_SECONDS = 60.0
"""How often the bytes of schedules are counted, since that reads all of them."""
_LIVE = (b"accepted", b"running", b"waiting")
LEADERS = ("admit", "keep")
"""Leader roles of the state-manager; a partition has one of them."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group. Ages are in seconds by the broker's clock, 0 if there is no such entry."""

    waiting: int
    """Entries that the group has not read."""
    pending: int = 0
    """Entries that the group has read and not settled."""
    oldest_waiting: float = 0.0
    oldest_pending: float = 0.0
    consumers: int | None = None
    """The consumers of the group, including dead ones; None: there is no such group yet."""


@dataclass(frozen=True, slots=True)
class Group:
    read: str
    """The id of the last delivered entry, or the reader's position."""
    pending: int
    consumers: int


async def lag_of_work(call: Call, key: str, group: str, now_ms: int) -> Lag | None:
    """Return the lag of a work stream, on which finished entries are deleted; None if it does not exist.

    Every entry that is not pending waits, even one before the group's position: nobody would read that one, and the
    metric must show it.
    """
    length, first = cast(int, await call("XLEN", key)), await _first(call, key, "-")
    found = await groups_of(call, key)
    if found is None:
        return None
    own = found.get(group)
    if own is None:
        return Lag(length, 0, _age(first, now_ms))
    oldest_pending = await _oldest_pending(call, key, group) if own.pending else None
    ahead = await _first(call, key, f"({own.read}")
    waiting = max(0, length - own.pending)
    if ahead is not None and (not waiting or _before(oldest_pending, first)):
        # Deleted entries still count as pending: they must not hide waiting ones.
        counted, _ = await _counted(call, key, f"({own.read}", "+")
        waiting = max(waiting, counted)
    passed_over = waiting > 0 and first is not None and (oldest_pending is None or _before(first, oldest_pending))
    return Lag(
        waiting,
        own.pending,
        _age(first if passed_over else ahead, now_ms) if waiting else 0.0,
        _age(oldest_pending, now_ms),
        own.consumers,
    )


async def lags_of_cursors(call: Call, key: str, groups: tuple[str, ...], now_ms: int) -> dict[str, Lag]:
    """Return the lags of a stream whose groups only store positions; empty if the stream does not exist."""
    length = cast(int, await call("XLEN", key))
    found = await groups_of(call, key)
    if found is None:
        return {}
    lags = {}
    for group in groups:
        own = found.get(group)
        read = own.read if own is not None else "0-0"
        ahead = await _first(call, key, f"({read}")
        lags[group] = Lag(
            0 if ahead is None else await _ahead(call, key, read, length),
            own.pending if own is not None else 0,
            _age(ahead, now_ms),
        )
    return lags


async def _ahead(call: Call, key: str, read: str, length: int) -> int:
    """Return how many entries follow `read`, counted from the nearer end of the stream.

    If both ends are far, return an upper bound: the length without the counted entries before `read`.
    """
    behind, all_counted = await _counted(call, key, "-", read, COUNT_PAGE)
    if not all_counted:
        ahead, all_counted = await _counted(call, key, f"({read}", "+")
        if all_counted:
            return ahead
        behind, _ = await _counted(call, key, "-", read)
    return max(1, length - behind)


async def _counted(
    call: Call, key: str, start: str, end: str, limit: int = COUNT_PAGE * COUNT_PAGES_MAX
) -> tuple[int, bool]:
    """Count the entries in a range, up to `limit`. Return the count and whether it is complete."""
    count = 0
    while count < limit:
        entries = pairs(await call("XRANGE", key, start, end, "COUNT", COUNT_PAGE))
        count += len(entries)
        if len(entries) < COUNT_PAGE:
            return count, True
        start = f"({entries[-1][0].decode()}"
    return count, False


async def _first(call: Call, key: str, start: str) -> str | None:
    entries = pairs(await call("XRANGE", key, start, "+", "COUNT", 1))
    return entries[0][0].decode() if entries else None


async def work_streams(bus: EventBus) -> list[str]:
    """Return the work streams of a partition: the default ones, and those of pools and engines of apps."""
    engines = cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.engines))
    found = {*GROUPS, *(name.decode() for name in engines)}
    for kind in HANDLED:
        found.update((await announced_streams(bus, kind)).values())
    return sorted(found)


async def groups_of(call: Call, key: str) -> dict[str, Group] | None:
    """Return the groups of a stream by name; None if it does not exist."""
    try:
        reply = cast(list[list[Reply]], await call("XINFO", "GROUPS", key))
    except ServerError as error:
        if "no such key" not in str(error):
            raise
        return None
    groups = {}
    for flat in reply:
        named = dict(zip(flat[::2], flat[1::2], strict=True))
        name = cast(bytes, named[b"name"]).decode()
        read = cast(bytes, named[b"last-delivered-id"]).decode()
        groups[name] = Group(read, cast(int, named[b"pending"]), cast(int, named[b"consumers"]))
    return groups


async def _oldest_pending(call: Call, key: str, group: str) -> str | None:
    """Return the id of the oldest entry that the group has read and not settled."""
    try:
        summary = cast(list[Reply], await call("XPENDING", key, group))
    except ServerError as error:
        if not str(error).startswith("NOGROUP"):
            raise
        return None  # the group was destroyed meanwhile
    return None if summary[1] is None else cast(bytes, summary[1]).decode()


def _before(one: str | None, other: str | None) -> bool:
    return one is not None and (other is None or position(one) < position(other))


def _age(entry: str | None, now_ms: int) -> float:
    return 0.0 if entry is None else max(0.0, (now_ms - int(entry.partition("-")[0])) / 1000)


@dataclass(frozen=True, slots=True)
class TimerLag:
    """The timers of a partition. `late` is the age of the oldest due one, in seconds."""

    waiting: int
    due: int
    late: float


async def lag_of_timers(bus: EventBus, now_ms: int) -> TimerLag:
    """Count the timers of a partition, by the heartbeat clock that promotes them."""
    call, keys = bus.transport.call, bus.keys
    offset = cast(bytes | None, await call("HGET", keys.meta, "offset"))
    now = now_ms + int(offset or 0)
    # A timer at 0 is a mailbox that is ready now: it cannot be late.
    oldest = cast(list[bytes], await call("ZRANGEBYSCORE", keys.timers, "(0", now, "WITHSCORES", "LIMIT", 0, 1))
    return TimerLag(
        cast(int, await call("ZCARD", keys.timers)),
        cast(int, await call("ZCOUNT", keys.timers, "-inf", now)),
        max(0.0, (now - float(oldest[1])) / 1000) if oldest else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Unserved:
    """Work for a name that no running handler has."""

    kind: str
    """`agent` or `tool`."""
    name: str
    pool: str
    """The pool whose handlers can have it; empty: the default one."""
    count: int
    task: str
    """One of the tasks."""

    def __str__(self) -> str:
        waits = "run or call waits" if self.count == 1 else "runs or calls wait"
        return f"{lack_of(self.kind, self.name, self.pool)}: {self.count} {waits} for it, such as task {self.task}"


def lack_of(kind: str, name: str, pool: str) -> str:
    """Say which name no running handler has."""
    return f"no running handler{f' of pool {pool!r}' if pool else ''} has {kind} {name!r}"


def cure_of(pool: str) -> str:
    """Say how to get a handler that has the name."""
    return f"start one with WEFT_POOLS={pool}" if pool else "start one, or roll back"


async def find_unserved(bus: EventBus, most_tasks: int = UNSERVED_TASKS) -> list[Unserved]:
    """Return the work that waits for names without a running handler: of the open tasks, the oldest ones, and of the
    calls those that are on a stream or about to be retried.
    """
    call, keys = bus.transport.call, bus.keys
    now = await served_by_handlers(bus)
    streams = {
        (str(kind), name): stream
        for kind in HANDLED
        for name, stream in (await announced_streams(bus, kind)).items()
        if now.lacks(kind, name)
    }
    # The check `waits` of weft doctor covers the agents of runtimes.
    for name in await announced_runtime_agents(bus) if streams else ():
        streams.pop(("agent", name), None)
    if not streams:
        return []
    tasks: dict[tuple[str, str], list[str]] = {place: [] for place in streams}
    for stream, header in [*await _on_streams(bus, set(streams.values())), *await _next_retries(bus)]:
        kind = stream.partition(":")[0]
        if (kind, header.name) in tasks:
            tasks[kind, header.name].append(header.task)
    opened = [task.decode() for task in cast(list[bytes], await call("ZRANGE", keys.open_tasks, 0, most_tasks - 1))]
    headers = [call("HGET", keys.task(task), "h") for task in opened]
    for task, reply in zip(opened, headers, strict=True):
        agent = RunHeader.parse(cast(bytes | None, await reply)).agent
        if ("agent", agent) in tasks and task not in tasks["agent", agent]:
            tasks["agent", agent].append(task)
    # The next handler of any app settles what belongs to an ended task.
    live = set(opened)
    for task in {task for each in tasks.values() for task in each} - live:
        if await call("HGET", keys.task(task), "status") in _LIVE:
            live.add(task)
    kept = {place: [task for task in each if task in live] for place, each in sorted(tasks.items())}
    return [
        Unserved(*place, streams[place].partition(":")[2], len(each), each[0]) for place, each in kept.items() if each
    ]


def unpacked(packed: Reply) -> Fields:
    """Return the fields of a delivery that waits in the timers; empty if they cannot be decoded."""
    try:
        flat = msgspec.msgpack.decode(cast(bytes, packed), type=list[str]) if packed is not None else []
    except msgspec.MsgspecError:
        return {}
    return {name.encode(): value.encode() for name, value in zip(flat[::2], flat[1::2], strict=False)}


async def _on_streams(bus: EventBus, streams: set[str]) -> list[tuple[str, DeliveryHeader]]:
    """Return the headers of the first deliveries on these work streams."""
    found = []
    for stream in sorted(streams):
        for _, flat in pairs(
            await bus.transport.call("XRANGE", bus.keys.stream(stream), "-", "+", "COUNT", COUNT_PAGE)
        ):
            found.append((stream, DeliveryHeader.of(dict(zip(flat[::2], flat[1::2], strict=True)))))
    return found


async def _next_retries(bus: EventBus) -> list[tuple[str, DeliveryHeader]]:
    """Return the work streams and headers of the deliveries that are retried next. A handler that lacks a name hands
    its deliveries back for a second.
    """
    call, keys = bus.transport.call, bus.keys
    timers = cast(list[bytes], await call("ZRANGE", keys.timers, 0, COUNT_PAGE * 10 - 1))
    retries = [timer for timer in timers if timer.startswith(b"e|")]
    if not retries:
        return []
    kept = cast(list[bytes | None], await call("HMGET", keys.base + "delayed", *retries))
    streams = [each.decode().split("|")[1] for each in retries]
    headers = [DeliveryHeader.of(unpacked(data)) for data in kept]
    return list(zip(streams, headers, strict=True))


class Measures:
    """Measures one partition; its leader runs it. `edge` reaches the ingress streams, measured with partition 0."""

    def __init__(self, bus: EventBus, measured: PartitionMetrics, leads: Callable[[], bool], edge: Transport) -> None:
        self._bus = bus
        self._measured = measured
        self._leads = leads
        self._edge = edge
        self._begun = float("-inf")
        self._trouble = ""
        self._schedules_counted = float("-inf")
        self._schedule_bytes: Counter[str] = Counter()
        self._unserved_looks: Counter[tuple[str, str]] = Counter()
        self._logged: set[tuple[str, str]] = set()
        """Kinds and names without a running handler that are logged."""

    async def refresh(self) -> None:
        """Measure and export, at most every 2 seconds. Errors of the server are logged."""
        if time.monotonic() - self._begun < MEASURE_SECONDS:
            return
        self._begun = time.monotonic()
        try:
            samples = await self.take()
        except ServerError as error:
            # Metrics must not stop other chores. Old values disappear after a while.
            if str(error) != self._trouble:
                logger.warning("cannot measure partition %d: %s", self._bus.keys.partition, error)
            self._trouble = str(error)
            return
        self._trouble = ""
        self._measured.put(self._bus.keys.partition, samples, self._leads)

    async def take(self) -> list[Sample]:
        """Measure the partition now."""
        asked = time.perf_counter()
        now_ms = await _now_ms(self._bus.transport)
        samples = [Sample(names.BROKER_PING, time.perf_counter() - asked)]
        samples += await self._streams(now_ms)
        timers = await lag_of_timers(self._bus, now_ms)
        samples.append(Sample(names.TIMERS_WAITING, timers.waiting))
        samples.append(Sample(names.TIMERS_DUE, timers.due))
        samples.append(Sample(names.TIMERS_LATE, timers.late))
        samples += await self._work()
        samples += await self._unserved()
        samples += await self._schedules()
        samples += _of_broker(await server_info(self._bus.transport))
        samples.append(Sample(names.MEASURED_AT, time.time()))
        return samples

    async def _streams(self, now_ms: int) -> list[Sample]:
        call, keys = self._bus.transport.call, self._bus.keys
        samples: list[Sample] = []
        for stream in await work_streams(self._bus):
            group = group_of(stream)
            lag = await lag_of_work(call, keys.stream(stream), group, now_ms)
            if lag is not None:
                samples += _of_group(stream, group, lag, await self._readers(stream, group))
        leading = await self._leading(*LEADERS)
        groups = {STATE_MANAGER: leading, TRAJECTORY_RECORDER: await self._leading("record")}
        for group, lag in (await lags_of_cursors(call, keys.record, tuple(groups), now_ms)).items():
            samples += _of_group("record", group, lag, groups[group])
        if keys.partition == 0:
            edge = self._edge
            lag = await lag_of_work(edge.call, ingress(keys.namespace), STATE_MANAGER, await _now_ms(edge))
            samples += _of_group("tasks", STATE_MANAGER, lag or Lag(0), leading)
            for publisher in await Publishers(self._bus).all():
                samples += _of_group(
                    f"tasks:{publisher.name}", STATE_MANAGER, await self._lag_of_publisher(publisher.name), leading
                )
        return samples

    async def _lag_of_publisher(self, publisher: str) -> Lag:
        key = ingress(self._bus.keys.namespace, publisher)
        try:
            return await lag_of_work(self._edge.call, key, STATE_MANAGER, await _now_ms(self._edge)) or Lag(0)
        except ServerError as error:
            # A publisher may replace its stream by another type; other metrics must not suffer.
            logger.debug("cannot measure the stream of publisher %s: %s", publisher, error)
            return Lag(0)

    async def _readers(self, stream: str, group: str) -> int:
        """Count the consumers of a group whose owners are alive."""
        try:
            key = self._bus.keys.stream(stream)
            reply = cast(list[list[Reply]], await self._bus.transport.call("XINFO", "CONSUMERS", key, group))
        except ServerError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            return 0
        return await self._alive([cast(bytes, dict(zip(one[::2], one[1::2], strict=True))[b"name"]) for one in reply])

    async def _leading(self, *roles: str) -> int:
        call, base = self._bus.transport.call, self._bus.keys.base
        owners = [cast(bytes | None, await call("HGET", f"{base}leader:{role}", "owner")) for role in roles]
        return await self._alive([owner for owner in owners if owner is not None])

    async def _alive(self, owners: list[bytes]) -> int:
        if not owners:
            return 0
        scores = cast(list[Reply], await self._bus.transport.call("ZMSCORE", self._bus.keys.alive, *owners))
        return sum(score is not None for score in scores)

    async def _work(self) -> Iterable[Sample]:
        backlog = await self._bus.measure_backlog()
        letters = cast(int, await self._bus.transport.call("XLEN", self._bus.keys.dead))
        sizes, trimmed = await letter_bytes(self._bus), await trimmed_letters(self._bus)
        streams = sorted({share for _, share in trimmed} | (sizes.keys() - {""}))
        return (
            Sample(names.TASKS_ADMITTED, backlog.started),
            Sample(names.TASKS_OPEN, backlog.open),
            Sample(names.MAILBOX_WAITING, backlog.mail),
            Sample(names.MAILBOX_DEEPEST, backlog.deepest),
            Sample(names.DEAD_LETTERS_KEPT, letters),
            *(Sample(names.DEAD_LETTER_BYTES, sizes.get(share, 0), (share,)) for share in streams),
            # 0 for each stream with letters, so that the first trimmed one is an increase.
            *(
                Sample(names.DEAD_LETTERS_TRIMMED, trimmed.get((cause, share), 0), (share, cause))
                for share in streams
                for cause in names.TRIM_CAUSES
            ),
            *await self._queued(),
            *await self._limited(),
        )

    async def _unserved(self) -> list[Sample]:
        """Return the work without a handler, and log what `UNSERVED_LOOKS` checks in a row have found."""
        await forget_served(self._bus)
        found = {(each.kind, each.name): each for each in await find_unserved(self._bus)}
        looks = self._unserved_looks = Counter({place: self._unserved_looks[place] + 1 for place in found})
        long = {place for place, count in looks.items() if count >= UNSERVED_LOOKS}
        for place in long - self._logged:
            each = found[place]
            logger.warning("partition %d: %s; %s", self._bus.keys.partition, each, cure_of(each.pool))
        for kind, name in self._logged - found.keys():
            logger.info("partition %d: no work waits any more for %s %r", self._bus.keys.partition, kind, name)
        self._logged = long
        return [Sample(names.NAMES_UNSERVED, each.count, place) for place, each in found.items()]

    async def _queued(self) -> list[Sample]:
        """Return the tasks that wait for turns, by tenant. `*` always has a value, so that the metric exists."""
        counts: Counter[str] = Counter()
        for of_stream in (await waiting_tasks(self._bus)).values():
            counts += of_stream
        most = [name for name, _ in counts.most_common(TENANTS_SHOWN + 1) if name != ALL_OTHERS][:TENANTS_SHOWN]
        shown = Counter({name or "-": counts[name] for name in most})
        shown[ALL_OTHERS] = counts.total() - shown.total()
        return [Sample(names.TASKS_QUEUED, count, (name,)) for name, count in shown.items()]

    async def _schedules(self) -> list[Sample]:
        """Return the bytes of schedules by tenant. `*` always has a value, so that the metric exists."""
        if self._bus.keys.partition != 0:
            return []
        if time.monotonic() - self._schedules_counted >= SCHEDULES_SECONDS:
            self._schedules_counted = time.monotonic()
            tenants = {each.tenant for each in await Publishers(self._bus).all()}
            _, self._schedule_bytes = await schedules_by_tenant(self._bus, tenants)
        most = [tenant for tenant, _ in self._schedule_bytes.most_common(TENANTS_SHOWN + 1) if tenant][:TENANTS_SHOWN]
        shown = Counter({tenant: self._schedule_bytes[tenant] for tenant in most})
        shown[ALL_OTHERS] = self._schedule_bytes.total() - shown.total()
        return [Sample(names.SCHEDULE_BYTES, size, (tenant,)) for tenant, size in shown.items()]

    async def _limited(self) -> list[Sample]:
        """Return how much holds slots of limits, and waits for them. `*` always has a value."""
        samples = []
        counts = await limited_work(self._bus)
        for what, metric in (("slots", names.LIMIT_SLOTS), ("waits", names.LIMIT_WAITING)):
            own = counts[what]
            samples += [Sample(metric, count, (name,)) for name, count in ((ALL_OTHERS, own.total()), *own.items())]
        return samples


async def limited_work(bus: EventBus) -> dict[str, Counter[str]]:
    """Return how much holds slots of limits (`slots`) and waits for them (`waits`), by agent or tool."""
    found: dict[str, Counter[str]] = {"slots": Counter(), "waits": Counter()}
    for field, count in fields(await bus.transport.call("HGETALL", bus.keys.limited)).items():
        what, _, name = field.partition(" ")
        found[what][name] = int(count)
    return found


async def _now_ms(transport: Transport) -> int:
    """Return the broker's time, which entry ids use."""
    seconds, micros = cast(list[bytes], await transport.call("TIME"))
    return int(seconds) * 1000 + int(micros) // 1000


def _of_group(stream: str, group: str, lag: Lag, readers: int) -> Iterator[Sample]:
    place = (stream, group)
    yield Sample(names.STREAM_LAG, lag.waiting, place)
    yield Sample(names.STREAM_PENDING, lag.pending, place)
    yield Sample(names.STREAM_OLDEST_WAITING, lag.oldest_waiting, place)
    yield Sample(names.STREAM_OLDEST_PENDING, lag.oldest_pending, place)
    yield Sample(names.STREAM_READERS, readers, place)


def _of_broker(info: dict[str, str]) -> Iterator[Sample]:
    """Yield the server's own figures; nothing if this user may not read them."""
    for metric, field in (
        (names.BROKER_MEMORY, "used_memory"),
        (names.BROKER_MEMORY_LIMIT, "maxmemory"),
        (names.BROKER_CLIENTS, "connected_clients"),
        (names.BROKER_UPTIME, "uptime_in_seconds"),
        (names.BROKER_EVICTED_KEYS, "evicted_keys"),
    ):
        if field in info:
            yield Sample(metric, float(info[field]))
    if "aof_enabled" in info:
        well = info["aof_enabled"] == "1" and info.get("aof_last_write_status") == "ok"
        yield Sample(names.BROKER_APPEND_ONLY_OK, float(well))
