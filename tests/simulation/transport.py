"""A transport whose calls wait until the scheduler executes them, and whose connection breaks on request."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from runtime_core.bus.connection import Argument, Reply
from runtime_core.errors import BusUnavailable, ServerError

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.scheduler import Scheduler


def position(entry: bytes) -> tuple[int, int]:
    """An entry's place in its stream, to compare."""
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number or 0)


class Call:
    """One command that waits for its execution, or for its reply."""

    __slots__ = ("args", "error", "executed", "future", "reply")

    def __init__(self, args: tuple[Argument, ...], future: asyncio.Future[Reply]) -> None:
        self.args = args
        self.future = future
        self.executed = False
        self.reply: Reply = None
        self.error: ServerError | None = None

    def answer(self) -> None:
        """Give the caller its reply."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.reply)


class Read(Call):
    """A blocking read: executed once its streams have an entry for it."""

    __slots__ = ("after", "block_seconds", "held", "keys", "plain", "transport")

    def __init__(self, transport: SimTransport, args: tuple[Argument, ...], future: asyncio.Future[Reply]) -> None:
        super().__init__(args, future)
        self.transport = transport
        self.held = False
        """Executed, and its reply is on its way."""
        at = args.index("STREAMS") + 1
        count = (len(args) - at) // 2
        self.keys = [str(key) for key in args[at : at + count]]
        self.after = None if args[at + count] == ">" else position(str(args[at + count]).encode())
        """Only entries after this one; None: those that its group has not delivered."""

        at = args.index("BLOCK")
        self.plain = args[:at] + args[at + 2 :]
        """The command without its BLOCK."""
        self.block_seconds = float(args[at + 1]) / 1000


class SimTransport:
    """One client of the broker, with a connection for calls and one for blocking reads, as `RespTransport` has them."""

    def __init__(self, scheduler: Scheduler, process: Process, number: int) -> None:
        self._scheduler = scheduler
        self.process = process
        self.name = f"{process.name}/{number}"
        self.waiting: deque[Call] = deque()
        """Calls in order. The first ones may be executed already, with their replies on their way."""
        self.held_until = 0.0
        """Until then no reply comes: a slow network, or a connection that is made again."""
        self.closed = False
        self.base = ""
        """What the keys begin with that it is used for, if they belong to one partition."""
        self._reconnects = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def reconnects(self) -> int:
        return self._reconnects

    def call(self, *args: Argument) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._scheduler.loop.create_future()
        if self.closed:
            future.set_exception(BusUnavailable(f"{self!r} is closed"))
            return future
        if not self.process.dead:
            self.waiting.append(Call(args, future))
            self._scheduler.active[self] = None
        return future

    async def blocking(self, *args: Argument) -> Reply:
        if self.closed:
            raise BusUnavailable(f"{self!r} is closed")
        loop = self._scheduler.loop
        future: asyncio.Future[Reply] = loop.create_future()
        if self.process.dead:
            return await future
        read = Read(self, args, future)
        self._scheduler.reads[read] = None
        timer = loop.call_later(read.block_seconds, self._give_up, read)
        try:
            return await future
        except asyncio.CancelledError:
            self._scheduler.cancelled_read(read)
            raise
        finally:
            timer.cancel()
            self._scheduler.reads.pop(read, None)

    def _give_up(self, read: Read) -> None:
        if not read.future.done() and not read.held:
            read.future.set_result(None)

    def break_off(self, seconds: float) -> None:
        """Lose the connection and open it again: unanswered calls are sent again, a waiting read fails."""
        self._reconnects += 1
        self.held_until = self._scheduler.loop.now + seconds
        for call in self.waiting:
            call.executed = False
        for read in [read for read in self._scheduler.reads if read.transport is self]:
            if not read.future.done():
                read.future.set_exception(BusUnavailable("the connection broke during a read"))

    def answer_executed(self) -> None:
        """Give out the replies that have arrived, in order."""
        while self.waiting and self.waiting[0].executed and self.held_until <= self._scheduler.loop.now:
            self.waiting.popleft().answer()

    def interrupt(self) -> None:
        """Break the waiting blocking read, if there is one."""
        for read in [read for read in self._scheduler.reads if read.transport is self]:
            if not read.future.done():
                read.future.set_exception(BusUnavailable("the read was interrupted"))

    async def close(self) -> None:
        self.closed = True
        for call in self.waiting:
            if not call.future.done():
                call.future.set_exception(BusUnavailable(f"{self!r} was closed"))
                call.future.exception()
        self.waiting.clear()
        self._scheduler.active.pop(self, None)
