"""Reads the ingress streams of all registered publishers, each by itself.

Every stream has a task of its own, which settles one command at a time: streams take turns by command, and a stream
that cannot be read, is held up, or is full of garbage delays no other. What is in hand is bounded in entries and bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.ingress_stream import AHEAD_MS, MAX_ENTRY_BYTES, IngressEntry, IngressStream
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, ServerError
from runtime_core.ingress.publishers import Publisher, Publishers

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
    """`take` makes a command of an entry, `settle` carries commands out and returns those that wait.

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
