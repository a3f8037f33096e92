"""How the bus reaches a server: RESP over one connection, one write for each tick of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

import hiredis

from runtime_core.bus.connector import CONNECT_TIMEOUT_SECONDS, Address, Connector
from runtime_core.errors import BusUnavailable, ServerError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection


Argument = bytes | str | int | float
Reply = bytes | int | None | list["Reply"]


class Transport(Protocol):
    """One client of a broker.

    Calls are sent in the order in which they are made and answered in that order. A call that meets a broken
    connection is sent again after the reconnect, so every call must be one that may be repeated; it ends with
    `BusUnavailable` only when the transport is closed. Error replies raise `ServerError`.
    """

    def call(self, *args: Argument) -> Awaitable[Reply]:
        """Send one command; several calls of one loop tick travel in one write."""
        ...

    async def blocking(self, *args: Argument) -> Reply:
        """Send a command that may wait on the broker, on a connection of its own.

        Raises `BusUnavailable` when that connection breaks: a read may then have handed out entries whose
        reply was lost, which the caller must look for.
        """
        ...

    @property
    def reconnects(self) -> int:
        """How often the connection for calls was made again."""
        ...

    async def close(self) -> None:
        """Fail what is open and let go of the connections."""
        ...


CONNECT_LOOK_SECONDS = 0.1
"""The most that counts of a wait for a connection, however long the event loop was blocked in it."""
# A server that accepts but says nothing for this long while calls wait is taken for dead (a half-open connection).
SILENCE_SECONDS = 10.0
BACKOFF_FIRST_SECONDS = 0.02
BACKOFF_LAST_SECONDS = 0.5
# Replies that say "not this server, not now": the call is kept and sent again after a reconnect.
_ELSEWHERE = ("LOADING", "READONLY", "MASTERDOWN", "MOVED", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")


_pack = cast(Callable[[tuple[Argument, ...]], bytes], hiredis.pack_command)  # its stub wants one-element tuples


class _Call:
    __slots__ = ("future", "payload")

    def __init__(self, payload: bytes, future: asyncio.Future[Reply]) -> None:
        self.payload = payload
        self.future = future


class _Connection(asyncio.Protocol):
    """One socket: bytes out, replies in, in order. redis-py has connected it and signed in."""

    def __init__(self, made: AbstractConnection) -> None:
        """Take the socket of a connection over. Raises ConnectionResetError where the server has hung up meanwhile."""
        reader, writer = made._reader, made._writer
        assert reader is not None
        assert writer is not None
        made._reader = made._writer = None  # it would warn that nobody has closed it
        self._writer = writer  # kept: it closes the socket when it goes
        self.transport = cast(asyncio.Transport, writer.transport)
        self.waiting: deque[_Call] = deque()
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self.heard_at = 0.0
        self._reader = hiredis.Reader(replyError=ServerError)
        self.moved: ServerError | None = None
        self.transport.set_protocol(self)
        if reader.at_eof() or self.transport.is_closing():
            self.abort()
            raise ConnectionResetError("the server hung up")

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self.waiting
        reader.feed(data)
        self.heard_at = self._loop.time()
        while (reply := reader.gets()) is not False:
            if not waiting:
                continue
            if isinstance(reply, ServerError):
                if str(reply).startswith(_ELSEWHERE):
                    self.moved = reply
                    self.abort()
                    return
                call = waiting.popleft()
                if not call.future.done():
                    call.future.set_exception(reply)
                continue
            call = waiting.popleft()
            if not call.future.done():
                call.future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, calls: list[_Call]) -> None:
        if not self.waiting:
            self.heard_at = self._loop.time()
        self.waiting.extend(calls)
        self.transport.write(b"".join([call.payload for call in calls]))

    def abort(self) -> None:
        self.transport.abort()
        if not self.lost.done():
            self.lost.set_result(None)


class RespTransport:
    """One client of a server: a connection for calls, and one for blocking reads, both kept up."""

    def __init__(self, address: Address, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._address = address
        self._silence_seconds = silence_seconds
        # In a Cluster calls and reads may be about other keys: each goes where it is sent.
        self._calls_to, self._reads_from = Connector(address), Connector(address)
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._unsent: list[_Call] = []
        self._flushing = False
        self._closed = False
        self._made = 0
        self._keeper: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._blocking: _Connection | None = None
        self._last_error: Exception | None = None

    @property
    def reconnects(self) -> int:
        return max(0, self._made - 1)

    async def connect(self, timeout: float | None = CONNECT_TIMEOUT_SECONDS) -> None:
        """Wait for the first connection. Raises BusUnavailable with the cause after `timeout` seconds.

        A server that refuses (a wrong password, a database that it does not have) is not asked for so long. Time in
        which the event loop was blocked does not count: the server may have answered long ago.
        """
        self._start()
        left = math.inf if timeout is None else timeout
        try:
            while left > 0 and not self._connected.is_set() and not _refuses(self._last_error):
                step = min(left, CONNECT_LOOK_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(step):
                        await self._connected.wait()
                left -= step
        except asyncio.CancelledError:
            await self.close()  # whoever has stopped waiting cannot close it: it was never given to them
            raise
        if not self._connected.is_set():
            cause = self._last_error
            await self.close()
            raise BusUnavailable(f"no answer from {self._address}: {_reason(cause)}") from cause

    def call(self, *args: Argument) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._closed:
            future.set_exception(BusUnavailable(f"the connection to {self._address} is closed"))
            return future
        self._unsent.append(_Call(_pack(args), future))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return future

    async def blocking(self, *args: Argument) -> Reply:
        connection = self._blocking
        if connection is None or connection.lost.done():
            try:
                connection = self._blocking = _Connection(await self._reads_from.open())
            except (OSError, ServerError) as error:
                raise BusUnavailable(f"no answer from {self._address}: {_reason(error)}") from error
        future: asyncio.Future[Reply] = self._loop.create_future()
        connection.send([_Call(_pack(args), future)])
        try:
            await asyncio.wait(
                (future, connection.lost), timeout=self._patience(args), return_when=asyncio.FIRST_COMPLETED
            )
            if future.done():
                return future.result()
            connection.abort()
        except BaseException:
            # A reader that is cancelled must not leave a command behind whose entries nobody takes.
            connection.abort()
            raise
        self._blocking = None
        self._reads_from.follow(connection.moved)
        raise BusUnavailable(f"the connection to {self._address} broke during a read")

    def interrupt(self) -> None:
        """Break the blocking read that waits, if there is one (used by a stop)."""
        if self._blocking is not None:
            self._blocking.abort()

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        calls = list(self._unsent)
        for connection in (self._connection, self._blocking):
            if connection is not None:
                calls.extend(connection.waiting)
                connection.abort()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(BusUnavailable(f"the connection to {self._address} was closed"))
                call.future.exception()  # whoever does not wait any more need not be warned

    def _start(self) -> None:
        if self._keeper is None:
            self._keeper = self._loop.create_task(self._keep(), name=f"connection {self._address}")

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        if connection is None or connection.lost.done() or not self._unsent:
            self._start()
            return
        calls, self._unsent = self._unsent, []
        connection.send(calls)

    async def _keep(self) -> None:
        """Keep a connection up; what it had not answered goes first over the next one."""
        from redis.backoff import DecorrelatedJitterBackoff  # here: the import takes 0.1 s

        # Of redis-py's kinds the one that may go on for ever: others count in powers of two until those overflow.
        backoff = DecorrelatedJitterBackoff(BACKOFF_LAST_SECONDS, BACKOFF_FIRST_SECONDS)
        failures = 0
        while not self._closed:
            try:
                connection = _Connection(await self._calls_to.open())
            except (OSError, ServerError) as error:
                self._last_error = error
                failures += 1
                await asyncio.sleep(backoff.compute(failures))
                continue
            backoff.reset()
            failures = 0
            self._made += 1
            self._connection = connection
            self._connected.set()
            self._flush()
            try:
                await self._watch(connection)
            except asyncio.CancelledError:
                connection.abort()  # the end of an event loop cancels this, and nobody calls close()
                raise
            self._connection = None
            self._unsent[:0] = [call for call in connection.waiting if not call.future.done()]
            connection.waiting.clear()
            connection.abort()
            self._calls_to.follow(connection.moved)

    async def _watch(self, connection: _Connection) -> None:
        """Return when the connection is lost, or silent for too long while calls wait."""
        while not connection.lost.done():
            await asyncio.wait((connection.lost,), timeout=self._silence_seconds / 4)
            if connection.waiting and self._loop.time() - connection.heard_at > self._silence_seconds:
                return

    def _patience(self, args: tuple[Argument, ...]) -> float | None:
        """How long a blocking read may take: its own BLOCK and the silence that a dead connection is granted."""
        for name, value in itertools.pairwise(args):
            if name == "BLOCK":
                return float(value) / 1000 + self._silence_seconds if int(value) else None
        return self._silence_seconds


def _refuses(error: BaseException | None) -> bool:
    """Whether the server has said no, and not "later" or "elsewhere": more time would change nothing."""
    return isinstance(error, ServerError) and not str(error).startswith(_ELSEWHERE)


def _reason(error: BaseException | None) -> str:
    if error is None or (isinstance(error, TimeoutError) and not str(error)):
        return "timed out"
    return str(error) or type(error).__name__


def text(item: Reply) -> str:
    """A text or a number, as text."""
    return item.decode() if isinstance(item, bytes) else str(item)


def texts(reply: Reply) -> list[str]:
    """Each item of a list, as `text` gives it."""
    return [text(item) for item in cast(list[Reply], reply)]


def fields(reply: Reply) -> dict[str, bytes]:
    """A hash, or any list of names and values, by name."""
    flat = cast(list[bytes], reply)
    return {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}


def position(entry: str) -> tuple[int, int]:
    """What ids of a stream's entries compare by: milliseconds, then sequence number (0 where it is left out)."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
