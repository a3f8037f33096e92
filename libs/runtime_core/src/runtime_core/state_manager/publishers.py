"""Publishers with their own ingress streams, and tenants.

Publishers: the scope of their commands. Tenants: their settings, and how much open and waiting work each has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
from msgspec.structs import replace

from runtime_core.bus.event_bus import EventBus
from runtime_core.engines.results import referenced_urls
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.state_manager.schedules import checked_id
from runtime_core.wire.blobs import path_below
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import Cancellation, Publication, Signal, Submission, checked_text
from runtime_core.wire.envelope import ANONYMOUS, Envelope
from runtime_core.wire.ids import MAX_NAME_CHARACTERS, TASK_ID_RULE, is_task_id, scoped_name

NAME_RULE = "1 to 63 of a-z 0-9 and -, beginning with a letter or digit"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
RESERVED = ("anonymous", "client", "schedule", "weft")
"""Prefixes of the runtime's own sources: a publisher with such a name could take their event ids."""
BUILT_IN = "weft."
"""Prefix of the runtime's own agents: runners, sessions, task-end hooks."""
Named = TypeVar("Named", Submission, Cancellation, Signal, Publication)
ANSWERS = ":answers"
"""Every `replyto` of a publisher begins with its name and this."""
REGISTRY_SECONDS = 1.0
"""The time between two reads of the registered publishers."""


class Publisher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A publisher as the broker stores it.

    A publisher may write only to `<namespace>:tasks:<publisher>`, so the stream says who sent a command. Every name in
    such a command is bound to the publisher's tenant: ids get the tenant's prefix, and an id that already has it stays
    as it is.
    """

    name: str
    tenant: str
    agents: tuple[str, ...] | None = None
    """Agents that it may submit to; None: all but internal agents and the runtime's own."""
    topics: tuple[str, ...] = ()
    """Topics that it may publish on; a trailing `*` matches a prefix."""

    @property
    def answers(self) -> str:
        """The prefix of every `replyto` of this publisher."""
        return self.name + ANSWERS

    # -- commands ----------------------------------------------------------------------------------------------

    def bind(self, envelope: Envelope) -> Envelope:
        """Set the publisher's tenant and source. Raises InvalidInput for a foreign tenant or `replyto`."""
        if envelope.tenant not in ("", self.tenant):
            raise InvalidInput(
                "tenant",
                f"{quoted(envelope.tenant)} is not {self.tenant!r}, the tenant of this publisher; leave it out",
            )
        if envelope.replyto and not self.owns(envelope.replyto):
            raise InvalidInput(
                "replyto",
                f"{quoted(envelope.replyto)} does not begin with {self.answers!r}, as publisher {self.name!r} must",
            )
        return replace(envelope, tenant=self.tenant, source=self._source(envelope.source))

    def owns(self, reply_to: str) -> bool:
        """Return whether an answer may go to this stream."""
        return reply_to.startswith(self.answers)

    def scope(self, command: Named, blobs: str = "") -> Named:
        """Prefix every name in a command with the tenant. `blobs` is the URL of the namespace's blobs, if it has any.

        Raises InvalidInput for a name that becomes too long, and for a reference to another tenant's blob.
        """
        match command:
            case Submission():
                self.check_references("data.input", command.input_json, blobs)
                if command.metadata:
                    self.check_references("data.metadata", command.metadata, blobs)
                task = self.task(command.task_id)
                key = command.partition_key
                return replace(
                    command,
                    task_id=task,
                    key=self._name("data.key", command.key),
                    session_id=self._name("data.session_id", command.session_id),
                    partition_key="" if key in ("", command.task_id) else scoped_name(self.tenant, key),
                )
            case Publication():
                self.check_references("data.data", command.data_json, blobs)
                return replace(command, topic_source=self._name("data.source", command.topic_source))
            case _:
                if isinstance(command, Signal):
                    self.check_references("data.value", command.value_json, blobs)
                return replace(command, task_id=self.task(command.task_id))

    def task(self, task_id: str) -> str:
        """Return a task id with the tenant's prefix. Raises InvalidInput if it becomes too long."""
        scoped = self._id(task_id)
        if not is_task_id(scoped):
            raise InvalidInput(
                "data.task_id", f"{quoted(scoped)}, with the tenant's prefix, is not a task id: {TASK_ID_RULE}"
            )
        return scoped

    def schedule_id(self, schedule_id: str) -> str:
        """Return a schedule id with the tenant's prefix. Raises InvalidInput if it becomes too long."""
        return checked_id(self._id(schedule_id))

    def schedule(self, data: dict[str, object], blobs: str = "") -> dict[str, object]:
        """Prefix every name in the data of a valid `weft.schedule.set`. Raises as `scope` does."""
        for field in ("input", "metadata"):
            self.check_references(f"data.{field}", msgspec.json.encode(data.get(field)), blobs)
        scoped = dict(data)
        scoped["schedule_id"] = self.schedule_id(cast(str, data["schedule_id"]))
        for field in ("key", "session_id"):
            if data.get(field) is not None:
                scoped[field] = self._name(f"data.{field}", cast(str, data[field]))
        return scoped

    # -- permissions ------------------------------------------------------------------------------------------

    def check_agent(self, agent: str) -> None:
        """Raise Rejected for an agent that this publisher may not submit to."""
        # The runtime's own agents can call any agent and tool, internal ones too.
        allowed = not agent.startswith(BUILT_IN) if self.agents is None else agent in self.agents
        if not allowed:
            raise self.unknown_agent(agent)

    def unknown_agent(self, agent: str) -> Rejected:
        """Return one error for unknown, internal and forbidden agents, without names of other tenants' agents."""
        if self.agents is None:
            return Rejected("data.agent", f"no agent is named {agent}")
        listed = ", ".join(self.agents)
        return Rejected("data.agent", f"publisher {self.name!r} may not submit to {agent}; it may submit to {listed}")

    def check_topic(self, topic: str) -> None:
        """Raise Rejected for a topic that this publisher may not publish on."""
        for allowed in self.topics:
            if topic == allowed or (allowed.endswith("*") and topic.startswith(allowed[:-1])):
                return
        listed = f"it may publish on {', '.join(self.topics)}" if self.topics else "it may publish on none"
        raise Rejected("data.topic", f"publisher {self.name!r} may not publish on {topic}; {listed}")

    def check_references(self, field: str, data: bytes, blobs: str) -> None:
        """Raise InvalidInput for a reference to anything but a result of this tenant's tasks."""
        for url in referenced_urls(data):
            if not (isinstance(url, str) and self._owns_blob(url, blobs)):
                raise InvalidInput(
                    field,
                    f"refers to {quoted(url)}, which is not a result of a task of tenant {self.tenant!r}; "
                    "send the value itself, or a reference from an answer to this tenant",
                )

    def _owns_blob(self, url: str, blobs: str) -> bool:
        try:
            # The folder of a task's blobs is the task's id, which begins with its tenant.
            return path_below(blobs, url).startswith(f"{self.tenant}.")
        except InvalidInput:
            return False

    # -- names -------------------------------------------------------------------------------------------------

    def _source(self, source: str) -> str:
        if source == ANONYMOUS:
            return self.name
        return source if source == self.name else scoped_name(self.name, source)

    def _id(self, name: str) -> str:
        # A tenant's name has no dot, so the first dot ends the prefix.
        prefix = f"{self.tenant}."
        return name if name.startswith(prefix) else prefix + name

    def _name(self, field: str, name: str) -> str:
        if not name:
            return ""
        scoped = scoped_name(self.tenant, name)
        if len(scoped) > MAX_NAME_CHARACTERS:
            raise InvalidInput(
                field, f"{quoted(scoped)} has, with the tenant's prefix, over {MAX_NAME_CHARACTERS} characters"
            )
        return scoped


def checked_name(field: str, name: str) -> str:
    """Return a valid name of a publisher or tenant. Raises InvalidInput (`field`)."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(field, f"{quoted(name)} is not a valid name: use {NAME_RULE}")
    return name


class Publishers:
    """The publishers of a namespace; `bus` is its first partition."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def set(self, publisher: Publisher) -> None:
        """Register a publisher, replacing one with the same name. Raises InvalidInput for invalid names."""
        checked_name("publisher", publisher.name)
        checked_name("tenant", publisher.tenant)
        if publisher.name in (*RESERVED, self._bus.keys.namespace):
            raise InvalidInput("publisher", f"{publisher.name!r} is reserved for the runtime; choose another name")
        await self._bus.transport.call(
            "HSET", self._bus.keys.publishers, publisher.name, msgspec.json.encode(publisher)
        )

    async def delete(self, name: str) -> bool:
        """Unregister a publisher: its stream is not read any more. Return False if it does not exist."""
        return await self._bus.transport.call("HDEL", self._bus.keys.publishers, name) == 1

    async def get(self, name: str) -> Publisher | None:
        stored = await self._bus.transport.call("HGET", self._bus.keys.publishers, name)
        return None if stored is None else _read(cast(bytes, stored))

    async def all(self) -> list[Publisher]:
        """Return all publishers, sorted by name, without those that a newer release wrote in a different format."""
        stored = cast(list[bytes], await self._bus.transport.call("HVALS", self._bus.keys.publishers))
        return sorted(filter(None, map(_read, stored)), key=lambda publisher: publisher.name)


def _read(data: bytes) -> Publisher | None:
    try:
        found = msgspec.json.decode(data, type=Publisher)
        checked_name("publisher", found.name)
        checked_name("tenant", found.tenant)
    except (msgspec.MsgspecError, InvalidInput):
        return None
    return found


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


RUNNING = "\n"
"""In the queues, a tenant's name after this stands for the calls and runs of its running tasks."""
ALL_OTHERS = "*"
"""Settings under this name apply to each named tenant that has no settings."""
MAX_WEIGHT = 1000
MAX_OPEN = 1_000_000_000
MAX_RATE = 1_000_000.0
MIN_RATE = 0.001


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's settings."""

    name: str
    """Empty: the tenant of tasks without one."""
    weight: int = 1
    """Tasks that it may start per turn, relative to other tenants."""
    max_open: int = 0
    """Open tasks that it may have in the namespace; 0: no limit."""
    rate: float = 0.0
    """Tasks per second that it may start in the namespace; 0: no limit."""

    def check(self) -> None:
        """Raise InvalidInput for settings that cannot be stored."""
        if self.name:
            checked_text("tenant", self.name)
        elif self.max_open or self.rate:
            raise InvalidInput("tenant", "the unnamed tenant cannot have limits, only a weight")
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise InvalidInput("weight", f"{self.weight} is not a whole number from 1 to {MAX_WEIGHT}")
        if not 0 <= self.max_open <= MAX_OPEN:
            raise InvalidInput("max_open", f"{self.max_open} is not a whole number from 0 to {MAX_OPEN}")
        if self.rate and not MIN_RATE <= self.rate <= MAX_RATE:
            raise InvalidInput("rate", f"{self.rate:g} is not 0 or a number from {MIN_RATE:g} to {MAX_RATE:g}")

    def stored(self, partitions: int) -> str:
        """Return what each partition stores: its share of the limits, then the limits."""
        share = -(-self.max_open // partitions)
        rate = max(self.rate / partitions, 0.000001) if self.rate else 0.0
        return f"{self.weight} {share} {rate:.6f} {self.max_open} {self.rate:.6f}"


async def set_tenant(buses: Sequence[EventBus], tenant: Tenant) -> None:
    """Store a tenant's settings in every partition. Raises InvalidInput."""
    tenant.check()
    for bus in buses:
        await bus.transport.call("HSET", bus.keys.tenants, tenant.name, tenant.stored(len(buses)))


async def remove_tenant(buses: Sequence[EventBus], name: str) -> bool:
    """Remove a tenant's settings. Return False if it has none. Its tasks stay."""
    return any([bool(await bus.transport.call("HDEL", bus.keys.tenants, name)) for bus in buses])


async def tenants(bus: EventBus) -> list[Tenant]:
    """Return all tenants with settings, sorted by name. Every partition stores the same ones."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.tenants))
    found = [_tenant(flat[at].decode(), flat[at + 1].decode()) for at in range(0, len(flat), 2)]
    return sorted(found, key=lambda tenant: tenant.name)


async def open_tasks(buses: Sequence[EventBus], name: str) -> int:
    """Return how many tasks a named tenant has open."""
    asked = [bus.transport.call("ZCARD", bus.keys.open_tasks_of(name)) for bus in buses]
    return sum([cast(int, await one) for one in asked])


async def waiting_tasks(bus: EventBus, most: int = 1000) -> dict[str, Counter[str]]:
    """Return how many new tasks, and calls and runs of running ones, wait by work stream and tenant.

    Counts the next `most` tenants of each stream separately, and all others together under `*`.
    """
    call, keys = bus.transport.call, bus.keys
    flat = cast(list[bytes], await call("HGETALL", keys.queues))
    totals = {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2) if _is_stream(flat[at])}
    found: dict[str, Counter[str]] = {}
    for stream, total in totals.items():
        names = [name.decode() for name in cast(list[bytes], await call("ZRANGE", keys.turns(stream), 0, most - 1))]
        asked = [call("ZCARD", keys.queue(stream, name)) for name in names]
        counts = Counter[str]()
        for name, one in zip(names, asked, strict=True):
            counts[name.removeprefix(RUNNING)] += cast(int, await one)
        counts[ALL_OTHERS] += max(0, total - counts.total())
        found[stream] = +counts
    return found


def _is_stream(field: bytes) -> bool:
    return field != b"seq" and b"|" not in field


def _tenant(name: str, stored: str) -> Tenant:
    parts = stored.split(" ")
    return Tenant(name, int(parts[0]), int(parts[-2]), float(parts[-1]))
