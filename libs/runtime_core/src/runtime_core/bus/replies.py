"""The stream on which one process gets replies from a partition: ends of tasks, and results of calls in mid-turn.

If a reply is lost with a connection, it is read from where it is stored: the task's hash, or the run's journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple, cast

from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusError, BusLost, JournalMoved

LOOKUP_SECONDS = 10.0
LOOKUP_MAX = 1000
"""How many missing replies one lookup covers."""
REPLY_SECONDS = 600
"""How long the broker keeps a reply stream without a reader."""
KEEP_SECONDS = 10.0
"""How long to wait for a broker that may be unavailable."""
TRIM_EVERY = 1000
"""How many replies to read before removing them from the broker."""


class Answer(NamedTuple):
    """A reply that a caller waits for."""

    value: bytes
    """The data of a task's final event, or the journal value of a step."""
    state: bytes = b""
    """The instance's state, if a nested run changed it while the calling run waited: `<number> <JSON>`."""


def name_of_step(task: str, run: str, step: str) -> str:
    """Return the name under which a run waits for a step's result. The name for a task's end is its id."""
    return f"{task}|{run}|{step}"


class Replies:
    """One partition's reply stream, and the futures that wait for replies on it.

    `reader` is a separate connection, because reads block it.
    """

    def __init__(self, bus: EventBus, name: str, reader: Transport) -> None:
        self.bus = bus
        self.name = name
        self.stream = bus.keys.reply(name)
        self._reader = reader
        self._cursor = "0-0"
        self._waiting: dict[str, list[asyncio.Future[Answer]]] = {}
        self._asked: set[str] = set()
        """Names of requests that the broker has stored."""
        self._looked_up = 0
        """How many of the missing answers the last lookups have covered; the next one begins behind them."""
        self._task: asyncio.Task[None] | None = None
        self._lost: BusLost | None = None

    def start(self) -> None:
        """Read until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._read(), name="replies")

    async def close(self) -> None:
        """Stop reading, and cancel all futures that still wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(0.5):
                await self.bus.transport.call("DEL", self.stream)

    def expect(self, name: str) -> asyncio.Future[Answer]:
        """Return a future of an answer, for one caller to await or cancel."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            _fail(future, self._lost)
        self._waiting.setdefault(name, []).append(future)
        return future

    def forget(self, name: str, future: asyncio.Future[Answer]) -> None:
        """Remove a future that nobody waits for any more."""
        futures = self._waiting.get(name, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                self._take(name)

    def hand_out(self, name: str, answer: Answer) -> None:
        """Set the answer on all futures that wait for it."""
        for future in self._take(name):
            if not future.done():
                future.set_result(answer)

    def mark_requested(self, names: Iterable[str]) -> None:
        """Note that the broker has stored the requests of these steps, or these tasks.

        If the broker has forgotten one of them, perhaps with its last writes, its callers get JournalMoved.
        """
        self._asked.update(name for name in names if name in self._waiting)

    def _take(self, name: str) -> list[asyncio.Future[Answer]]:
        self._asked.discard(name)
        return self._waiting.pop(name, [])

    async def _read(self) -> None:
        """Hand out answers as they come; after a silence or a reconnect, look up missing ones where they are stored."""
        keep_at, look_up_at, read = 0.0, time.monotonic() + LOOKUP_SECONDS, 0
        while True:
            try:
                if time.monotonic() > keep_at or read >= TRIM_EVERY:
                    await self._keep_stream()
                    keep_at, read = time.monotonic() + REPLY_SECONDS / 10, 0
                reply = await self._reader.blocking(
                    "XREAD", "COUNT", 1000, "BLOCK", 2000, "STREAMS", self.stream, self._cursor
                )
            except BusLost as lost:
                self._lost = lost
                for future in [future for futures in self._waiting.values() for future in futures]:
                    _fail(future, lost)
                return
            except (BusError, TimeoutError):
                keep_at = 0.0
                await asyncio.sleep(0.1)
                await self._look_up()
                continue
            if reply is None:
                await self._look_up()
                continue
            entries = cast(list[list[list[Any]]], reply)[0][1]  # Any: RESP2 shapes
            read += len(entries)
            for entry, fields in entries:
                self._cursor = entry.decode()
                self.hand_out(fields[1].decode(), Answer(fields[3], fields[5] if len(fields) > 5 else b""))
            if time.monotonic() > look_up_at:
                await self._look_up()
                look_up_at = time.monotonic() + LOOKUP_SECONDS

    async def _keep_stream(self) -> None:
        """Keep the stream alive while it has a reader: the bus writes only to reply streams that exist."""
        call = self.bus.transport.call
        async with asyncio.timeout(KEEP_SECONDS):
            await self.bus.make_group(self.stream, "client")
            await call("EXPIRE", self.stream, REPLY_SECONDS)
            await call("XTRIM", self.stream, "MINID", self._cursor)

    async def _look_up(self) -> None:
        """Look up missing answers where they are stored: their replies may be lost with a connection."""
        waiting = list(self._waiting)
        names = waiting[self._looked_up : self._looked_up + LOOKUP_MAX]
        self._looked_up += LOOKUP_MAX
        if self._looked_up >= len(waiting):
            self._looked_up = 0
        lookups = [self._stored(name) for name in names]
        asked = self._asked.intersection(names)  # before the lookups: excludes requests made in the meantime
        try:
            async with asyncio.timeout(5):
                for name, lookup in zip(names, lookups, strict=True):
                    stored = cast(list[bytes | None], await lookup)
                    if stored[0] is not None:
                        self.hand_out(name, Answer(stored[0], stored[1] or b""))
                    elif name in asked and stored[2] is None:
                        lost = JournalMoved(f"the broker has lost the request {name}")
                        for future in self._take(name):
                            _fail(future, lost)
        except (BusError, TimeoutError):
            return

    def _stored(self, name: str) -> Awaitable[Reply]:
        task, _, place = name.partition("|")
        if not place:
            return self.bus.transport.call("HMGET", self.bus.keys.task(task), "out", "state", "status")
        run, _, step = place.rpartition("|")
        return self.bus.transport.call("HMGET", self.bus.keys.run(task, run), f"j:{step}", f"o:{step}", f"m:{step}")


def _fail(future: asyncio.Future[Answer], lost: BusLost | JournalMoved) -> None:
    if not future.done():
        future.set_exception(lost)
        future.exception()  # nobody may wait for it any more
