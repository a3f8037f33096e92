"""A TCP proxy between a client and a server, for tests of network failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

CHUNK_BYTES = 65536
MOST_ON_THE_WAY = 10_000
"""Pieces of data in one direction of a connection. With more, the sender must wait."""


@dataclass(slots=True)
class _Loss:
    """An action that happens once, to the connection on which these bytes are sent."""

    marker: bytes
    what: Literal["request", "reply"]
    done: asyncio.Event


class Proxy:
    """Forwards connections on a port of 127.0.0.1 to `url`, and breaks them when told to.

        async with Proxy(server.url) as proxy:
            client = connect(proxy.url)
            lost = proxy.lose_reply(b"commit")
            …                                   # the server commits, the client never learns of it
            await lost.wait()

    The switches act on all connections, old and new; `heal()` puts all of them back.
    """

    def __init__(self, url: str) -> None:
        """`url` is the server's, as in `redis://127.0.0.1:6379`."""
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"url: {url!r} names no host and port")
        self._target = (parts.hostname, parts.port)
        self._scheme = parts.scheme
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loss: _Loss | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.swallow_replies = False
        """While True, what the server answers is dropped; requests still reach it."""
        self.delay_seconds = 0.0
        """How long each piece of data waits, in both directions, before it is passed on. Pieces wait at the same time,
        as on a long line."""
        self.accepted = 0
        """Connections accepted since the start."""

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def cut(self) -> None:
        """Break all connections at once; new ones are accepted."""
        for connection in list(self._connections):
            connection.abort()

    def freeze(self) -> None:
        """Leave connections open and forward nothing, in either direction, as if a cable were pulled.

        Neither side learns of it, even if the other one closes. New connections are accepted and get no answer.
        """
        self._flowing.clear()

    def heal(self) -> None:
        """Forward the held data and end all switches; swallowed data stays lost."""
        self.swallow_replies = False
        self.delay_seconds = 0.0
        self._loss = None
        self._flowing.set()

    async def down(self) -> None:
        """Stop listening and break all connections: the next connect is refused."""
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            self._server = None

    def refuse(self) -> None:
        """Stop listening. Existing connections continue. `up()` listens again."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def up(self) -> None:
        """Listen again, on the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    def lose_reply(self, marker: bytes) -> asyncio.Event:
        """Break the connection before the reply to the next request that contains `marker`. The server handles that
        request and all before it. Returns an event that is set after it."""
        return self._lose(marker, "reply")

    def lose_request(self, marker: bytes) -> asyncio.Event:
        """The connection breaks before the next piece of data that contains `marker` reaches the server.

        Returns an event that is set after it. To a client this looks like `lose_reply`.
        """
        return self._lose(marker, "request")

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.down()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lose(self, marker: bytes, what: Literal["request", "reply"]) -> asyncio.Event:
        self._loss = _Loss(marker, what, asyncio.Event())
        return self._loss.done

    def _take_loss(self, data: bytes) -> _Loss | None:
        """Return the pending loss for this data; it happens once."""
        if self._loss is None or self._loss.marker not in data:
            return None
        loss, self._loss = self._loss, None
        return loss

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.create_task(self._serve(reader, writer), name=f"proxy-{self._port}-{self.accepted}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, server_writer)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                requests, replies = _Line(), _Line()
                group.create_task(self._carry(reader, requests))
                group.create_task(self._carry(server_reader, replies))
                group.create_task(self._requests(requests, connection))
                group.create_task(self._replies(replies, connection))
        except* (_Closed, OSError):
            # One side went away, and so the other must: this is what a proxy is for.
            pass
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _carry(self, reader: asyncio.StreamReader, line: _Line) -> None:
        """Put each piece of data on the line with the time at which it arrives at the other end."""
        now = asyncio.get_running_loop().time
        data = b"first"
        while data:
            data = await reader.read(CHUNK_BYTES)
            await line.put((now() + self.delay_seconds, data))

    async def _requests(self, line: _Line, connection: _Connection) -> None:
        tail = b""
        while True:
            data = await self._next(line)
            # The end of the last piece is looked at again, since a marker may span two pieces.
            loss = self._take_loss(tail + data)
            if loss is not None and loss.what == "request":
                connection.abort()
                loss.done.set()
                raise _Closed
            if loss is not None:
                connection.silent = True
            connection.server.write(data)
            await connection.server.drain()
            if loss is not None:
                await connection.finish()
                loss.done.set()
                raise _Closed
            tail = data[-len(self._loss.marker) + 1 :] if self._loss and len(self._loss.marker) > 1 else b""

    async def _replies(self, line: _Line, connection: _Connection) -> None:
        while True:
            try:
                data = await self._next(line)
            except _Closed:
                connection.server_closed.set()
                if connection.silent:
                    return
                raise
            if not (self.swallow_replies or connection.silent):
                connection.client.write(data)
                await connection.client.drain()

    async def _next(self, line: _Line) -> bytes:
        """Return the next piece of data, once it may be forwarded. Raises _Closed at the end of the stream."""
        arrives, data = await line.get()
        await asyncio.sleep(arrives - asyncio.get_running_loop().time())
        await self._flowing.wait()
        if not data:
            raise _Closed
        return data


class _Line(asyncio.Queue[tuple[float, bytes]]):
    """Data on its way in one direction, with the time (of the event loop) at which it arrives; empty at the end."""

    def __init__(self) -> None:
        super().__init__(maxsize=MOST_ON_THE_WAY)


class _Connection:
    """The two ends of one proxied connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.silent = False
        self.server_closed = asyncio.Event()

    async def finish(self) -> None:
        """Let the server handle what it was sent, then break the client's connection.

        The end of the stream is what tells us: the server closes only after it has read everything before.
        """
        self.server.write_eof()
        await self.server_closed.wait()
        self.client.transport.abort()

    def abort(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


class _Closed(Exception):
    """One side has closed its connection."""
