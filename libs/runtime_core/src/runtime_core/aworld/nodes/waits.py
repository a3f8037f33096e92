"""Waits for runs, nodes and groups: woken by the partition's stream of states, not by looking again and again.

All waits of a partition share one blocking read. A wait looks at the thing itself first and whenever it is woken, so
that the stream need not be complete: after a reconnect everybody is woken, and once in a while for a broker that has
lost its last writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusError

LOOK_SECONDS = 30.0
BLOCK_MS = 5000
Found = TypeVar("Found")
Look = Callable[[str], Awaitable[Found | None]]


class StateWaits:
    """Who waits for what in one partition.

    A `name` is as on the stream of states: `node/<id>`, `group/<id>`, `run/<task>/<run>`.
    """

    def __init__(
        self,
        bus: EventBus,
        open_reader: Callable[[EventBus], Awaitable[Transport]],
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._bus = bus
        self._open_reader = open_reader
        self._look_seconds = look_seconds
        self._waiting: dict[str, list[asyncio.Future[str]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._cursor = ""
        """Where the stream is read from; empty while that has to be found out."""

    async def until(self, name: str, look: Look[Found]) -> Found:
        """Wait until `look` gives something. It is given the status of which the stream told, or an empty text."""
        told = ""
        while True:
            # Expected before the look: what happens in between wakes it.
            woken = self._expect(name)
            try:
                found = await look(told)
                if found is not None:
                    return found
                told = await woken
            finally:
                self._forget(name, woken)

    async def close(self) -> None:
        """Stop reading; waits that are left are cancelled."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    def _expect(self, name: str) -> asyncio.Future[str]:
        woken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(woken)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="states")
        return woken

    def _forget(self, name: str, woken: asyncio.Future[str]) -> None:
        futures = self._waiting[name]
        futures.remove(woken)
        if not futures:
            del self._waiting[name]

    async def _read(self) -> None:
        """Read the stream, from the first wait on."""
        reader: Transport | None = None
        try:
            look_at = 0.0
            while True:
                try:
                    reader = reader or await self._open_reader(self._bus)
                    if not self._cursor:
                        self._cursor = await self._last()
                        self._wake_all()
                        look_at = time.monotonic() + self._look_seconds
                    reply = await reader.blocking(
                        "XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", self._bus.keys.states, self._cursor
                    )
                except BusError:
                    # What was said meanwhile may be lost: start again from what is there, and let everybody look.
                    self._cursor = ""
                    await asyncio.sleep(0.1)
                    continue
                for entry, fields in cast(list[list[list[Any]]], reply)[0][1] if reply else ():  # Any: RESP2 shapes
                    self._cursor = entry.decode()
                    self._wake(fields[1].decode(), fields[3].decode())
                if time.monotonic() > look_at:
                    self._cursor = ""
        finally:
            if reader is not None and reader is not self._bus.transport:
                await reader.close()

    async def _last(self) -> str:
        newest = await self._bus.transport.call("XREVRANGE", self._bus.keys.states, "+", "-", "COUNT", 1)
        entries = cast(list[list[bytes]], newest)
        return entries[0][0].decode() if entries else "0-0"

    def _wake(self, name: str, status: str) -> None:
        self._set(name, status)
        if name.startswith("run/") and name.endswith("/r"):
            # With a task all its runs are over. One that had an end of its own was told of it before.
            for other in [waited for waited in self._waiting if waited.startswith(name + "/")]:
                self._set(other, "cancelled")

    def _wake_all(self) -> None:
        for name in list(self._waiting):
            self._set(name, "")

    def _set(self, name: str, status: str) -> None:
        for woken in self._waiting.get(name, ()):
            if not woken.done():
                woken.set_result(status)
