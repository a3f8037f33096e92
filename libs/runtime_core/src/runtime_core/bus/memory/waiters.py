"""Blocked reads of the in-process broker: who waits for which stream, and in which order they are served."""

from __future__ import annotations

import asyncio

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.groups import GroupCommands, Read
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.errors import ServerError


class Blocked:
    """One read that waits; `future` gets its reply or its error."""

    __slots__ = ("future", "request")

    def __init__(self, request: Read, future: asyncio.Future[Reply]) -> None:
        self.request = request
        self.future = future


class Waiters:
    """Readers by key, first come first served.

    A reader that was cancelled is passed over before anything is read for it, so that no entry is delivered to
    nobody.
    """

    def __init__(self, keyspace: Keyspace, groups: GroupCommands) -> None:
        self._keys = keyspace
        self._groups = groups
        # Dicts for their order: a set would serve in any.
        self._waiting: dict[bytes, dict[Blocked, None]] = {}

    def add(self, blocked: Blocked) -> None:
        """Let a read wait until one of its streams changes."""
        for key in blocked.request.keys:
            self._waiting.setdefault(key, {})[blocked] = None
            self._keys.watched.add(key)

    def forget(self, blocked: Blocked) -> None:
        """Let a read wait no longer; nothing happens if it does not."""
        for key in blocked.request.keys:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(blocked, None)
                if not waiting:
                    del self._waiting[key]
                    self._keys.watched.discard(key)

    def serve(self) -> None:
        """Try the reads that wait for keys which became ready."""
        ready = self._keys.ready
        while ready:
            for blocked in list(self._waiting.get(ready.pop(0), ())):
                if blocked.future.done():
                    self.forget(blocked)
                    continue
                try:
                    reply = self._groups.read(blocked.request)
                except ServerError as error:
                    self.forget(blocked)
                    blocked.future.set_exception(error)
                    continue
                if reply is not None:
                    self.forget(blocked)
                    blocked.future.set_result(reply)
