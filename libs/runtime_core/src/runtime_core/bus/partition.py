"""One partition of a namespace: the base of all verbs of the bus.

It calls the functions, restores what a server has lost, and waits until an accepted command is on disk or on a replica,
if `WEFT_DURABILITY` requires it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar, cast

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.keys import (
    NAMESPACE_FORMAT,
    STATE_MANAGER,
    TRAJECTORY_RECORDER,
    Keys,
    group_of,
    namespace_settings,
)
from runtime_core.bus.library import library
from runtime_core.bus.namespace import server_info
from runtime_core.errors import ConfigurationError, Fenced, NotDurable, ServerError, is_temporary
from runtime_core.wire.contents import SentLists

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

LIBRARY_SECONDS = 30.0
"""How long a process that may not load functions waits for one that may."""
LIBRARY_LOOK_SECONDS = 0.1
INSIST_SECONDS = 30.0
"""How long a process retries to store the outcome of finished work while the broker cannot."""
DURABLE_SECONDS = 2.0
WAIT_SLICE_MS = 100
"""How long one WAIT blocks its connection, which also carries heartbeats: they are sent between two slices."""


class Partition:
    """One partition of a namespace, seen by one owner.

    `owner` names one life of this process: boot time and random digits, so that no name repeats. Every verb may raise
    `BusUnavailable`. Verbs that write for a delivery raise `Fenced` if the owner was declared dead.
    """

    def __init__(self, transport: Transport, keys: Keys, owner: str = "", *, durability: str = "fast") -> None:
        self.transport = transport
        self.keys = keys
        self.owner = owner
        self.durability = durability
        self.alive_until = 0.0
        """Until then (`time.monotonic`) nobody can declare this owner dead: one lease after its last heartbeat."""
        self.queued = 0
        """The last known number of tasks and calls that wait for their tenants' turns."""
        self._library = library()
        self._functions = self._library.functions
        self._base = keys.base.encode()
        self._sent_lists = SentLists()
        self._wide_commits = asyncio.Lock()
        self._sent_since = transport.reconnects
        self._wait_sent: asyncio.Future[Reply] | None = None
        """The latest WAIT or WAITAOF. While it has no reply, it covers every command that has one."""
        self._redis_on = -1
        """The number of the connection whose server is Redis although this user may not read its settings."""

    async def call(self, function: str, *args: Argument) -> Reply:
        """Call one function of the library. If its library or group is lost, recreate it and call once more."""
        try:
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)
        except ServerError as error:
            return await self.call_after(error, function, args)

    async def call_after(self, error: ServerError, function: str, args: tuple[Argument, ...]) -> Reply:
        """Do the same after a first call has failed with this error. Raises it if nothing was lost."""
        if not await self.repair(error):
            raise error
        return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)

    async def insist(self, function: str, *args: Argument) -> Reply:
        """Call a function that stores the outcome of finished work; retry for a while on a temporary error.

        Only this process knows the outcome: without the retries, another process would repeat the work.
        """
        try:
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)
        except ServerError as error:
            return await self.insist_after(error, function, args)

    async def insist_after(self, error: ServerError, function: str, args: tuple[Argument, ...]) -> Reply:
        """Do the same after a first call has failed with this error."""
        delay, left = 0.1, INSIST_SECONDS
        while True:
            if left <= 0 or not (is_temporary(error) or await self.repair(error)):
                raise error
            logger.warning("the broker cannot store the outcome of finished work now; trying again: %s", error)
            await asyncio.sleep(delay)
            left -= delay
            delay = min(1.0, delay * 2)
            try:
                return await self.call(function, *args)
            except ServerError as again:
                error = again

    async def repair(self, error: ServerError) -> bool:
        """Recreate what a flushed or failed-over server has lost. Return whether the error called for that."""
        said = str(error)
        if "Function not found" in said:
            await self.load_library()
            return True
        if "NOGROUP" in said or "no such key" in said:
            await self.make_groups(group_streams=())
            return True
        return False

    async def load_library(self) -> None:
        try:
            await self.transport.call("FUNCTION", "LOAD", self._library.source)
        except ServerError as error:
            if str(error).startswith("OOM"):
                raise ServerError(
                    "OOM: the broker's memory is full, and this release's functions are not loaded: raise maxmemory"
                ) from error
            if str(error).startswith("NOPERM"):
                await self._wait_for_library(error)
            elif "already exists" not in str(error):
                raise

    async def _wait_for_library(self, refused: ServerError) -> None:
        """Wait for a process that may load functions. This user may not, because others run them with more rights."""
        deadline = time.monotonic() + LIBRARY_SECONDS
        while not await self.transport.call("FUNCTION", "LIST", "LIBRARYNAME", self._library.name):
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"NOPERM: the broker lacks this release's functions, and this user may not load them"
                    f" ({refused}): start a state-manager or a trajectory-recorder of this release"
                ) from refused
            await asyncio.sleep(LIBRARY_LOOK_SECONDS)

    async def make_groups(self, group_streams: Iterable[str]) -> None:
        """Create the groups of these work streams and of the record stream. They start at 0, never at `$`."""
        wanted = [(self.keys.stream(stream), group_of(stream)) for stream in group_streams]
        wanted += [(self.keys.record, STATE_MANAGER), (self.keys.record, TRAJECTORY_RECORDER)]
        for key, group in wanted:
            await self.make_group(key, group)

    async def make_group(self, key: str, group: str) -> None:
        await make_group(self.transport, key, group)

    async def namespace_is_newer(self) -> bool:
        """Return whether a newer release has written to this namespace since it was opened."""
        stored = await self.transport.call("HGET", namespace_settings(self.keys.namespace), "format")
        return isinstance(stored, bytes) and int(stored) > NAMESPACE_FORMAT

    async def check_durability(self) -> None:
        """Raise ConfigurationError if the server cannot provide the configured durability."""
        if self.durability == "fast":
            return
        try:
            await self._wait(1)
        except ServerError as error:
            raise ConfigurationError(
                f"WEFT_DURABILITY={self.durability}: the server does not support it ({error}); fsync needs an "
                "append-only file and Redis 7.2 or Valkey, quorum needs a replica"
            ) from error
        if self.durability == "fsync" and (problem := await self._fsync_problem()):
            raise ConfigurationError(f"WEFT_DURABILITY=fsync: {problem}")

    async def make_durable(self, connection: int, *, wrote: bool, task: str = "") -> None:
        """Wait until the last command is on disk (`fsync`) or on a replica (`quorum`).

        `connection` is `transport.reconnects` from before the command was sent. `wrote` is False if the command found
        its work already done. Raises NotDurable without a confirmation within two seconds.
        """
        if self.durability == "fast":
            return
        try:
            if not wrote:
                # WAIT and WAITAOF only cover writes of their own connection, and this one has written nothing.
                await self.call("write_marker")
            confirmed = await self._confirmed()
            problem = await self._fsync_problem() if confirmed and self.durability == "fsync" else ""
        except ServerError as error:
            raise NotDurable(
                "durability", f"the server does not support {self.durability}: {error}", 1.0, task
            ) from error
        if self.transport.reconnects != connection:
            # On a new connection, perhaps to another server, WAIT returns immediately: nothing was written on it.
            raise NotDurable("durability", "the connection broke before the wait was over; send it again", 0.0, task)
        if problem:
            raise NotDurable("durability", problem, 1.0, task)
        if not confirmed:
            raise NotDurable(
                "durability",
                f"not confirmed as {self.durability} within {DURABLE_SECONDS:g} s: check that the broker's "
                f"{'replicas are connected' if self.durability == 'quorum' else 'disk keeps up'}, and send it again",
                1.0,
                task,
            )

    async def _confirmed(self) -> bool:
        deadline = time.monotonic() + DURABLE_SECONDS
        while not await self._wait(WAIT_SLICE_MS):
            if time.monotonic() >= deadline:
                return False
        return True

    async def _wait(self, timeout_ms: int) -> bool:
        """Wait up to `timeout_ms`, together with the other commands of this connection that wait.

        A wait of each would block the connection in turn, and hold up the heartbeats behind all of them.
        """
        fsync = self.durability == "fsync"
        sent = self._wait_sent
        if sent is None or sent.done():
            command = ("WAITAOF", 1, 0, timeout_ms) if fsync else ("WAIT", 1, timeout_ms)
            self._wait_sent = sent = asyncio.ensure_future(self.transport.call(*command))
        reply = await asyncio.shield(sent)
        return cast(list[int], reply)[0] >= 1 if fsync else cast(int, reply) >= 1

    async def _fsync_problem(self) -> str:
        """Return why WAITAOF guarantees nothing on this server, or an empty string if it does.

        Under `everysec`, Valkey 8.1 and 9 reply to WAITAOF before they call fdatasync. Redis waits, so WAITAOF is
        enough there even if this user may not read the setting.
        """
        if self._redis_on == self.transport.reconnects:
            return ""
        try:
            reply = cast(list[Reply], await self.transport.call("CONFIG", "GET", "appendfsync"))
        except ServerError as error:
            if await self._is_redis():
                self._redis_on = self.transport.reconnects
                return ""
            return f"cannot read the server's appendfsync ({error}); grant the broker's user +config|get"
        policy = cast(bytes, reply[1]).decode() if len(reply) == 2 else "unknown"
        if policy == "always":
            return ""
        return f"the server's appendfsync is {policy}; set it to always (CONFIG SET appendfsync always)"

    async def _is_redis(self) -> bool:
        """Return whether INFO shows that the server is Redis, and not one of its forks."""
        info = await server_info(self.transport, "server")
        # Valkey reports itself as Redis 7.2, and adds its own name.
        return "redis_version" in info and info.keys().isdisjoint({"server_name", "valkey_version"})

    def _fence(self, reply: Reply) -> None:
        if reply == b"FENCED":
            raise Fenced(f"{self.owner} was declared dead")


async def repeat_after_reconnect(command: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a command, and repeat it whenever the connection breaks during the wait for durability."""
    while True:
        try:
            return await command()
        except NotDurable as error:
            if error.retry_after_seconds:
                raise


async def make_group(transport: Transport, key: str, group: str) -> None:
    """Create a group that starts at 0, and its stream, unless it exists."""
    try:
        await transport.call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    except ServerError as error:
        if str(error).startswith("BUSYGROUP"):
            return
        # At its memory limit a server replies OOM even if the group exists.
        if not str(error).startswith("OOM") or not await _has_group(transport, key, group):
            raise


async def _has_group(transport: Transport, key: str, group: str) -> bool:
    try:
        groups = cast(list[list[Reply]], await transport.call("XINFO", "GROUPS", key))
    except ServerError:  # the stream does not exist either
        return False
    return any(flat[flat.index(b"name") + 1] == group.encode() for flat in groups)
