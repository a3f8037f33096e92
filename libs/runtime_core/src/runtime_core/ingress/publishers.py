"""Publishers with an ingress stream of their own, and what their commands are bound to.

A publisher may write only `<namespace>:tasks:<publisher>`, so the stream says who sent a command. Everything that such
a command names lies inside its tenant: ids get the tenant's prefix, and an id that has it already stays as it is.
"""

from __future__ import annotations

import re
from typing import TypeVar, cast

import msgspec
from msgspec.structs import replace

from runtime_core.blobs.urls import path_below
from runtime_core.bus.event_bus import EventBus
from runtime_core.codec import quoted
from runtime_core.engines.reference import referenced_urls
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import MAX_NAME_CHARACTERS, TASK_ID_RULE, is_task_id, scoped_name
from runtime_core.ingress.schedules import checked_id
from runtime_core.wire.commands import Cancellation, Publication, Signal, Submission
from runtime_core.wire.envelope import ANONYMOUS, Envelope

NAME_RULE = "1 to 63 of a-z 0-9 and -, beginning with a letter or digit"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
RESERVED = ("anonymous", "client", "schedule", "weft")
"""The runtime's own sources begin with these names: a publisher that had one could use up their ids."""

BUILT_IN = "weft."
"""How the names of the runtime's own agents begin: runners, sessions, hooks of ends."""

Named = TypeVar("Named", Submission, Cancellation, Signal, Publication)


class Publisher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One publisher, as the broker keeps it."""

    name: str
    tenant: str
    agents: tuple[str, ...] | None = None
    """The agents that it may submit to; None: all that are neither internal nor the runtime's own."""
    topics: tuple[str, ...] = ()
    """The topics that it may publish on; `…*` is a prefix."""

    @property
    def answers(self) -> str:
        """How every `replyto` of this publisher begins."""
        return f"{self.name}:answers"

    # -- commands ----------------------------------------------------------------------------------------------

    def bind(self, envelope: Envelope) -> Envelope:
        """The event with the publisher's tenant and source. Raises InvalidInput for another's tenant or `replyto`."""
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
        """Whether an answer may go to this stream."""
        return reply_to.startswith(self.answers)

    def scope(self, command: Named, blobs: str = "") -> Named:
        """The command with every name inside the tenant. `blobs` is the URL of the namespace's blobs, if it has any.

        Raises InvalidInput for a name that gets too long, and for a reference to another tenant's blob.
        """
        match command:
            case Submission():
                self._check_references("data.input", command.input_json, blobs)
                if command.metadata:
                    self._check_references("data.metadata", command.metadata, blobs)
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
                self._check_references("data.data", command.data_json, blobs)
                return replace(command, topic_source=self._name("data.source", command.topic_source))
            case _:
                if isinstance(command, Signal):
                    self._check_references("data.value", command.value_json, blobs)
                return replace(command, task_id=self.task(command.task_id))

    def task(self, task_id: str) -> str:
        """The id of a task of this tenant. Raises InvalidInput where it gets too long."""
        scoped = self._id(task_id)
        if not is_task_id(scoped):
            raise InvalidInput(
                "data.task_id", f"{quoted(scoped)}, with the tenant's prefix, is no task id: {TASK_ID_RULE}"
            )
        return scoped

    def schedule_id(self, schedule_id: str) -> str:
        """The id of a schedule of this tenant. Raises InvalidInput where it gets too long."""
        return checked_id(self._id(schedule_id))

    def schedule(self, data: dict[str, object], blobs: str = "") -> dict[str, object]:
        """The data of a valid `weft.schedule.set`, with every name inside the tenant. Raises as `scope` does."""
        for field in ("input", "metadata"):
            self._check_references(f"data.{field}", msgspec.json.encode(data.get(field)), blobs)
        scoped = dict(data)
        scoped["schedule_id"] = self.schedule_id(cast(str, data["schedule_id"]))
        for field in ("key", "session_id"):
            if data.get(field) is not None:
                scoped[field] = self._name(f"data.{field}", cast(str, data[field]))
        return scoped

    # -- what it may reach -------------------------------------------------------------------------------------

    def check_agent(self, agent: str) -> None:
        """Raises Rejected for an agent that this publisher may not submit to."""
        # The runtime's own agents run tasks that name any agent and any tool, internal ones too.
        allowed = not agent.startswith(BUILT_IN) if self.agents is None else agent in self.agents
        if not allowed:
            raise self.unknown_agent(agent)

    def unknown_agent(self, agent: str) -> Rejected:
        """The refusal of an agent that is unknown, internal or not allowed: it names no other tenant's agents."""
        if self.agents is None:
            return Rejected("data.agent", f"no agent is named {agent}")
        listed = ", ".join(self.agents)
        return Rejected("data.agent", f"publisher {self.name!r} may not submit to {agent}; it may submit to {listed}")

    def check_topic(self, topic: str) -> None:
        """Raises Rejected for a topic that this publisher may not publish on."""
        for allowed in self.topics:
            if topic == allowed or (allowed.endswith("*") and topic.startswith(allowed[:-1])):
                return
        listed = f"it may publish on {', '.join(self.topics)}" if self.topics else "it may publish on none"
        raise Rejected("data.topic", f"publisher {self.name!r} may not publish on {topic}; {listed}")

    def _check_references(self, field: str, data: bytes, blobs: str) -> None:
        """Raises InvalidInput for a reference to anything but a result of one of the tenant's own tasks."""
        for url in referenced_urls(data):
            if not (isinstance(url, str) and self._owns_blob(url, blobs)):
                raise InvalidInput(
                    field,
                    f"refers to {quoted(url)}, which is no result of a task of tenant {self.tenant!r}; "
                    "send the value itself, or a reference from an answer to this tenant",
                )

    def _owns_blob(self, url: str, blobs: str) -> bool:
        try:
            # The folder of a task's blobs is named by the task's id, which begins with its tenant.
            return path_below(blobs, url).startswith(f"{self.tenant}.")
        except InvalidInput:
            return False

    # -- names -------------------------------------------------------------------------------------------------

    def _source(self, source: str) -> str:
        if source == ANONYMOUS:
            return self.name
        return source if source == self.name else scoped_name(self.name, source)

    def _id(self, name: str) -> str:
        # No tenant's name holds a dot, so the first one ends the prefix.
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
    """The name of a publisher or tenant. Raises InvalidInput for what is none."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(field, f"{quoted(name)} is not a name: give {NAME_RULE}")
    return name


class Publishers:
    """The publishers of a namespace; `bus` is its first partition."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def set(self, publisher: Publisher) -> None:
        """Register a publisher, in the place of one with the same name. Raises InvalidInput for names that are none."""
        checked_name("publisher", publisher.name)
        checked_name("tenant", publisher.tenant)
        if publisher.name in (*RESERVED, self._bus.keys.namespace):
            raise InvalidInput("publisher", f"{publisher.name!r} is reserved for the runtime; choose another name")
        await self._bus.transport.call(
            "HSET", self._bus.keys.publishers, publisher.name, msgspec.json.encode(publisher)
        )

    async def delete(self, name: str) -> bool:
        """Stop reading a publisher's stream; False where there is no such publisher."""
        return await self._bus.transport.call("HDEL", self._bus.keys.publishers, name) == 1

    async def get(self, name: str) -> Publisher | None:
        stored = await self._bus.transport.call("HGET", self._bus.keys.publishers, name)
        return None if stored is None else _read(cast(bytes, stored))

    async def all(self) -> list[Publisher]:
        """All publishers by name; one that a newer release has written in another form is left out."""
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


def names_of(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
