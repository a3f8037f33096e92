"""One partition of a namespace and its functions: what all verbs of the bus stand on."""

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
from runtime_core.record.shortening import ToldLists

logger = logging.getLogger(__name__)

LIBRARY_SECONDS = 30.0
"""How long a process without the right to load functions waits for one that has it."""
LIBRARY_LOOK_SECONDS = 0.1
INSIST_SECONDS = 30.0
"""How long a process keeps the outcome of finished work while the broker cannot store it."""


class Partition:
    """One partition of a namespace, seen by one owner.

    `owner` is this process's incarnation: boot time and random, so that no name comes back. Every verb may raise
    `BusUnavailable`; those that write for a delivery raise `Fenced` where the owner was declared dead.
    """

    def __init__(self, transport: Transport, keys: Keys, owner: str = "", *, durability: str = "fast") -> None:
        self.transport = transport
        self.keys = keys
        self.owner = owner
        self.durability = durability
        self.alive_until = 0.0
        """Until when (`time.monotonic`) nobody can have declared this owner dead: a lease after its last heartbeat."""
        self.queued = 0
        """How many tasks waited for their tenants' turns when the broker was asked last."""
        self._library = library()
        self._functions = self._library.functions
        self._base = keys.base.encode()
        self._told = ToldLists()
        self._told_since = transport.reconnects

    async def call(self, function: str, *args: Argument) -> Reply:
        """Call one function of the library; a lost library or group is made again, once."""
        try:
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)
        except ServerError as error:
            if not await self.repair(error):
                raise
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)

    async def insist(self, function: str, *args: Argument) -> Reply:
        """As `call`, for the outcome of work that was done: a temporary error is waited out for a while.

        To give up at once would do the work again, since only this process knows its outcome.
        """
        delay, left = 0.1, INSIST_SECONDS
        while True:
            try:
                return await self.call(function, *args)
            except ServerError as error:
                if left <= 0 or not is_temporary(error):
                    raise
                logger.warning("the broker cannot store the outcome of finished work now; trying again: %s", error)
            await asyncio.sleep(delay)
            left -= delay
            delay = min(1.0, delay * 2)

    async def repair(self, error: ServerError) -> bool:
        """Make again what a flushed or failed-over server has lost. False: this error is something else."""
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
        """Wait for somebody who may load functions: this user may not, since others run them with more rights."""
        deadline = time.monotonic() + LIBRARY_SECONDS
        while not await self.transport.call("FUNCTION", "LIST", "LIBRARYNAME", self._library.name):
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"NOPERM: this release's functions are not on the broker, and this user may not load them"
                    f" ({refused}): start a state-manager or a trajectory-recorder of this release"
                ) from refused
            await asyncio.sleep(LIBRARY_LOOK_SECONDS)

    async def make_groups(self, group_streams: Iterable[str]) -> None:
        """Make the groups of these work streams and of the record stream, from 0: never from `$`."""
        wanted = [(self.keys.stream(stream), group_of(stream)) for stream in group_streams]
        wanted += [(self.keys.record, STATE_MANAGER), (self.keys.record, TRAJECTORY_RECORDER)]
        for key, group in wanted:
            await self.make_group(key, group)

    async def make_group(self, key: str, group: str) -> None:
        await make_group(self.transport, key, group)

    async def namespace_is_newer(self) -> bool:
        """Whether a newer release has written this namespace since it was opened."""
        stored = await self.transport.call("HGET", namespace_settings(self.keys.namespace), "format")
        return isinstance(stored, bytes) and int(stored) > NAMESPACE_FORMAT

    def _fence(self, reply: Reply) -> None:
        if reply == b"FENCED":
            raise Fenced(f"{self.owner} was declared dead")


async def make_group(transport: Transport, key: str, group: str) -> None:
    """Make a group where it is missing, from 0, and its stream with it."""
    try:
        await transport.call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    except ServerError as error:
        if str(error).startswith("BUSYGROUP"):
            return
        # At its memory limit a server says this of a group that is there, too.
        if not str(error).startswith("OOM") or not await _has_group(transport, key, group):
            raise


async def _has_group(transport: Transport, key: str, group: str) -> bool:
    try:
        groups = cast(list[list[Reply]], await transport.call("XINFO", "GROUPS", key))
    except ServerError:  # not even the stream
        return False
    return any(flat[flat.index(b"name") + 1] == group.encode() for flat in groups)
