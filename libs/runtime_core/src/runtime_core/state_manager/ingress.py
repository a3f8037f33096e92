"""Commands of the ingress: read fairly from the streams of all publishers, parsed, and bound to their publisher and its
tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from typing import cast

from runtime_core.base.periodic import cancel_and_wait
from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys, ingress
from runtime_core.bus.partition import Partition
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, ServerError
from runtime_core.state_manager import schedules
from runtime_core.state_manager.publishers import REGISTRY_SECONDS, Publisher, Publishers
from runtime_core.telemetry.spans import Span
from runtime_core.wire import commands as wire
from runtime_core.wire.commands import Submission, data_of
from runtime_core.wire.envelope import Envelope, parse

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 3 * 1024 * 1024
"""The largest entry that is read completely. No valid command is larger."""
MAX_ID_AHEAD_MS = 24 * 3600 * 1000
"""How far ahead of the server's clock an entry's id may be."""
TASKS = "tasks"
STREAM_BATCH = 100
"""Entries per read of one stream."""
STREAM_COMMANDS_MAX = 1000
"""Commands of one stream that may be held at once; later ones are not read yet."""
STREAM_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one stream that may be held at once, except for the last entry."""
ALL_STREAMS_BYTES_MAX = 64 * 1024 * 1024
"""The same for all streams together, in equal shares."""
STREAM_RETRY_SECONDS = 0.2
"""The pause before commands that must wait are tried again."""
POLL_MIN_SECONDS = 0.02
POLL_MAX_SECONDS = 1.0
POLLS_PER_SECOND = 250
"""Polls per second of all empty streams together."""
STREAM_BACKOFF_MIN_SECONDS = 0.1
STREAM_BACKOFF_MAX_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class IngressEntry:
    """One entry. If it is too large, `fields` only has the heads of its fields."""

    id: bytes
    fields: list[bytes]
    too_large: int = 0
    """Its size in bytes if it is too large, else 0."""


class IngressStream(Partition):
    """The ingress stream of one publisher.

    It has no consumer group: one admitter reads it at a time, and deletes the entries that it has handled. So a
    publisher that deletes, trims or resets its stream cannot make the reader skip entries.
    """

    def __init__(self, transport: Transport, namespace: str, publisher: str) -> None:
        super().__init__(transport, Keys(namespace, 0))
        self.key = ingress(namespace, publisher)
        self._base = self.key.encode()

    async def read(self, after: bytes, count: int, size: int) -> list[IngressEntry]:
        """Return the entries after `after` (empty: all), up to `count` and `size` bytes, but at least one.

        Removes an empty stream that can get no more entries because one had the largest id.
        """
        start = b"(" + after if after else b"-"
        reply = await self.call("read_ingress", start, count, size, MAX_ENTRY_BYTES, MAX_ID_AHEAD_MS)
        return [
            IngressEntry(cast(bytes, entry), cast(list[bytes], fields), cast(int, large))
            for entry, large, fields in cast(list[list[Reply]], reply)
        ]

    async def remove(self, entry: bytes) -> None:
        await self.transport.call("XDEL", self.key, entry)


class Command:
    """An ingress entry that was read and is not settled."""

    __slots__ = (
        "_context", "_manager", "entry", "envelope", "error", "fields", "kept", "overtakes", "publisher", "span",
        "stream", "task", "tries", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        entry: bytes,
        fields: list[bytes],
        publisher: Publisher | None = None,
        stream: IngressStream | None = None,
    ) -> None:
        self.entry = entry
        self.fields = fields
        self.publisher = publisher
        """The publisher that it is bound to; None on the shared stream."""
        self.stream = stream
        self.envelope: Envelope | None = None
        self.wanted: Submission | wire.Cancellation | wire.Signal | wire.Publication | None = None
        self.error: InvalidInput | None = None
        self.task = ""
        self.overtakes = False
        """Whether it may overtake commands that wait."""
        self.kept = False
        self.tries = 0
        self.span: Span | None = None
        self._manager: AbstractContextManager[Span] | None = None
        self._context = copy_context()

    def parse(self, namespace: str, blobs: str) -> None:
        """Parse the entry, and bind the command to its publisher. Sets `error` if that fails.

        `blobs` is the URL of the namespace's blobs, if it has any.
        """
        publisher = self.publisher
        try:
            envelope = parse(self.entry.decode(), self.fields, namespace)
            if publisher is not None:
                envelope = publisher.bind(envelope)
            self.envelope = envelope
            match envelope.type:
                case wire.SUBMIT:
                    submit = wire.parse_submit(envelope)
                    if publisher is not None:
                        publisher.check_agent(submit.agent)
                        submit = publisher.scope(submit, blobs)
                    self.wanted, self.task = submit, submit.task_id
                case wire.CANCEL:
                    cancel = wire.parse_cancel(envelope)
                    self.wanted = cancel if publisher is None else publisher.scope(cancel)
                    self.task, self.overtakes = self.wanted.task_id, True
                case wire.SIGNAL:
                    signal = wire.parse_signal(envelope)
                    self.wanted = signal if publisher is None else publisher.scope(signal, blobs)
                    self.task, self.overtakes = self.wanted.task_id, True
                case wire.PUBLISH:
                    message = wire.parse_publish(envelope)
                    if publisher is not None:
                        publisher.check_topic(message.topic)
                        message = publisher.scope(message, blobs)
                    self.wanted = message
                case schedules.SET | schedules.DELETE:
                    pass
                case other:
                    known = (
                        wire.SUBMIT, wire.CANCEL, wire.SIGNAL, wire.PUBLISH, schedules.SET,
                        schedules.DELETE,
                    )  # fmt: skip
                    raise InvalidInput("type", f"{other!r} is not a command; commands are {', '.join(known)}")
        except InvalidInput as error:
            self.error, self.overtakes = error, True

    def public_error(self, error: InvalidInput) -> InvalidInput:
        """Return the error without agent names: a publisher must not learn which agents other tenants use."""
        if self.publisher is None or error.field != "data.agent" or self.envelope is None:
            return error
        return self.publisher.unknown_agent(str(data_of(self.envelope)["agent"]))

    @property
    def place(self) -> str:
        """The stream's name in dead letters and logs."""
        return TASKS if self.publisher is None else f"{TASKS}:{self.publisher.name}"

    def open(self, span: AbstractContextManager[Span]) -> None:
        """Open one span for all attempts. It is not the current span between them: other commands run meanwhile."""
        self._manager = span
        self.span = self._context.run(span.__enter__)

    def close(self) -> None:
        """End the span, with the command's error."""
        manager, self._manager, self.span = self._manager, None, None
        # The traceback of the error refers to this command: the cycle would keep its data until a late collection.
        error, self.error = self.error, None
        if manager is not None:
            self._context.run(manager.__exit__, type(error) if error else None, error, None)


class PublisherStreams:
    """Reads the ingress streams of all registered publishers, each in its own task.

    Each task settles one command at a time, so the streams take turns command by command. A stream that is unreadable,
    waits or holds garbage does not delay the others. Held commands are bounded in number and bytes.

    `take` turns an entry into a command. `settle` executes commands and returns those that must wait.
    `connect` opens a connection per stream, for a Cluster, where the streams may live on different servers.
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
        """Read until cancelled. Raises Fenced if another admitter leads."""
        try:
            while True:
                try:
                    await self._follow_registry()
                except (BusUnavailable, ServerError) as error:
                    logger.warning("cannot read the registered publishers: %s", error)
                readers = self._readers.values()
                if not readers:
                    await asyncio.sleep(REGISTRY_SECONDS)
                    continue
                done, _ = await asyncio.wait(readers, timeout=REGISTRY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for reader in done:
                    reader.result()  # raises: readers end only by errors that concern all streams
        finally:
            await cancel_and_wait(*self._readers.values())

    async def _follow_registry(self) -> None:
        """Start a reader for each new or changed publisher, and stop the readers of others."""
        wanted = {publisher.name: publisher for publisher in await self._publishers.all()}
        gone = [publisher for publisher in self._readers if wanted.get(publisher.name) != publisher]
        await cancel_and_wait(*[self._readers.pop(publisher) for publisher in gone])
        for publisher in wanted.values():
            if publisher not in self._readers:
                self._readers[publisher] = asyncio.create_task(self._read(publisher), name=f"tasks:{publisher.name}")

    async def _read(self, publisher: Publisher) -> None:
        transport = self._transport if self._connect is None else None
        backoff, logged = STREAM_BACKOFF_MIN_SECONDS, ""
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
                    # An error of one stream (wrong type, no permission) must not affect other publishers.
                    if time.monotonic() - began > STREAM_BACKOFF_MAX_SECONDS:
                        backoff, logged = STREAM_BACKOFF_MIN_SECONDS, ""
                    expected = isinstance(error, (BusUnavailable, ServerError))
                    if str(error) != logged:
                        logger.log(
                            logging.WARNING if expected else logging.ERROR,
                            "cannot read the stream of publisher %s: %r", publisher.name, error,
                            exc_info=None if expected else error,
                        )  # fmt: skip
                    logged = str(error)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, STREAM_BACKOFF_MAX_SECONDS)
        finally:
            if transport is not None and transport is not self._transport:
                await transport.close()

    async def _follow(self, publisher: Publisher, stream: IngressStream) -> None:
        """Settle the entries of one stream in order, until reading it fails."""
        waiting: list[Command] = []
        last = b""
        try:
            while True:
                left = min(STREAM_BYTES_MAX, ALL_STREAMS_BYTES_MAX // max(1, len(self._readers)))
                left -= sum(sum(map(len, command.fields)) for command in waiting)
                count = min(STREAM_BATCH, STREAM_COMMANDS_MAX - len(waiting))
                entries: list[IngressEntry] = []
                if count > 0 and left > 0:
                    entries = await stream.read(last, count, left)
                waiting += [self._take(publisher, stream, entry, _refused(entry)) for entry in entries]
                waiting = await self._settle(waiting)
                if entries and waiting:
                    last = entries[-1].id
                elif not waiting:
                    # Read from the start again: settled entries are gone, and a recreated stream may have smaller ids.
                    last = b""
                # No pause while there are more entries.
                await asyncio.sleep(STREAM_RETRY_SECONDS if waiting else 0 if entries else self._poll_seconds())
        finally:
            self._drop(waiting)

    def _poll_seconds(self) -> float:
        return min(POLL_MAX_SECONDS, max(POLL_MIN_SECONDS, len(self._readers) / POLLS_PER_SECOND))


def _refused(entry: IngressEntry) -> InvalidInput | None:
    """Return why an entry is refused before it is parsed; None if it is not."""
    if entry.too_large:
        return InvalidInput(
            "entry",
            f"is {entry.too_large} bytes, over the limit of {MAX_ENTRY_BYTES}; store the data and send a reference",
        )
    if int(entry.id.partition(b"-")[0]) > time.time() * 1000 + MAX_ID_AHEAD_MS:
        return InvalidInput("entry", f"has the id {entry.id.decode()}, which is in the future; send `*` as its id")
    return None
