"""A connection of the bus to a server: RESP, with few writes per tick of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, cast

import hiredis

from runtime_core.bus.connector import CONNECT_TIMEOUT_SECONDS, BrokerAddress, Connector
from runtime_core.errors import BusLost, BusUnavailable, ServerError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

CONNECT_SLICE_SECONDS = 0.1
"""Waits for a connection are counted in slices of at most this length, so a blocked event loop uses up only one
slice."""
SILENCE_SECONDS = 10.0
"""A server that accepts calls but sends nothing for this long is considered dead (a half-open connection)."""
WRITTEN_AT_ONCE = 8
"""The calls of one tick travel in groups of this many: the server begins with the first while the rest are prepared."""
BACKOFF_FIRST_SECONDS = 0.02
BACKOFF_LAST_SECONDS = 0.5
STEADY_SECONDS = 1.0
"""A connection that has served calls for so long resets the backoff after servers that refuse calls."""
# Errors of a server that cannot serve now or at all: the call is kept, and sent again after a reconnect.
_ELSEWHERE = ("LOADING", "READONLY", "MASTERDOWN", "MOVED", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
_OF_ONE_SLOT = ("CLUSTERDOWN", "TRYAGAIN")
"""Those that may concern only the keys of one call: the server has executed the calls after it."""


Argument = bytes | str | int | float
Reply = bytes | int | None | list["Reply"]

_pack = cast(Callable[[tuple[Argument, ...]], bytes], hiredis.pack_command)  # its stub wants one-element tuples


class Transport(Protocol):
    """One client of a broker.

    Calls are sent, and get their replies, in the order in which they are made. If the connection breaks, the call is
    sent again after the reconnect, so every call must be safe to repeat. It raises `BusUnavailable` only when the
    transport is closed. Error replies raise `ServerError`.
    """

    def call(self, *args: Argument) -> Awaitable[Reply]:
        """Send one command; several calls of one loop tick travel together."""
        ...

    async def blocking(self, *args: Argument) -> Reply:
        """Send a command that may block on the broker, over a separate connection.

        Raises `BusUnavailable` when that connection breaks. The reply of a read may then be lost: the caller must look
        for entries that the broker has delivered to it.
        """
        ...

    @property
    def reconnects(self) -> int:
        """How often the connection for calls was reopened."""
        ...

    async def close(self) -> None:
        """Fail all open calls and close the connections."""
        ...


_Call = tuple[bytes, asyncio.Future[Reply]]
"""A packed command, and the future of its reply."""
_payload_of = itemgetter(0)


class _BrokenRead(BusUnavailable):
    """The connection for blocking reads broke during one."""


class _Connection(asyncio.Protocol):
    """One socket: sends bytes, and matches replies to calls in order. redis-py has connected and authenticated it."""

    def __init__(self, made: AbstractConnection) -> None:
        """Take the socket of a connection. Raises ConnectionResetError if the server has closed it in the meantime."""
        reader, writer = made._reader, made._writer
        assert reader is not None
        assert writer is not None
        made._reader = made._writer = None  # otherwise it would warn that nobody closed it
        self._writer = writer  # keep it: its deletion closes the socket
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
            raise ConnectionResetError("the server closed the connection")

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self.waiting
        refused: list[_Call] | None = None
        reader.feed(data)
        self.heard_at = self._loop.time()
        while (reply := reader.gets()) is not False:
            if not waiting:
                continue
            if isinstance(reply, ServerError):
                error = str(reply)
                if error.startswith(_OF_ONE_SLOT):
                    self.moved = reply
                    if refused is None:
                        refused = []
                    refused.append(waiting.popleft())
                    continue
                if error.startswith(_ELSEWHERE):
                    self.moved = reply
                    break
                _, future = waiting.popleft()
                if not future.done():
                    future.set_exception(reply)
                continue
            _, future = waiting.popleft()
            if not future.done():
                future.set_result(reply)
        if refused is not None:
            waiting.extendleft(reversed(refused))
        if self.moved is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, calls: list[_Call]) -> None:
        if not self.waiting:
            self.heard_at = self._loop.time()
        self.waiting.extend(calls)
        self.transport.write(b"".join(map(_payload_of, calls)))

    def abort(self) -> None:
        self.transport.abort()
        if not self.lost.done():
            self.lost.set_result(None)


class RespTransport:
    """One client of a server: a connection for calls and one for blocking reads, both with reconnects."""

    def __init__(
        self,
        address: BrokerAddress,
        *,
        silence_seconds: float = SILENCE_SECONDS,
        why_lost: Callable[[], str] = lambda: "",
    ) -> None:
        """`why_lost` says why the server will never come back; empty while it may."""
        self._address = address
        self._why_lost = why_lost
        self._lost: BusLost | None = None
        self._silence_seconds = silence_seconds
        # In a Cluster, calls and reads may have keys on different servers.
        self._calls_to, self._reads_from = Connector(address), Connector(address)
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._unsent: list[_Call] = []
        self._flushing = False
        self._closed = False
        self.reconnects = 0
        self._keeper: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._blocking: _Connection | None = None
        self._last_error: Exception | None = None

    async def connect(self, timeout: float | None = CONNECT_TIMEOUT_SECONDS) -> None:
        """Wait for the first connection. Raises BusUnavailable with the cause after `timeout` seconds.

        Raises it sooner if the server refuses (a wrong password, an unknown database). Time in which the event loop was
        blocked does not count: the server may have replied long ago.
        """
        self._start()
        left = math.inf if timeout is None else timeout
        try:
            while left > 0 and not (self._connected.is_set() or self._lost or _refuses(self._last_error)):
                step = min(left, CONNECT_SLICE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(step):
                        await self._connected.wait()
                left -= step
        except asyncio.CancelledError:
            await self.close()  # the cancelled caller never got the transport, so it cannot close it
            raise
        if not self._connected.is_set():
            cause = self._last_error
            await self.close()
            if self._lost is not None:
                raise self._lost
            raise BusUnavailable(f"no answer from {self._address}: {_reason(cause)}") from cause

    def call(self, *args: Argument) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._closed:
            future.set_exception(BusUnavailable(f"the connection to {self._address} is closed"))
            return future
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        self._unsent.append((_pack(args), future))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        elif len(self._unsent) >= WRITTEN_AT_ONCE:
            self._flush()
        return future

    async def blocking(self, *args: Argument) -> Reply:
        connection = self._blocking
        if connection is None or connection.lost.done():
            connection = self._blocking = await self._open_for_reads()
        future: asyncio.Future[Reply] = self._loop.create_future()
        connection.send([(_pack(args), future)])
        # It may take its BLOCK time (0: forever), plus the allowed silence.
        block_ms = int(args[args.index("BLOCK") + 1]) if "BLOCK" in args else None
        patience = self._silence_seconds + (block_ms or 0) / 1000
        limit = None if block_ms == 0 else self._loop.call_later(patience, connection.abort)
        try:
            return await future
        except _BrokenRead:
            self._blocking = None
            self._reads_from.follow(connection.moved)
            raise
        except BaseException:
            # A cancelled reader must not leave a command behind: nobody would handle the entries that it reads.
            connection.abort()
            raise
        finally:
            if limit is not None:
                limit.cancel()

    async def _open_for_reads(self) -> _Connection:
        """Open a connection whose calls fail with it."""
        try:
            connection = _Connection(await self._reads_from.open())
        except (OSError, ServerError) as error:
            if why := self._why_lost():
                raise BusLost(why) from error
            raise BusUnavailable(f"no answer from {self._address}: {_reason(error)}") from error
        broken = _BrokenRead(f"the connection to {self._address} broke during a read")
        connection.lost.add_done_callback(lambda _: _fail(connection.waiting, broken))
        return connection

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        self._end()

    def _end(self) -> None:
        """Abort the connections and fail all calls, including later ones."""
        self._closed = True
        calls, self._unsent = list(self._unsent), []
        for connection in (self._connection, self._blocking):
            if connection is not None:
                calls.extend(connection.waiting)
                connection.abort()
        _fail(calls, BusUnavailable(f"the connection to {self._address} was closed"))

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
        try:
            await self._keep_open()
        except asyncio.CancelledError:
            # An event loop that ends cancels this task, and nobody calls close(): no call may wait for a reply now.
            self._end()
            raise

    async def _keep_open(self) -> None:
        """Keep a connection open. Calls without a reply go first over the next one."""
        from redis.backoff import DecorrelatedJitterBackoff  # here: the import takes 0.1 s

        # The only backoff of redis-py that may go on forever: the others compute powers of two until they overflow.
        backoff, after_refusal = (
            DecorrelatedJitterBackoff(BACKOFF_LAST_SECONDS, BACKOFF_FIRST_SECONDS) for _ in range(2)
        )
        failures = refusals = 0
        while not self._closed:
            try:
                connection = _Connection(await self._calls_to.open())
            except (OSError, ServerError) as error:
                self._last_error = error
                if why := self._why_lost():
                    self._lost = BusLost(why)
                    _fail(self._unsent, self._lost)
                    self._unsent = []
                    return
                failures += 1
                await asyncio.sleep(backoff.compute(failures))
                continue
            backoff.reset()
            failures = 0
            self.reconnects += self._connected.is_set()
            self._connection = connection
            self._connected.set()
            self._flush()
            opened_at = self._loop.time()
            await self._watch(connection)
            self._connection = None
            self._unsent[:0] = [call for call in connection.waiting if not call[1].done()]
            connection.waiting.clear()
            connection.abort()
            refusal = connection.moved
            self._calls_to.follow(refusal)
            if refusal is None or self._loop.time() - opened_at > STEADY_SECONDS:
                after_refusal.reset()
                refusals = 0
            # The server replies to the connection itself, so `open` does not fail. MOVED names the server that has the
            # key: calls whose keys are on two servers go to each in turn.
            if refusal is not None and not str(refusal).startswith("MOVED"):
                refusals += 1
                await asyncio.sleep(after_refusal.compute(refusals))

    async def _watch(self, connection: _Connection) -> None:
        """Return when the connection is lost, or has been silent for too long while calls wait."""
        while not connection.lost.done():
            await asyncio.wait((connection.lost,), timeout=self._silence_seconds / 4)
            if connection.waiting and self._loop.time() - connection.heard_at > self._silence_seconds:
                return


def _fail(calls: Iterable[_Call], error: BusUnavailable) -> None:
    for _, future in calls:
        if not future.done():
            future.set_exception(error)
            future.exception()  # no warning if nobody waits any more


def _refuses(error: BaseException | None) -> bool:
    """Return whether the server refuses the connection, so that waiting longer would not help."""
    return isinstance(error, ServerError) and not str(error).startswith(_ELSEWHERE)


def _reason(error: BaseException | None) -> str:
    if error is None or (isinstance(error, TimeoutError) and not str(error)):
        return "timed out"
    return str(error) or type(error).__name__


def text(item: Reply) -> str:
    """Return a text or a number as text."""
    return item.decode() if isinstance(item, bytes) else str(item)


def texts(reply: Reply) -> list[str]:
    return [text(item) for item in cast(list[Reply], reply)]


def fields(reply: Reply) -> dict[str, bytes]:
    """Return a hash, or any list of names and values, as a dict."""
    flat = cast(list[bytes], reply)
    return {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}


def position(entry: str) -> tuple[int, int]:
    """Return the sort key of a stream entry's id: milliseconds, then sequence number (0 if left out)."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
