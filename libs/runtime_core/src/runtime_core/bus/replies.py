"""The stream on which one process gets answers from a partition: ends of tasks, and results asked for in mid-turn.

An answer that was lost with a connection is found where it is kept: in the task's hash, or in the run's journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, NamedTuple, cast

from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusError

LOOK_SECONDS = 10.0
LOOK_AT_ONCE = 1000
REPLY_SECONDS = 600
"""How long the broker keeps a reply stream that its reader has stopped reading."""
TRIM_EVERY = 1000
"""How many replies are read before those on the broker are removed."""


class Answer(NamedTuple):
    """What was waited for."""

    value: bytes
    """The final event's data of a task, or the journal value of a step."""
    state: bytes = b""
    """The instance's state (JSON), where a nested run has changed it while the asking run waited."""


def name_of_step(task: str, run: str, step: str) -> str:
    """The name under which a step's result is waited for. A task's end goes under the task's id."""
    return f"{task}|{run}|{step}"


class Replies:
    """One partition's reply stream, and who waits for what on it.

    `reader` is a connection of its own: it blocks.
    """

    def __init__(self, bus: EventBus, name: str, reader: Transport) -> None:
        self.bus = bus
        self.name = name
        self.stream = bus.keys.reply(name)
        self._reader = reader
        self._cursor = "0-0"
        self._waiting: dict[str, list[asyncio.Future[Answer]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._read(), name="replies")

    async def close(self) -> None:
        """Stop reading; those who still wait are cancelled."""
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
        """A future of an answer, which one caller may await and cancel."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        return future

    def forget(self, name: str, future: asyncio.Future[Answer]) -> None:
        """Nobody waits for this future any more."""
        futures = self._waiting.get(name, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                self._waiting.pop(name, None)

    def hand_out(self, name: str, answer: Answer) -> None:
        """Give an answer to all who wait for it."""
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(answer)

    async def _read(self) -> None:
        """Hand out answers as they come; after a silence or a reconnect, look where they are kept."""
        keep_at, look_at, read = 0.0, time.monotonic() + LOOK_SECONDS, 0
        while True:
            try:
                if time.monotonic() > keep_at or read >= TRIM_EVERY:
                    await self._keep_stream()
                    keep_at, read = time.monotonic() + REPLY_SECONDS / 10, 0
                reply = await self._reader.blocking(
                    "XREAD", "COUNT", 1000, "BLOCK", 2000, "STREAMS", self.stream, self._cursor
                )
            except BusError:
                keep_at = 0.0
                await asyncio.sleep(0.1)
                await self._look()
                continue
            if reply is None:
                await self._look()
                continue
            entries = cast(list[list[list[Any]]], reply)[0][1]  # Any: RESP2 shapes
            read += len(entries)
            for entry, fields in entries:
                self._cursor = entry.decode()
                self.hand_out(fields[1].decode(), Answer(fields[3], fields[5] if len(fields) > 5 else b""))
            if time.monotonic() > look_at:
                await self._look()
                look_at = time.monotonic() + LOOK_SECONDS

    async def _keep_stream(self) -> None:
        """The stream exists while its reader lives: the bus writes only to a stream that is there."""
        call = self.bus.transport.call
        async with asyncio.timeout(10):
            await self.bus.make_group(self.stream, "client")
            await call("EXPIRE", self.stream, REPLY_SECONDS)
            await call("XTRIM", self.stream, "MINID", self._cursor)

    async def _look(self) -> None:
        """Look at what is waited for: an answer may have been lost with a connection."""
        names = list(self._waiting)[:LOOK_AT_ONCE]
        looks = [self._kept(name) for name in names]
        try:
            async with asyncio.timeout(5):
                for name, look in zip(names, looks, strict=True):
                    kept = cast(list[bytes | None], await look)
                    if kept[0] is not None:
                        self.hand_out(name, Answer(kept[0], kept[1] or b""))
        except (BusError, TimeoutError):
            return

    def _kept(self, name: str) -> Awaitable[Reply]:
        task, _, place = name.partition("|")
        if not place:
            return self.bus.transport.call("HMGET", self.bus.keys.task(task), "out", "state")
        run, _, step = place.rpartition("|")
        return self.bus.transport.call("HMGET", self.bus.keys.run(task, run), f"j:{step}", f"o:{step}")
