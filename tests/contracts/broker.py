"""A broker for contract tests: fresh keys, owners that live and die on demand, and access to all stored data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.deliveries import Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.tasks import Submitted
from runtime_core.consumer.heartbeat import Owner
from runtime_core.wire.commands import Submission

LEASE_MS = 60_000
"""Long, so that a machine that is busy declares nobody dead: the tests move the beat clock themselves."""
AGENTS = ("writer", "editor", "desk")
TOOLS = ("search", "rank")
DIGEST = "d1a2b3c4"
"""Of a step's arguments: eight characters, whatever they are."""

Snapshot = dict[str, object]
"""Every key of the namespace with its type, value and, for a stream, its groups and pending entries."""


class Connect(Protocol):
    """Gives one more client of the same server."""

    async def __call__(self) -> Transport: ...


class PassingTransport:
    """A connection that passes everything on, for subclasses that change one thing. Closing it does nothing."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def call(self, *args: Argument) -> Reply:
        return await self._transport.call(*args)

    async def blocking(self, *args: Argument) -> Reply:
        return await self._transport.blocking(*args)

    @property
    def reconnects(self) -> int:
        return self._transport.reconnects

    async def close(self) -> None:
        """The broker fixture closes the transport."""


@dataclass(slots=True)
class Broker:
    """One partition of a namespace that no other test uses.

    `kind` is the server's name in the matrix. `admin` is a client for looking at keys and for damaging them.
    """

    kind: str
    keys: Keys
    connect: Connect
    admin: Transport
    port: int = 0
    """Of the server, for those that watch it."""
    buses: list[EventBus] = field(default_factory=list)
    transports: list[Transport] = field(default_factory=list)

    async def prepare(self) -> None:
        """Make the groups and make the agents and tools known."""
        await EventBus(self.admin, self.keys).make_groups(["agent", "tool"])
        for key, stream, names in ((self.keys.agents, "agent", AGENTS), (self.keys.tools, "tool", TOOLS)):
            for name in names:
                await self.call("HSET", key, name, stream)

    def elsewhere(self, namespace: str) -> Broker:
        """The same server in another namespace, over the same connection."""

        async def connect() -> Transport:
            return self.admin

        return Broker(self.kind, Keys(namespace, 0), connect, self.admin, self.port)

    # -- owners ------------------------------------------------------------------------------------------------

    async def owner(self, service: str = "handler") -> EventBus:
        """Return another owner that is alive on the broker, with its own connection."""
        transport = await self.connect()
        self.transports.append(transport)
        bus = EventBus(transport, self.keys)
        await Owner(bus, service, LEASE_MS / 1000).enter()
        self.buses.append(bus)
        return bus

    async def silence(self, *victims: EventBus) -> None:
        """Let a lease pass in which these owners are silent and all others beat: they are declared dead."""
        others = [bus for bus in self.buses if bus not in victims and await self.alive(bus)]
        assert others, "somebody must be left to count the silence"
        for _ in range(40):
            if not any([await self.alive(victim) for victim in victims]):
                return
            for bus in others:
                # The clock moves by what the broker takes for the time since the last beat.
                await self.call("HSET", self.keys.meta, "beat_at", int(time.time() * 1000) - LEASE_MS // 10)
                await bus.beat(LEASE_MS, False, "")
        raise AssertionError("the silent owner was not declared dead after many leases")

    async def alive(self, bus: EventBus) -> bool:
        return await self.call("ZSCORE", self.keys.alive, bus.owner) is not None

    # -- keys --------------------------------------------------------------------------------------------------

    async def call(self, *args: Argument) -> Reply:
        """Send one raw command, past the bus."""
        return await self.admin.call(*args)

    async def hash(self, key: str) -> dict[str, str]:
        """Return a hash of the partition, by its name without the base."""
        flat = cast(list[bytes], await self.call("HGETALL", self.keys.base + key))
        return {flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)}

    async def hash_fields(self, key: str) -> list[bytes]:
        return cast(list[bytes], await self.call("HKEYS", self.keys.base + key))

    async def task(self, task: str) -> dict[str, str]:
        return await self.hash(f"task:{task}")

    async def status(self, task: str) -> str:
        return (await self.task(task)).get("status", "")

    async def entries(self, stream: str) -> list[dict[str, str]]:
        """Return the entries of a stream of the partition: their fields, with the entry's id under `id`."""
        found = []
        for entry, fields in pairs(await self.call("XRANGE", self.keys.base + stream, "-", "+")):
            named = {fields[at].decode(): fields[at + 1].decode() for at in range(0, len(fields), 2)}
            found.append({"id": entry.decode(), **named})
        return found

    async def mailbox(self, instance: str) -> list[str]:
        found = cast(list[bytes], await self.call("LRANGE", f"{self.keys.base}mail:{instance}", 0, -1))
        return [item.decode() for item in found]

    async def final(self, task: str) -> dict[str, object]:
        """Return the final event's data. Fails if the task has not ended."""
        fields = await self.task(task)
        assert "out" in fields, f"the task {task} has not ended: {fields}"
        return cast(dict[str, object], json.loads(fields["out"]))

    async def snapshot(self) -> Snapshot:
        """Return everything that the partition holds."""
        found = cast(list[bytes], await self.call("KEYS", self.keys.namespace + ":*"))
        values = await asyncio.gather(*map(self._value, found))
        return {key.decode(): value for key, value in sorted(zip(found, values, strict=True))}

    async def _value(self, key: bytes) -> object:
        kind = cast(bytes, await self.call("TYPE", key)).decode()
        match kind:
            case "hash":
                flat = cast(list[bytes], await self.call("HGETALL", key))
                return kind, dict(zip(flat[::2], flat[1::2], strict=True))
            case "list":
                return kind, await self.call("LRANGE", key, 0, -1)
            case "zset":
                return kind, await self.call("ZRANGE", key, 0, -1, "WITHSCORES")
            case "string":
                return kind, await self.call("GET", key)
            case "stream":
                groups = cast(list[list[Reply]], await self.call("XINFO", "GROUPS", key))
                pending = []
                for group in groups:
                    name = cast(bytes, group[1])
                    listed = cast(list[list[Reply]], await self.call("XPENDING", key, name, "-", "+", 1000))
                    # Without the idle time, which passes by itself.
                    pending.append((name, [(item[0], item[1], item[3]) for item in listed]))
                return kind, await self.call("XRANGE", key, "-", "+"), pending
        return kind

    async def idle(self) -> None:
        """Assert that nothing is left to do: no work, nothing pending, no timer, mailbox or busy instance."""
        for stream in ("agent", "tool"):
            assert await self.entries(stream) == [], f"{stream} still holds work"
            pending = cast(list[Reply], await self.call("XPENDING", self.keys.stream(stream), group(stream)))
            assert pending[0] == 0, f"{stream} still has pending entries"
        assert await self.call("ZCARD", self.keys.timers) == 0
        assert await self.hash("delayed") == {}
        for pattern in ("mail:*", "nest:*", "run:*", "line:*"):
            assert await self.call("KEYS", self.keys.base + pattern) == [], f"{pattern} is left"
        for key in cast(list[bytes], await self.call("KEYS", self.keys.base + "inst:*")):
            assert await self.call("HGET", key, "busy") is None, f"{key.decode()} is still busy"

    # -- time --------------------------------------------------------------------------------------------------

    async def pass_time(self, ms: int) -> None:
        """Move the partition's clock, which timers follow; nothing sleeps."""
        await self.call("HINCRBY", self.keys.meta, "offset", ms)

    # -- work --------------------------------------------------------------------------------------------------

    async def submit(self, bus: EventBus, task: str, agent: str = "writer", key: str = "", **more: object) -> Submitted:
        """Start a task under an event id of its own; `more` are fields of `Submission`."""
        new = Submission(
            task_id=task,
            source="test",
            event_id=f"event-{task}",
            digest=f"digest-{task}",
            agent=agent,
            input_json=b'"hi"',
        )
        new.key = key
        for name, value in more.items():
            setattr(new, name, value)
        return await bus.submit(new)

    async def take(self, bus: EventBus, stream: str = "agent") -> Delivery:
        """Return the next delivery of a work stream. Fails if there is none."""
        taken, malformed = await bus.read([stream], 1, 5)
        assert not malformed, malformed
        assert taken, f"{stream} has nothing to deliver"
        return taken[0]

    async def nothing(self, bus: EventBus, stream: str = "agent") -> None:
        """Assert that a work stream has nothing to deliver."""
        taken, malformed = await bus.read([stream], 1, 5)
        assert not taken, f"{stream} delivered {taken}"
        assert not malformed, malformed

    async def lose_group(self, stream: str = "agent") -> None:
        """Destroy the group and create it again from 0, as after a failover that lost it."""
        await self.call("XGROUP", "DESTROY", self.keys.stream(stream), group(stream))
        await self.call("XGROUP", "CREATE", self.keys.stream(stream), group(stream), "0")


def group(stream: str) -> str:
    return {"agent": "agent-handler", "tool": "tool-handler"}[stream]


# -- what a turn asks for ------------------------------------------------------------------------------------------


def ask(
    step: str,
    name: str = "search",
    *,
    stream: str = "tool",
    key: str = "",
    wait: str = "!",
    data: bytes = b"{}",
    digest: str = DIGEST,
    context: bytes = b"",
) -> list[Argument]:
    """Call a tool (or with `stream="agent"` an agent) and wait: `!` any of these, `0` not yet, else a group's name."""
    return ["c", stream, step, name, key, digest, wait, data, context]


def nap(step: str, after_ms: int, *, wait: str = "!") -> list[Argument]:
    """A timer that answers the step."""
    return ["t", step, DIGEST, wait, after_ms]


def question(
    step: str,
    *,
    wait: str = "!",
    timeout_ms: int | str = "",
    default: bytes = b"",
    shown: bytes = b'{"prompt":"well?"}',
) -> list[Argument]:
    return ["q", step, DIGEST, wait, shown, timeout_ms, default]


def receive(
    step: str, name: str = "news", *, wait: str = "!", timeout_ms: int | str = "", default: bytes = b""
) -> list[Argument]:
    """Wait for a message to the task."""
    return ["m", step, DIGEST, wait, name, timeout_ms, default]


def release(step: str, state: bytes = b"") -> list[Argument]:
    """Give up the run's key, and leave this state."""
    return ["r", step, DIGEST, state]


def acquire(step: str, *, wait: str = "!") -> list[Argument]:
    """Wait for the run's key."""
    return ["k", step, DIGEST, wait]


def send(
    task: str, agent: str = "editor", key: str = "", *, step: str = "0", data: bytes = b'"note"', context: bytes = b""
) -> list[Argument]:
    """A message that nobody waits for: it starts the task `task`."""
    return ["s", task, agent, key, data, context, step, DIGEST]


def again(step: str, *, wait: str = "!") -> list[Argument]:
    """Wait again for a step of an earlier turn."""
    return ["a", step, wait]


def withdraw(step: str) -> list[Argument]:
    """No longer want the result of a step of an earlier turn."""
    return ["w", step]


async def suspend(
    bus: EventBus, turn: Delivery, *parts: Sequence[Argument], state: bytes = b"", record: bytes = b"", steps: int = 0
) -> bool:
    """Commit a turn that waits. `state` is the state in the middle of the run."""
    flat = [item for part in parts for item in part]
    return await bus.commit_turn(turn, "w", now(), record, steps, state, b"", flat, len(parts))


async def complete(
    bus: EventBus, turn: Delivery, *parts: Sequence[Argument], output: bytes = b'"done"', state: bytes = b"",
    record: bytes = b"[]", steps: int = 1,
) -> bool:  # fmt: skip
    """Commit a turn that ends its run. `state` is the instance's new state."""
    flat = [item for part in parts for item in part]
    return await bus.commit_turn(turn, "c", now(), record, steps, output, state, flat, len(parts))


async def emit_pieces(
    bus: EventBus, turn: Delivery, *values: bytes, first: int = 1, attempt: int = 1, branch: str = "", step: str = ""
) -> bool:
    """Emit these values (JSON) of a branch, numbered from `first`. The first one is also the number of their step."""
    pieces = [word for value in values for word in (b"", value)]
    return await bus.emit(turn, branch, attempt, first, 0, step or f"{branch}{first}", pieces)


async def fail(bus: EventBus, turn: Delivery, message: str = "broken", *, mode: str = "f") -> bool:
    error = json.dumps({"type": "Broken", "message": message}).encode()
    return await bus.commit_turn(turn, mode, now(), b"[]", 1, error, b"", [], 0)


async def answer(bus: EventBus, call: Delivery, result: bytes = b'"found"', *, status: bytes = b"K") -> bool:
    """Commit the result of a call."""
    return await bus.commit_call(call, status, now(), result, b"[]", 1)


async def bury(bus: EventBus, delivery: Delivery, reason: str = "attempts", message: str = "broken") -> bool:
    """Dead-letter a delivery, as a consumer does that may never have run its handler."""
    error = json.dumps({"type": "Broken", "message": message}).encode()
    return await bus.dead_letter(delivery.stream, delivery.entry, reason, b"[" + error + b"]", now(), error)


def now() -> int:
    return time.time_ns() // 1_000_000
