"""One partition of a namespace and its functions: the base of all verbs of the bus."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import cast

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
from runtime_core.errors import Fenced, ServerError, is_temporary
from runtime_core.wire.contents import SentLists

logger = logging.getLogger(__name__)

LIBRARY_SECONDS = 30.0
"""How long a process that may not load functions waits for one that may."""
LIBRARY_LOOK_SECONDS = 0.1
INSIST_SECONDS = 30.0
"""How long a process retries to store the outcome of finished work while the broker cannot."""


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

    def _fence(self, reply: Reply) -> None:
        if reply == b"FENCED":
            raise Fenced(f"{self.owner} was declared dead")


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
