"""Finds and frees stuck work; finds runs that wait for each other in a circle, and names that no handler runs.

Also ends engine steps that no gateway serves, after the wait that their tasks allow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from runtime_core.bus.deliveries import Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.announcements import served_by_handlers
from runtime_core.engines.runtime_engine import UNAVAILABLE, wait_until
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.measures import Fields, cure_of, lack_of, unpacked, work_streams
from runtime_core.wire.ids import ROOT_RUN, DeliveryHeader, RunField, RunHeader
from runtime_core.wire.step import ENCODER, ENDED, Status, Step, StepFailure

SCAN_PAGE = 1000
PAUSE_SECONDS = 0.5
"""The pause between two scans: work that moves between them is not stuck."""
Found = TypeVar("Found")
Place = tuple[int, str, str]
"""Partition, task, run."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A run, call, instance or mailbox that cannot continue by itself."""

    partition: int
    what: str
    """`run`, `call`, `instance`, `mailbox` or `slot`: see the bus's function `repair`."""
    task: str
    run: str
    detail: str
    """The run's `cur`, the instance (`agent/key`), or the limit."""

    def __str__(self) -> str:
        match self.what:
            case "run":
                return f"run {self.run} of task {self.task}: its entry or timer ({self.detail}) is missing"
            case "call":
                return f"step {self.run} of task {self.task}: the call that would answer it is missing"
            case "instance":
                return f"instance {self.detail} is held by task {self.task}, which does not exist any more"
            case "slot":
                return f"{self.run} of task {self.task} has ended, but holds a slot of the limit {self.detail}"
        return f"the mailbox of {self.detail} holds events, but nothing will handle them"


async def find_stuck(bus: EventBus) -> list[Stuck]:
    """Return everything that is stuck in a partition."""
    return await _twice(lambda: _scan(bus))


async def _twice(look: Callable[[], Awaitable[list[Found]]]) -> list[Found]:
    """Scan twice, with a pause between, and return what both scans have found."""
    first = await look()
    if not first:
        return []
    await asyncio.sleep(PAUSE_SECONDS)
    second = await look()
    return [one for one in first if one in second]


async def free(bus: EventBus, stuck: Stuck) -> bool:
    """Dead-letter the stuck work or release the instance. Return False if it was not stuck after all."""
    error = {
        "type": "LostEntry",
        "message": "the entry or timer that would have resumed this was deleted from the broker, but not by Weft",
        "at": float(time.time_ns() // 1_000_000),
    }
    reply = await bus.call(
        "repair", stuck.what, stuck.task, stuck.run, stuck.detail, time.time_ns() // 1_000_000,
        msgspec.json.encode(error),
    )  # fmt: skip
    return reply == b"OK"


async def _scan(bus: EventBus) -> list[Stuck]:
    # Read tasks first: work that a later read does not find was either lost in between or has changed.
    runs = await open_runs(bus)
    held, idle_mailboxes = await _instances(bus)
    slots = await _slots(bus)
    entries, at_work = await _entries(bus)
    members = cast(list[bytes], await bus.transport.call("ZRANGE", bus.keys.timers, 0, -1))
    timers = {member.decode() for member in members}
    waiting = await _delayed(bus)
    queued = await _queued(bus)
    more_entries, more_at_work = await _entries(bus)
    entries |= more_entries
    at_work |= more_at_work
    found: list[Stuck] = []
    partition = bus.keys.partition
    for (task, run), fields in runs.items():
        if fields.get(RunField.CURRENT) == b"queue" and task not in queued:
            found.append(Stuck(partition, "run", task, run, "queue"))
        found += _stuck_run(partition, task, run, fields, runs, entries, at_work | waiting, timers)
    for instance, task, run in held:
        if (task, run) not in runs and (task, run) not in at_work | waiting:
            found.append(Stuck(partition, "instance", task, run, instance))
    for limit, task, path in slots:
        if not _is_open(runs, task, path):
            found.append(Stuck(partition, "slot", task, path, limit))
    found += [
        Stuck(partition, "mailbox", "", "", instance) for instance in idle_mailboxes if f"i|{instance}" not in timers
    ]
    return found


def _stuck_run(
    partition: int,
    task: str,
    run: str,
    fields: Fields,
    runs: dict[tuple[str, str], Fields],
    entries: set[tuple[str, str]],
    driven: set[tuple[str, str]],
    timers: set[str],
) -> list[Stuck]:
    cur = fields.get(RunField.CURRENT, b"").decode()
    stream = RunHeader.of(fields).stream
    missing = [
        (name[2:].decode(), chr(value[8])) for name, value in fields.items() if name.startswith(RunField.MISSING)
    ]
    lost_entry = "-" in cur and (stream, cur) not in entries
    lost_retry = cur in ("retry", "slot") and (task, run) not in driven
    if lost_entry or lost_retry or (cur == "held" and not missing):
        return [Stuck(partition, "run", task, run, cur)]
    found = []
    for step, kind in missing:
        child = f"{run}/{step}"
        if kind == "a":
            elsewhere = runs[task, ROOT_RUN].get(RunField.CHILD + child.encode(), b"").startswith(b"@")
            lost = (task, child) not in runs and not elsewhere
        elif kind == "i":
            lost = f"s|{task}|{run}|{step}" not in timers
        else:
            # People, messages and free keys answer the others.
            lost = kind not in "hmk" and (task, child) not in driven
        if lost:
            found.append(Stuck(partition, "call", task, child, ""))
    return found


async def open_runs(bus: EventBus) -> dict[tuple[str, str], Fields]:
    """Return the fields of every run of every open task, by task and run."""
    call, keys = bus.transport.call, bus.keys
    found: dict[tuple[str, str], Fields] = {}
    start = 0
    while tasks := cast(list[bytes], await call("ZRANGE", keys.index, start, start + SCAN_PAGE - 1)):
        start += SCAN_PAGE
        states = [(task.decode(), call("HGET", keys.task(task.decode()), "status")) for task in tasks]
        for task, asked in states:
            status = cast(bytes | None, await asked)
            if status is None or status.decode() in ENDED:
                continue
            fields = await hash_at(bus, keys.task(task))
            if fields.get(b"status", b"").decode() in (*ENDED, ""):
                continue
            found[task, ROOT_RUN] = fields
            for run in [name[2:].decode() for name in fields if name.startswith(RunField.CHILD)]:
                child = await hash_at(bus, f"{keys.base}run:{task}/{run}")
                if child:
                    found[task, run] = child
    return found


async def _instances(bus: EventBus) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return the held instances (instance, task, run), and the idle ones for which events wait."""
    call, base = bus.transport.call, bus.keys.base
    held: list[tuple[str, str, str]] = []
    async for instances in _named(bus, "inst", "hash"):
        for instance, asked in [(one, call("HGET", f"{base}inst:{one}", "busy")) for one in instances]:
            if busy := cast(bytes | None, await asked):
                task, _, run = busy.decode().rpartition("\n")[2].rpartition("|")
                held.append((instance, task, run))
    idle: list[str] = []
    async for instances in mailboxes(bus):
        for instance, asked in [(one, call("HGET", f"{base}inst:{one}", "busy")) for one in instances]:
            if not await asked:
                idle.append(instance)
    return held, idle


async def _slots(bus: EventBus) -> list[tuple[str, str, str]]:
    """Return what holds slots of limits: limit, task, and the path of a run or a call."""
    found: list[tuple[str, str, str]] = []
    async for limits in _named(bus, "slots", "zset"):
        for limit, asked in [
            (one, bus.transport.call("ZRANGE", f"{bus.keys.base}slots:{one}", 0, -1)) for one in limits
        ]:
            for ref in cast(list[bytes], await asked):
                task, _, path = ref.decode().rpartition("|")
                found.append((limit, task, path))
    return found


def _is_open(runs: dict[tuple[str, str], Fields], task: str, path: str) -> bool:
    """Return whether a run or a call has not ended: its task is open, and its step lacks a result."""
    run, _, step = path.rpartition("/")
    return (task, path) in runs if not run else f"m:{step}".encode() in runs.get((task, run), {})


def mailboxes(bus: EventBus) -> AsyncIterator[list[str]]:
    """Yield pages of the instances (`agent/key`) for which events wait. One that moves during it may appear twice."""
    return _named(bus, "mail", "list")


async def _named(bus: EventBus, what: str, kind: str) -> AsyncIterator[list[str]]:
    """Yield pages of the names that follow `what` in keys of type `kind`."""
    prefix = f"{bus.keys.base}{what}:"
    cursor = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 2000, "TYPE", kind)
        cursor, found = cast(tuple[bytes, list[bytes]], await bus.transport.call(*scan))
        if found:
            yield [key.decode("utf-8", "replace").removeprefix(prefix) for key in found]
        if cursor == b"0":
            return


async def hash_at(bus: EventBus, key: str) -> Fields:
    """Return a hash of the broker; empty if it does not exist."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", key))
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def _entries(bus: EventBus) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return all work on the streams, as (stream, entry id) and as (task, run)."""
    entries: set[tuple[str, str]] = set()
    runs: set[tuple[str, str]] = set()
    for stream in await work_streams(bus):
        start = "-"
        while True:
            reply = pairs(await bus.transport.call("XRANGE", bus.keys.stream(stream), start, "+", "COUNT", SCAN_PAGE))
            for entry, fields in reply:
                entries.add((stream, entry.decode()))
                runs |= _run_of(dict(zip(fields[::2], fields[1::2], strict=False)))
            if len(reply) < SCAN_PAGE:
                break
            start = f"({reply[-1][0].decode()}"
    return entries, runs


async def _queued(bus: EventBus) -> set[str]:
    """Return the tasks that wait in the queue of a tenant that has turns."""
    call, keys = bus.transport.call, bus.keys
    found: set[str] = set()
    for stream in await work_streams(bus):
        for tenant in cast(list[bytes], await call("ZRANGE", keys.turns(stream), 0, -1)):
            start = 0
            key = keys.queue(stream, tenant.decode())
            while tasks := cast(list[bytes], await call("ZRANGE", key, start, start + SCAN_PAGE - 1)):
                start += SCAN_PAGE
                found |= {task.decode() for task in tasks}
    return found


async def _delayed(bus: EventBus) -> set[tuple[str, str]]:
    """Return (task, run) of the deliveries that wait in the timers for a retry, or for a slot of a limit."""
    key = bus.keys.base + "delayed"
    members = cast(list[bytes], await bus.transport.call("HKEYS", key))
    waiting = cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.waiting))
    found = {(task, run) for task, _, run in (ref.decode().rpartition("|") for ref in waiting)}
    for start in range(0, len(members), SCAN_PAGE):
        retries = [member for member in members[start : start + SCAN_PAGE] if member.startswith(b"e|")]
        if retries:
            for packed in cast(list[bytes | None], await bus.transport.call("HMGET", key, *retries)):
                found |= _run_of(unpacked(packed))
    return found


def _run_of(fields: Fields) -> set[tuple[str, str]]:
    header = DeliveryHeader.of(fields)
    return {(header.task, header.run)} if header.run else set()


async def find_circles(buses: Sequence[EventBus]) -> list[str]:
    """Return each circle of waiting runs as one line."""
    return await _twice(lambda: _scan_for_circles(buses))


async def _scan_for_circles(buses: Sequence[EventBus]) -> list[str]:
    runs: dict[Place, Fields] = {}
    for bus in buses:
        for (task, run), fields in (await open_runs(bus)).items():
            runs[bus.keys.partition, task, run] = fields
    lines: dict[Place, str] = {}
    """The instance whose mailbox a run waits in, to start or for the key that it gave up."""
    waits: dict[Place, list[Place]] = {}
    for place, fields in runs.items():
        waits[place] = _children(place, fields, runs)
        if fields.get(RunField.CURRENT, b"") == b"mail" or fields.get(RunField.RELEASED, b"").startswith(b"w"):
            header = RunHeader.of(fields)
            lines[place] = f"{header.agent}/{header.key}"
            waits[place] += await _holders(buses[place[0]], lines[place])
    found = []
    for circle in _circles(waits):
        links = [f"{lines[place]} (task {place[1]})" for place in circle if place in lines]
        start = links.index(min(links))
        found.append(" waits for ".join([*links[start:], *links[:start], links[start]]))
    return sorted(set(found))


def _children(place: Place, fields: Fields, runs: dict[Place, Fields]) -> list[Place]:
    """Return the runs whose answers a run waits for."""
    partition, task, run = place
    found = []
    for name, value in fields.items():
        if not name.startswith(RunField.MISSING) or value[8:9] != b"a":
            continue
        child = f"{run}/{name[2:].decode()}"
        elsewhere = runs.get((partition, task, ROOT_RUN), {}).get(RunField.CHILD + child.encode(), b"").decode()
        if elsewhere.startswith("@"):
            there, _, other = elsewhere[1:].partition(":")
            found.append((int(there), other, ROOT_RUN))
        else:
            found.append((partition, task, child))
    return found


async def _holders(bus: EventBus, instance: str) -> list[Place]:
    """Return the runs that hold an instance."""
    busy = cast(bytes | None, await bus.transport.call("HGET", bus.keys.base + f"inst:{instance}", "busy"))
    found = []
    for holder in (busy or b"").decode().split("\n"):
        task, _, run = holder.rpartition("|")
        if task:
            found.append((bus.keys.partition, task, run))
    return found


def _circles(waits: dict[Place, list[Place]]) -> list[list[Place]]:
    """Return one circle for each group of runs that wait for each other, in the order of their waits."""
    found: list[list[Place]] = []
    done: set[Place] = set()
    for start in waits:
        path: list[Place] = []
        on_path: dict[Place, int] = {}
        todo: list[tuple[Place, bool]] = [(start, True)]
        while todo:
            place, entering = todo.pop()
            if not entering:
                path.pop()
                del on_path[place]
                done.add(place)
            elif place in on_path:
                found.append(path[on_path[place] :])
            elif place not in done:
                on_path[place] = len(path)
                path.append(place)
                todo.append((place, False))
                todo += [(following, True) for following in waits.get(place, ())]
    return found


logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""The time between two checks in a process without a keeper."""
WARN_SECONDS = 60.0
STEPS_PAGE = 500
"""Steps of a stream per check; the next check continues after them."""


class EngineWatch:
    """Checks one partition; its leader runs it. If a stream has a live gateway, that ends its steps."""

    def __init__(self, bus: EventBus, *, gateways_may_start: bool = True) -> None:
        """`gateways_may_start` is False in a process that is alone on its broker: then no step waits."""
        self._bus = bus
        self._gateways_may_start = gateways_may_start
        self._warned: dict[str, float] = {}
        self._read: dict[str, str] = {}
        """The last entry read of a stream that has more."""

    async def check(self) -> None:
        """Check all engine streams. Most namespaces have none."""
        now = time.monotonic()
        for stream in cast(list[bytes], await self._bus.transport.call("HKEYS", self._bus.keys.engines)):
            await self._check_stream(stream.decode(), now)

    async def _check_stream(self, stream: str, now: float) -> None:
        waiting = cast(int, await self._bus.transport.call("XLEN", self._bus.keys.stream(stream)))
        if not waiting:
            return
        gateways = await self._bus.gateways(stream)
        if gateways.live:
            return
        if now - self._warned.get(stream, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[stream] = now
            logger.warning("steps wait on %s (%d): %s", stream, waiting, gateways.problem)
        # If no gateway was ever seen, only the deadline in the step counts.
        away_since = 0.0 if gateways.silent_seconds is None else gateways.now - gateways.silent_seconds
        steps = await self._steps(stream)
        for step, status in zip(steps, await self._statuses(steps), strict=True):
            late = not self._gateways_may_start or wait_until(step.context, away_since) <= gateways.now
            # Steps of ended tasks stay here until they are ended too.
            if late or status is None or status.decode() in ENDED:
                await self._end(step, gateways.problem)

    async def _steps(self, stream: str) -> list[Delivery]:
        key, after = self._bus.keys.stream(stream), self._read.pop(stream, "")
        found = pairs(
            await self._bus.transport.call("XRANGE", key, f"({after}" if after else "-", "+", "COUNT", STEPS_PAGE)
        )
        if len(found) == STEPS_PAGE:
            self._read[stream] = found[-1][0].decode()
        steps = []
        for entry, fields in found:
            try:
                steps.append(Delivery(self._bus.keys.partition, stream, entry, fields))
            except InvalidInput:
                continue  # not written by the bus: the gateway that reads it dead-letters it
        return steps

    async def _statuses(self, steps: list[Delivery]) -> list[bytes | None]:
        call, keys = self._bus.transport.call, self._bus.keys
        return cast(
            list[bytes | None], await asyncio.gather(*(call("HGET", keys.task(step.task), "status") for step in steps))
        )

    async def _end(self, step: Delivery, reason: str) -> None:
        now = time.time() * 1000
        error = StepFailure(UNAVAILABLE, reason, at=now)
        put = float(step.entry.partition(b"-")[0])
        row = Step(step.run, step.stream.partition(":")[0], step.name, Status.FAILED, put, now)
        row.attempt = step.attempt
        row.input = msgspec.Raw(step.data)
        row.error = error
        row.owner = self._bus.owner
        if step.errors:
            row.errors = msgspec.json.decode(step.errors, type=list[StepFailure])
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        if await self._bus.expire_call(step, int(now), payload, ENCODER.encode([row])):
            logger.warning("%r ended: no gateway started in time", step)


async def lacking(bus: EventBus, wanted: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return those of these kinds and names that no running handler has: `kind`, `name`, and the `pool` if its handlers
    are not the default ones.
    """
    served, found = await served_by_handlers(bus), []
    for kind, name in dict.fromkeys(wanted):
        if served.lacks(kind, name):
            key = bus.keys.agents if kind == "agent" else bus.keys.tools
            stream = cast("bytes | None", await bus.transport.call("HGET", key, name)) or b""
            pool = stream.decode().partition(":")[2]
            found.append({"kind": kind, "name": name, **({"pool": pool} if pool else {})})
    return found


def describe_lack(lacks: Mapping[str, str]) -> tuple[str, str]:
    """Describe an item of `lacking`, and what to do about it."""
    pool = lacks.get("pool", "")
    return lack_of(lacks["kind"], lacks["name"], pool), cure_of(pool)
