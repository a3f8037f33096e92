"""Waits until an accepted command is on disk or on a replica, if `WEFT_DURABILITY` requires it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from runtime_core.bus.connection import Reply
from runtime_core.bus.namespace import server_info
from runtime_core.bus.partition import Partition
from runtime_core.errors import ConfigurationError, Rejected, ServerError

Answer = TypeVar("Answer")

DURABLE_SECONDS = 2.0
WAIT_SLICE_MS = 100
"""How long one WAIT blocks its connection, which also carries heartbeats: they are sent between two slices."""


class NotDurable(Rejected):
    """The command took effect, but the broker may still lose it. Send the same command again to wait again.

    `retry_after_seconds` is 0 if the connection broke during the wait.
    """


async def repeat_after_reconnect(command: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a command, and repeat it whenever the connection breaks during the wait for durability."""
    while True:
        try:
            return await command()
        except NotDurable as error:
            if error.retry_after_seconds:
                raise


class DurabilityVerbs(Partition):
    """The base of the verbs whose commands Weft acknowledges as accepted."""

    _wait_sent: asyncio.Future[Reply] | None = None
    """The latest WAIT or WAITAOF. While it has no reply, it covers every command that has one."""

    _redis_on = -1
    """The number of the connection whose server was found to be Redis although this user may not read its settings."""

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
            # On a new connection WAIT returns immediately: nothing was written on it, and the server may be another.
            raise NotDurable("durability", "the connection broke before the wait was over; send it again", 0.0, task)
        if problem:
            raise NotDurable("durability", problem, 1.0, task)
        if not confirmed:
            raise NotDurable(
                "durability",
                f"not confirmed as {self.durability} within {DURABLE_SECONDS:g} s; send it again",
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
