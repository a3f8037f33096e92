"""Publishers with their own ingress streams: what their commands are bound to, and a fair reader of all streams."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from runtime_core.blobs.urls import path_below
from runtime_core.bus.admin import AHEAD_MS, MAX_ENTRY_BYTES, IngressEntry, IngressStream
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.codec import quoted
from runtime_core.engines.results import referenced_urls
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, Rejected, ServerError
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
    """One publisher, as the broker keeps it.

    A publisher may write only to `<namespace>:tasks:<publisher>`, so the stream says who sent a command. Every name in
    such a command is bound to the publisher's tenant: ids get the tenant's prefix, and an id that already has it stays
    as it is.
    """

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


logger = logging.getLogger(__name__)

REGISTRY_SECONDS = 1.0
"""Between two looks at who is registered."""
BATCH = 100
"""How many entries of one stream are read at once."""
IN_HAND = 1000
"""How many commands of one stream may wait at once; those behind them are not read yet."""
IN_HAND_BYTES = 4 * 1024 * 1024
"""How many bytes of one stream may be in hand, but for the last entry."""
ALL_IN_HAND_BYTES = 64 * 1024 * 1024
"""The same for all streams together, shared evenly."""
WAIT_SECONDS = 0.2
"""How long a command that cannot be carried out yet waits before the next try."""
IDLE_FIRST_SECONDS = 0.02
IDLE_LAST_SECONDS = 1.0
LOOKS_PER_SECOND = 250
"""How often empty streams are looked at, all together."""
BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_LAST_SECONDS = 5.0


class Held(Protocol):
    """A command in hand."""

    fields: list[bytes]


Command = TypeVar("Command", bound=Held)


class PublisherStreams(Generic[Command]):
    """Reads the ingress streams of all registered publishers, each in a task of its own.

    Each task settles one command at a time, so the streams take turns by command. A stream that cannot be read, has to
    wait, or is full of garbage delays no other. The commands in hand are bounded in entries and bytes.

    `take` makes a command of an entry, `settle` carries commands out and returns those that wait.
    `connect` opens a connection for one stream, where the streams may live on different servers (Redis Cluster).
    """

    def __init__(
        self,
        home: EventBus,
        transport: Transport,
        take: Callable[[Publisher, IngressStream, IngressEntry, InvalidInput | None], Command],
        settle: Callable[[list[Command]], Awaitable[list[Command]]],
        drop: Callable[[list[Command]], None],
        connect: Callable[[], Awaitable[Transport]] | None = None,
    ) -> None:
        self._publishers = Publishers(home)
        self._namespace = home.keys.namespace
        self._transport = transport
        self._take = take
        self._settle = settle
        self._drop = drop
        self._connect = connect
        self._readers: dict[Publisher, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Read until cancelled. Raises Fenced where another leads by now."""
        try:
            while True:
                try:
                    await self._follow_registry()
                except (BusUnavailable, ServerError) as error:
                    logger.warning("the registered publishers cannot be read now: %s", error)
                readers = self._readers.values()
                if not readers:
                    await asyncio.sleep(REGISTRY_SECONDS)
                    continue
                done, _ = await asyncio.wait(readers, timeout=REGISTRY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for reader in done:
                    reader.result()  # they end by an error that is not their stream's
        finally:
            await _end(self._readers.values())

    async def _follow_registry(self) -> None:
        """One reader for each publisher as it is registered now: one that has changed gets another reader."""
        wanted = {publisher.name: publisher for publisher in await self._publishers.all()}
        gone = [publisher for publisher in self._readers if wanted.get(publisher.name) != publisher]
        await _end([self._readers.pop(publisher) for publisher in gone])
        for publisher in wanted.values():
            if publisher not in self._readers:
                self._readers[publisher] = asyncio.create_task(self._read(publisher), name=f"tasks:{publisher.name}")

    async def _read(self, publisher: Publisher) -> None:
        transport = self._transport if self._connect is None else None
        backoff, said = BACKOFF_FIRST_SECONDS, ""
        try:
            while True:
                began = time.monotonic()
                try:
                    if transport is None:
                        assert self._connect is not None
                        transport = await self._connect()
                    await self._follow(publisher, IngressStream(transport, self._namespace, publisher.name))
                except (Fenced, asyncio.CancelledError):
                    raise
                except Exception as error:
                    # Whatever is wrong with one stream (another type, no right to it) is its publisher's trouble alone.
                    if time.monotonic() - began > BACKOFF_LAST_SECONDS:
                        backoff, said = BACKOFF_FIRST_SECONDS, ""
                    expected = isinstance(error, (BusUnavailable, ServerError))
                    if str(error) != said:
                        logger.log(
                            logging.WARNING if expected else logging.ERROR,
                            "the stream of publisher %s cannot be read now: %r", publisher.name, error,
                            exc_info=None if expected else error,
                        )  # fmt: skip
                    said = str(error)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, BACKOFF_LAST_SECONDS)
        finally:
            if transport is not None and transport is not self._transport:
                await transport.close()

    async def _follow(self, publisher: Publisher, stream: IngressStream) -> None:
        """Settle what comes on one stream, in its order, until something is wrong with it."""
        waiting: list[Command] = []
        last = b""
        try:
            while True:
                left = min(IN_HAND_BYTES, ALL_IN_HAND_BYTES // max(1, len(self._readers)))
                left -= sum(sum(map(len, command.fields)) for command in waiting)
                count = min(BATCH, IN_HAND - len(waiting))
                entries: list[IngressEntry] = []
                if count > 0 and left > 0:
                    entries = await stream.read(last, count, left)
                waiting += [self._take(publisher, stream, entry, _refused(entry)) for entry in entries]
                waiting = await self._settle(waiting)
                if entries and waiting:
                    last = entries[-1].id
                elif not waiting:
                    # From the first entry again: what was settled is gone, and a stream that was made again begins
                    # with smaller ids.
                    last = b""
                # At once while there is more.
                await asyncio.sleep(WAIT_SECONDS if waiting else 0 if entries else self._idle_seconds())
        finally:
            self._drop(waiting)

    def _idle_seconds(self) -> float:
        return min(IDLE_LAST_SECONDS, max(IDLE_FIRST_SECONDS, len(self._readers) / LOOKS_PER_SECOND))


def _refused(entry: IngressEntry) -> InvalidInput | None:
    """What is wrong with an entry before it is read as an event."""
    if entry.too_large:
        return InvalidInput(
            "entry",
            f"is {entry.too_large} bytes, over the limit of {MAX_ENTRY_BYTES}; store the data and send a reference",
        )
    if int(entry.id.partition(b"-")[0]) > time.time() * 1000 + AHEAD_MS:
        return InvalidInput("entry", f"has the id {entry.id.decode()}, which lies in the future; send `*` as its id")
    return None


async def _end(readers: Collection[asyncio.Task[None]]) -> None:
    for reader in readers:
        reader.cancel()
    if readers:
        await asyncio.wait(readers)
