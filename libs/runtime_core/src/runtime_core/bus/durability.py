"""Waits until an accepted command is on disk or on a replica, where `WEFT_DURABILITY` asks for it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from runtime_core.bus.connection import Reply
from runtime_core.bus.partition import Partition
from runtime_core.bus.values import NotDurable
from runtime_core.errors import ConfigurationError, ServerError

Answer = TypeVar("Answer")

WAIT_SECONDS = 2.0
SLICE_MS = 500
"""A WAIT blocks its connection, which carries heartbeats too: they go out between two slices."""


async def repeat_after_reconnect(command: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a command again as long as its connection breaks while it waits to be durable."""
    while True:
        try:
            return await command()
        except NotDurable as error:
            if error.retry_after_seconds:
                raise


class DurabilityVerbs(Partition):
    """What the verbs share that clients call and that are answered as accepted."""

    _redis_on = -1
    """The connection on which a server that keeps its settings to itself was found to be Redis."""

    async def check_durability(self) -> None:
        """Raise ConfigurationError where the server cannot promise the durability that clients wait for."""
        if self.durability == "fast":
            return
        try:
            await self._wait(1)
        except ServerError as error:
            raise ConfigurationError(
                f"WEFT_DURABILITY={self.durability}: the server cannot promise it ({error}); fsync needs an "
                "append-only file and Redis 7.2 or Valkey, quorum a replica"
            ) from error
        if self.durability == "fsync" and (problem := await self._fsync_problem()):
            raise ConfigurationError(f"WEFT_DURABILITY=fsync: {problem}")

    async def make_durable(self, connection: int, *, wrote: bool, task: str = "") -> None:
        """Wait until the command that was just answered is on disk (`fsync`) or on a replica (`quorum`).

        `connection` is `transport.reconnects` from before the command was sent. `wrote` is False where the command
        found its work done already. Raises NotDurable where nothing is confirmed within two seconds.
        """
        if self.durability == "fast":
            return
        try:
            if not wrote:
                # WAIT and WAITAOF cover the writes of their own connection only, and this one has written nothing.
                await self.call("touch")
            confirmed = await self._confirmed()
            problem = await self._fsync_problem() if confirmed and self.durability == "fsync" else ""
        except ServerError as error:
            raise NotDurable(
                "durability", f"the server cannot promise {self.durability}: {error}", 1.0, task
            ) from error
        if self.transport.reconnects != connection:
            # On a new connection WAIT answers at once: nothing was written there, perhaps not even on this server.
            raise NotDurable("durability", "the connection broke before the wait was over; send it again", 0.0, task)
        if problem:
            raise NotDurable("durability", problem, 1.0, task)
        if not confirmed:
            raise NotDurable(
                "durability", f"not confirmed as {self.durability} within {WAIT_SECONDS:g} s; send it again", 1.0, task
            )

    async def _confirmed(self) -> bool:
        deadline = time.monotonic() + WAIT_SECONDS
        while not await self._wait(SLICE_MS):
            if time.monotonic() >= deadline:
                return False
        return True

    async def _wait(self, timeout_ms: int) -> bool:
        if self.durability == "fsync":
            return cast(list[int], await self.transport.call("WAITAOF", 1, 0, timeout_ms))[0] >= 1
        return cast(int, await self.transport.call("WAIT", 1, timeout_ms)) >= 1

    async def _fsync_problem(self) -> str:
        """Why WAITAOF promises nothing on this server; empty where it does.

        Under `everysec` Valkey 8.1 and 9 answer WAITAOF before they have called fdatasync. Redis waits: its WAITAOF
        is enough where this user may not read the setting.
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
        """Whether this is Redis, as far as this user may know, and none of its descendants."""
        try:
            said = cast(bytes, await self.transport.call("INFO", "server"))
        except ServerError:
            return False
        # Valkey calls itself Redis 7.2 and gives its own name besides.
        return b"redis_version:" in said and b"server_name:" not in said and b"valkey_version:" not in said
