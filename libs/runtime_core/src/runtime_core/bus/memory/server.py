"""The broker inside this process (`memory://`): what the bus needs of Redis 7.0, and a client of it.

Reading order of the files beside this one: `memory_keyspace` (keys and their types), `memory_streams` and
`memory_groups` (streams and consumer groups), `memory_lua` (functions), `memory_waiters` (blocking reads).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.memory.arguments import print_lua_number
from runtime_core.bus.memory.functions import FunctionCommands
from runtime_core.bus.memory.groups import GroupCommands, Read
from runtime_core.bus.memory.hashes import HashCommands
from runtime_core.bus.memory.keys import KeyCommands
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.bus.memory.lists import ListCommands
from runtime_core.bus.memory.replies import Args, Command, shown, wrong_arity
from runtime_core.bus.memory.sets import SetCommands
from runtime_core.bus.memory.sorted_sets import SortedSetCommands
from runtime_core.bus.memory.stream_commands import StreamCommands
from runtime_core.bus.memory.strings import StringCommands
from runtime_core.bus.memory.waiters import Blocked, Waiters
from runtime_core.errors import BusUnavailable, ServerError


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryServer:
    """A single-process store that speaks the part of Redis 7.0 that the bus needs, functions in Lua included.

    It belongs to one thread. `time_ms` gives milliseconds since the epoch; entry ids, expiry and idle times follow
    it. How long a blocking read waits is the event loop's time.
    """

    def __init__(self, *, time_ms: Callable[[], int] = _wall_clock_ms) -> None:
        self._time_ms = time_ms
        self._keyspace = Keyspace()
        self._groups = GroupCommands(self._keyspace)
        self._waiters = Waiters(self._keyspace, self._groups)
        self._commands: dict[bytes, Command] = {}
        self._functions = FunctionCommands(self._commands)
        for family in (
            KeyCommands(self._keyspace),
            StringCommands(self._keyspace),
            HashCommands(self._keyspace),
            ListCommands(self._keyspace),
            SetCommands(self._keyspace),
            SortedSetCommands(self._keyspace),
            StreamCommands(self._keyspace),
            self._groups,
            self._functions,
        ):
            self._commands.update(family.commands())

    def execute(self, *args: Argument) -> Reply:
        """Run one command and answer at once, also where it says BLOCK.

        The reply has the raw shape of RESP2: bytes, int, None or a list. Raises ServerError with the text of the
        error reply.
        """
        name, *words = args
        command, checked = self._understand(name, words)
        return self._run(command.handler, checked)

    def read_or_block(self, future: asyncio.Future[Reply], *args: Argument) -> Blocked | None:
        """Run a command; an XREAD or XREADGROUP with BLOCK that finds nothing waits.

        `future` gets the reply: at once, and None is returned; or later, and what waits is returned. A caller that
        loses its patience gives it to `forget`. Raises ServerError as `execute`.
        """
        name, *words = args
        upper = _encoded(name).upper()
        if upper not in (b"XREAD", b"XREADGROUP"):
            future.set_result(self.execute(*args))
            return None
        _, checked = self._understand(name, words)
        request: Read | None = None

        def read(args: Args) -> Reply:
            nonlocal request
            request = self._groups.understand(args, grouped=upper == b"XREADGROUP")
            return self._groups.read(request)

        reply = self._run(read, checked)
        if reply is not None or request is None or request.block_ms is None:
            future.set_result(reply)
            return None
        blocked = Blocked(request, future)
        self._waiters.add(blocked)
        return blocked

    def forget(self, blocked: Blocked) -> None:
        """Let a read wait no longer."""
        self._waiters.forget(blocked)

    def flush(self, drop_functions: bool = False) -> None:
        """Drop all keys, and the function libraries too if told."""
        self._keyspace.clear()
        if drop_functions:
            self._functions.clear()
        self._waiters.serve()

    def _understand(self, name: Argument, words: list[Argument]) -> tuple[Command, Args]:
        key = name if type(name) is bytes else _encoded(name)
        command = self._commands.get(key) or self._commands.get(key.upper())
        args = tuple([word if type(word) is bytes else _encoded(word) for word in words])
        if command is None:
            beginning = "".join(f"'{shown(word)}' " for word in args[:20])
            raise ServerError(f"ERR unknown command '{shown(key)}', with args beginning with: {beginning}")
        if not command.least <= len(args) <= command.most:
            raise wrong_arity(shown(key).lower())
        return command, args

    def _run(self, handler: Callable[[Args], Reply], args: Args) -> Reply:
        self._keyspace.now_ms = self._time_ms()
        try:
            return handler(args)
        finally:
            # Also after an error: what a script did before it stays, and others may wait for that.
            if self._keyspace.ready:
                self._waiters.serve()


class MemoryTransport:
    """One client of a MemoryServer: the same promises as a connection to a server, without the connection."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._blocked: set[Blocked] = set()
        self._closed = False

    @property
    def reconnects(self) -> int:
        """There is no connection to lose."""
        return 0

    def call(self, *args: Argument) -> asyncio.Future[Reply]:
        """Run one command now; the future is answered, with a ServerError for an error reply."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(_closed())
            return future
        try:
            future.set_result(self._server.execute(*args))
        except ServerError as error:
            future.set_exception(error)
        return future

    async def blocking(self, *args: Argument) -> Reply:
        """Run a command; an XREAD or XREADGROUP with BLOCK waits for data, and gives None when its time is over."""
        if self._closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        blocked = self._server.read_or_block(future, *args)
        if blocked is None:
            return future.result()
        timer = None
        if blocked.request.block_ms:
            timer = loop.call_later(blocked.request.block_ms / 1000, _give_up, future)
        self._blocked.add(blocked)
        try:
            return await future
        finally:
            self._blocked.discard(blocked)
            self._server.forget(blocked)
            if timer is not None:
                timer.cancel()

    async def close(self) -> None:
        """End what waits with BusUnavailable; later calls end so too."""
        self._closed = True
        for blocked in self._blocked:
            if not blocked.future.done():
                blocked.future.set_exception(_closed())


def _give_up(future: asyncio.Future[Reply]) -> None:
    if not future.done():
        future.set_result(None)


def _closed() -> BusUnavailable:
    return BusUnavailable("this client of the in-process broker is closed; open another one")


def _encoded(word: Argument) -> bytes:
    if isinstance(word, bytes):
        return word
    if isinstance(word, str):
        return word.encode()
    return print_lua_number(word)
