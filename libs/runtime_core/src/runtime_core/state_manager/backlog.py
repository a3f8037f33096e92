"""The backlog: how much work waits, messages that wait behind another one or for an agent that no process runs, and
what handlers hold, also those that run a delivery alone.

A handler that waits for a message in its own agent's mailbox waits forever, and only its code knows. Weft can tell who
waits behind whom.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from runtime_core.base.text import duration
from runtime_core.bus.connection import Reply, fields, text
from runtime_core.bus.deliveries import QUARANTINE_AFTER, Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, group_of, ingress
from runtime_core.consumer.announcements import announced_runtime_agents, announced_streams
from runtime_core.declare.manifest import RUNTIME_MANIFEST
from runtime_core.errors import InvalidInput, ServerError
from runtime_core.state_manager.measures import (
    Lag,
    groups_of,
    lag_of_timers,
    lag_of_work,
    limited_work,
    work_streams,
)
from runtime_core.state_manager.publishers import Publishers, waiting_tasks
from runtime_core.state_manager.stuck import mailboxes, open_runs
from runtime_core.wire.ids import ROOT_RUN, RunField, RunHeader

Row = dict[str, Any]
"""A stream, or a sum, as JSON. (Any: JSON.)"""
PAUSE_SECONDS = 2.0
PENDING_MAX = 1000
SILENT_MS = 10_000
"""After this time without a heartbeat no process of the namespace lives."""


@dataclass(frozen=True, slots=True)
class MailboxWait:
    """Messages that wait for one agent."""

    agent: str
    """An agent's name, or `name/key`."""
    count: int
    why: str
    unserved: bool = False
    """Whether no process runs the agent."""

    def __str__(self) -> str:
        waits = "message waits" if self.count == 1 else "messages wait"
        return f"{self.count} {waits} for {self.agent}: {self.why}"


async def find_waits(bus: EventBus) -> list[MailboxWait]:
    """Return what waits in one partition for an agent of a runtime that is busy, or that no process runs."""
    streams = await agent_streams(bus)
    served = {name: await processes_of(bus, stream) for name, stream in streams.items()}
    waiting = {name: await _length(bus, stream) for name, stream in streams.items() if not served[name]}
    behind = []
    async for instances in mailboxes(bus):
        for instance in instances:
            name = instance.partition("/")[0]
            if name in waiting:
                waiting[name] += await _queued(bus, instance)
            elif name in served and (wait := await wait_at(bus, instance)) is not None:
                behind.append(wait)
    why = "no process runs it; weft agents drop {} forgets it"
    gone = [MailboxWait(name, count, why.format(name), unserved=True) for name, count in waiting.items() if count]
    return gone + behind


async def find_lasting_waits(buses: Sequence[EventBus]) -> list[MailboxWait]:
    """Return the waits that two looks find, with a pause between: a busy agent has others at the second look."""
    first = [wait for bus in buses for wait in await find_waits(bus)]
    if not first:
        return []
    await asyncio.sleep(PAUSE_SECONDS)
    return [wait for bus in buses for wait in await find_waits(bus) if wait in first]


async def first_waiting(bus: EventBus, instance: str) -> str:
    """Return the first run in the mailbox of an instance, `task|run`; empty if there is none."""
    first = cast(bytes | None, await bus.transport.call("LINDEX", f"{bus.keys.base}mail:{instance}", 0))
    return "" if first is None else first.decode()


async def _queued(bus: EventBus, instance: str) -> int:
    """Return how many messages are in the mailbox of an instance."""
    return cast(int, await bus.transport.call("LLEN", f"{bus.keys.base}mail:{instance}"))


async def wait_at(bus: EventBus, instance: str) -> MailboxWait | None:
    """Return what waits in the mailbox of an instance (`agent/key`); None if it is empty."""
    call, base = bus.transport.call, bus.keys.base
    count = await _queued(bus, instance)
    first = await first_waiting(bus, instance)
    holders = cast(bytes | None, await call("HGET", f"{base}inst:{instance}", "busy"))
    holder = (holders or b"").decode().rpartition("\n")[2]
    # Without its task the mailbox is stuck, which another check of weft doctor finds.
    if not first or await call("EXISTS", bus.keys.task(holder.partition("|")[0])) == 0:
        return None
    behind = await _described(bus, holder)
    return MailboxWait(
        instance,
        count,
        f"it handles {behind}, and one message at a time. The first one is {await _described(bus, first)}",
    )


async def agent_streams(bus: EventBus) -> dict[str, str]:
    """Return the agents of runtimes in a partition, and the work stream of each."""
    streams = await announced_streams(bus, "agent")
    return {name: streams[name] for name in await announced_runtime_agents(bus) if name in streams}


async def processes_of(bus: EventBus, stream: str) -> int:
    """Return how many living processes read a work stream."""
    call, keys = bus.transport.call, bus.keys
    beat = cast(bytes | None, await call("HGET", keys.meta, "beat_at"))
    if beat is None or await bus.time_ms() - int(beat) > SILENT_MS:
        return 0
    try:
        reply = await call("XINFO", "CONSUMERS", keys.stream(stream), group_of(stream))
    except ServerError:  # no such stream, or no group: nobody has read it
        return 0
    names = {fields(each)["name"] for each in cast(list[Reply], reply)}
    return len(names & set(cast(list[bytes], await call("ZRANGE", keys.alive, 0, -1))))


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """An agent type of a runtime."""

    name: str
    processes: int
    """How many living processes run it; with several partitions, in the one with the fewest."""
    messages: int
    """Unfinished messages, with those in mailboxes."""


async def agents_of_runtimes(buses: Sequence[EventBus]) -> list[RegisteredType]:
    """Return all agent types of runtimes, by name."""
    found: dict[str, RegisteredType] = {}
    for bus in buses:
        waiting: Counter[str] = Counter()
        async for instances in mailboxes(bus):
            for instance in instances:
                waiting[instance.partition("/")[0]] += await _queued(bus, instance)
        for name, stream in (await agent_streams(bus)).items():
            processes, messages = await processes_of(bus, stream), await _length(bus, stream) + waiting[name]
            before = found.get(name, RegisteredType(name, processes, 0))
            found[name] = RegisteredType(name, min(processes, before.processes), messages + before.messages)
    return [found[name] for name in sorted(found)]


async def drop_agent(buses: Sequence[EventBus], name: str) -> int:
    """Forget an agent of a runtime that no process runs: its subscriptions and its messages, whose tasks are cancelled.

    Its states stay. Returns how many tasks were cancelled. Raises InvalidInput.
    """
    known = {agent: stream for bus in buses for agent, stream in (await agent_streams(bus)).items()}
    if name not in known:
        types = f"choose from {', '.join(known)}" if known else "no runtime has registered any"
        raise InvalidInput("agent", f"there is no agent type {name!r}: {types}")
    return sum([await _drop(bus, name, known[name]) for bus in buses])


async def _drop(bus: EventBus, name: str, stream: str) -> int:
    answer = cast(
        list[Any], await bus.call("drop_agent", name, RUNTIME_MANIFEST + name, stream, SILENT_MS)
    )  # Any: of two lengths and types
    if answer[0] == b"runs":
        raise InvalidInput(
            "agent", f"{name!r} runs in {answer[1]} process{'es' * (answer[1] > 1)}: stop it there first"
        )
    # A process may register it again from now on: its messages are newer.
    runs = {
        (task, run): each
        for (task, run), each in (await open_runs(bus)).items()
        if _agent_of(each).partition("/")[0] == name and _created_ms(each) <= int(answer[1])
    }
    for task in sorted({task for task, _ in runs}):
        await bus.cancel(task, f"the agent {name!r} was dropped", durable=False)
    for instance in {_agent_of(each) for each in runs.values()}:
        await bus.call("free_instance", instance)
    return len({task for task, _ in runs})


def _created_ms(run: dict[bytes, bytes]) -> int:
    """Return when a run was requested, in epoch milliseconds."""
    return RunHeader.of(run).created_ms


def _agent_of(run: dict[bytes, bytes]) -> str:
    """Return the instance of a run, `agent/key`."""
    header = RunHeader.of(run)
    return f"{header.agent}/{header.key}"


async def _length(bus: EventBus, stream: str) -> int:
    try:
        return cast(int, await bus.transport.call("XLEN", bus.keys.stream(stream)))
    except ServerError:  # not a stream, which weft doctor reports
        return 0


async def _described(bus: EventBus, place: str) -> str:
    """Describe the message of a run, `task|run`: its type, its sender and its task."""
    task, _, run = place.partition("|")
    key = bus.keys.task(task) if run in ("", ROOT_RUN) else f"{bus.keys.base}run:{task}/{run}"
    data = cast(bytes | None, await bus.transport.call("HGET", key, RunField.INPUT))
    try:
        message: Any = msgspec.json.decode(data or b"null")  # Any: JSON
    except msgspec.DecodeError:
        message = None
    content = message.get("content") if isinstance(message, dict) else None
    kind = str(content.get("message_type", "")).rpartition(".")[2] if isinstance(content, dict) else ""
    sender = str(message.get("sender", "")) if isinstance(message, dict) else ""
    return f"{kind or 'a message'}{f' of {sender}' if sender else ''} (task {task})"


# -- handlers that run a delivery alone ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A handler that takes no other work until a delivery of a stream has run alone: its processes died during it."""

    stream: str
    handler: str
    what: str
    """The delivery: what it runs, its task, and how often it was delivered."""
    task: str
    took_ms: float
    """How long it has run alone; before that, how long the handler has taken no new delivery."""
    runs: bool = True
    """Whether it runs; False: it is the next one to run."""
    held: int = 0
    """The deliveries that have to end before it begins."""
    first: str = ""
    """The one of them that was delivered first, and when."""
    behind: int = 0
    """Further deliveries that are to run alone, one after the other."""
    others: int = 0
    """Handlers that read the stream meanwhile."""

    def __str__(self) -> str:
        since = duration(self.took_ms)
        if self.held:
            ends = f"{self.held} other {'delivery ends' if self.held == 1 else 'deliveries end'}"
            does = (
                f"has taken no new work for {since}, until {ends} (the first: {self.first}); then it runs {self.what}"
            )
        elif not self.runs:
            does = f"is about to run {self.what}"
        else:
            does = f"has run {self.what} for {since}"
        more = f"; {self.behind} more follow" if self.behind else ""
        rest = "other handlers read on" if self.others else "it is the only handler, so all other work waits"
        return f"{self.handler} {does} alone, since processes ended during it{more}; {rest}"


async def find_quarantines(bus: EventBus) -> list[Quarantine]:
    """Return the handlers of a partition that take only one quarantined delivery at a time."""
    turns = fields(await bus.transport.call("HGETALL", bus.keys.quarantine))
    found = []
    for field, owner in sorted(turns.items()):
        if field.startswith("~") and (one := await _quarantine(bus, field[1:], owner.decode(), turns)) is not None:
            found.append(one)
    return found


async def _quarantine(bus: EventBus, stream: str, owner: str, turns: dict[str, bytes]) -> Quarantine | None:
    call, key, group = bus.transport.call, bus.keys.stream(stream), group_of(stream)
    alive = set(cast(list[bytes], await call("ZRANGE", bus.keys.alive, 0, -1)))
    if owner.encode() not in alive:
        return None  # it is dead: another one takes the turn
    held: list[tuple[str, list[Reply]]] = []
    for each in await work_streams(bus):
        if group_of(each) == group and (each == stream or await _length(bus, each)):
            reply = await call("XPENDING", bus.keys.stream(each), group, "-", "+", PENDING_MAX, owner)
            held += [(each, row) for row in cast(list[list[Reply]], reply)]
    held.sort(key=lambda row: -cast(int, row[1][2]))
    alone = [row for each, row in held if each == stream and f"{stream}|{text(row[0])}" in turns]
    consumers = cast(list[Reply], await call("XPENDING", key, group))[3] or []
    readers = cast(list[list[bytes]], consumers)
    waiting: list[list[Reply]] = []
    for name in [name for name, _ in readers if name not in alive]:
        rows = cast(list[list[Reply]], await call("XPENDING", key, group, "-", "+", PENDING_MAX, name))
        waiting += [row for row in rows if cast(int, row[3]) >= QUARANTINE_AFTER]
    if not alone and not waiting:
        return None  # its last one has ended
    next_one = (alone or waiting)[0]
    what, task = await _delivered(bus, stream, next_one)
    what += f", delivered {cast(int, next_one[3])} times,"
    idle = cast(int, (alone[0] if alone else held[-1][1] if held else next_one)[2])
    first = ""
    if held and not alone:
        oldest = held[0]
        first = f"{(await _delivered(bus, *oldest))[0]}, taken {duration(cast(int, oldest[1][2]))} ago"
    return Quarantine(
        stream, owner, what, task, idle, bool(alone), 0 if alone else len(held), first,
        len(waiting) - (0 if alone else 1), max(0, await processes_of(bus, stream) - 1),
    )  # fmt: skip


async def _delivered(bus: EventBus, stream: str, row: list[Reply]) -> tuple[str, str]:
    """Return a pending delivery in words, and its task."""
    entry = cast(bytes, row[0])
    found = pairs(await bus.transport.call("XRANGE", bus.keys.stream(stream), entry, entry))
    try:
        delivery = Delivery(bus.keys.partition, stream, entry, found[0][1] if found else [])
    except InvalidInput:
        return f"the entry {text(entry)}", ""
    what = f"a call of {delivery.name!r}" if delivery.kind == "call" else f"a turn of agent {delivery.name!r}"
    return f"{what} of task {delivery.task}", delivery.task


# -- what handlers work on ------------------------------------------------------------------------------------------

HELD_MAX = 300
"""Deliveries of each stream that are read, the oldest first."""


@dataclass(frozen=True, slots=True)
class HeldWork:
    """A turn or call that a living process works on."""

    kind: str
    """`agent`, `tool` or the engine."""
    name: str
    task: str
    path: str
    """The run, or the run and step of a call."""
    attempt: int
    handler: str
    since: int
    """When the attempt was queued, in epoch milliseconds."""


async def held_work(bus: EventBus, limit: int, tenant: str = "") -> tuple[list[HeldWork], int]:
    """Return the oldest deliveries that living processes of a partition hold, and how many they hold (of a tenant: 0).

    With `tenant`, only those of its tasks whose ids begin with its name.
    """
    call = bus.transport.call
    alive = set(cast(list[bytes], await call("ZRANGE", bus.keys.alive, 0, -1)))
    held: list[tuple[int, str, bytes, str]] = []
    for stream in await work_streams(bus):
        try:
            reply = await call("XPENDING", bus.keys.stream(stream), group_of(stream), "-", "+", HELD_MAX)
        except ServerError:  # no such stream, or no group: nobody has read it
            continue
        for entry, owner, *_ in cast(list[list[bytes]], reply):
            if owner in alive:
                held.append((int(entry.partition(b"-")[0]), stream, entry, text(owner)))
    found: list[HeldWork] = []
    for since, stream, entry, handler in sorted(held):
        if len(found) == limit:
            break
        entries = pairs(await call("XRANGE", bus.keys.stream(stream), entry, entry))
        try:
            of = Delivery(bus.keys.partition, stream, entry, entries[0][1]) if entries else None
        except InvalidInput:
            of = None
        if of is not None and of.task.startswith(f"{tenant}." if tenant else ""):
            kind = stream.partition(":")[0]
            found.append(HeldWork(kind, of.name, of.task, of.run, of.attempt, handler, since))
    return found, 0 if tenant else len(held)


# -- how much work waits, by stream --------------------------------------------------------------------------------


async def waiting_work(buses: Sequence[EventBus], *, count_mailboxes: bool = True) -> Row:
    """Return `streams` (per stream and group), `record` and totals. Ages are in milliseconds.

    `count_mailboxes` looks at every key of the broker, which takes long on a large one.
    """
    home = buses[0]
    now = await home.time_ms()
    streams = [await _stream(home, None, "tasks", ingress(home.keys.namespace), STATE_MANAGER, now)]
    for publisher in await Publishers(home).all():
        stream = ingress(home.keys.namespace, publisher.name)
        streams.append(await _stream(home, None, f"tasks:{publisher.name}", stream, "", now))
    totals: Counter[str] = Counter(
        dict.fromkeys(("mailboxes", "mailbox_events", "timers", "timers_due", "dead_letters", "replies", "asks"), 0)
    )
    waiting: Counter[str] = Counter()
    limited: dict[str, Counter[str]] = {"slots": Counter(), "waits": Counter()}
    record: list[Row] = []
    for bus in buses:
        keys, call = bus.keys, bus.transport.call
        for name in await work_streams(bus):
            row = await _stream(bus, keys.partition, name, keys.stream(name), group_of(name), now)
            # Every namespace has agents and tools; an unused engine has no stream.
            if row["backlog"] or row["consumers"] or name in ("agent", "tool"):
                streams.append(row)
        for counts in (await waiting_tasks(bus)).values():
            waiting += counts
        for what, counts in (await limited_work(bus)).items():
            limited[what] += counts
        record += await _record(bus, now)
        if count_mailboxes:
            await _count_mailboxes(bus, totals)
        timers = await lag_of_timers(bus, now)
        totals["timers"] += timers.waiting
        totals["timers_due"] += timers.due
        for total, command in (
            ("dead_letters", ("XLEN", keys.dead)),
            ("replies", ("XLEN", keys.replies)),
            ("asks", ("XLEN", keys.asks)),
        ):
            totals[total] += cast(int, await call(*command))
    return {
        "namespace": home.keys.namespace,
        "streams": streams,
        "record": record,
        "waiting": dict(waiting),
        **_of_limits(limited),
        **totals,
    }


async def _count_mailboxes(bus: EventBus, totals: Counter[str]) -> None:
    async for instances in mailboxes(bus):
        lengths = [bus.transport.call("LLEN", f"{bus.keys.base}mail:{instance}") for instance in instances]
        totals["mailboxes"] += len(instances)
        totals["mailbox_events"] += sum([cast(int, await length) for length in lengths])


def _of_limits(limited: dict[str, Counter[str]]) -> Row:
    names = sorted(limited["slots"] | limited["waits"])
    return {"limits": {name: {"held": limited["slots"][name], "waiting": limited["waits"][name]} for name in names}}


async def _stream(bus: EventBus, partition: int | None, name: str, key: str, group: str, now: int) -> Row:
    """Measure one stream as the metrics do; without a group, all of its entries wait."""
    try:
        found = await lag_of_work(bus.transport.call, key, group, now) or Lag(0)
    except ServerError:  # not a stream, which weft doctor reports
        found = Lag(0)
    return {
        "stream": name,
        "partition": partition,
        "group": (None if found.consumers is None else group) if group else STATE_MANAGER,
        "backlog": found.waiting,
        "pending": found.pending,
        "oldest_pending_ms": round(found.oldest_pending * 1000) if found.pending else None,
        "consumers": found.consumers or 0,
    }


async def _record(bus: EventBus, now: int) -> list[Row]:
    """Return how far each group has read the record, and the age of its first unread entry."""
    key = bus.keys.record
    length = cast(int, await bus.transport.call("XLEN", key))
    rows = []
    for name, group in (await groups_of(bus.transport.call, key) or {}).items():
        ahead = pairs(await bus.transport.call("XRANGE", key, f"({group.read}", "+", "COUNT", 1))
        rows.append(
            {
                "partition": bus.keys.partition,
                "group": name,
                "position": group.read,
                "behind_ms": _age(ahead[0][0].decode(), now) if ahead else 0,
                "length": length,
            }
        )
    return rows


def _age(entry: str, now: int) -> int:
    return max(0, now - int(entry.partition("-")[0]))
