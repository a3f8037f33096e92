"""An owner: one incarnation of a process on the broker, and the heartbeat that keeps it alive."""

from __future__ import annotations

import os
import secrets
import socket
import time

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced


def incarnation(service: str) -> str:
    """A name that is never reused: service, host, process, boot time and a random part."""
    return f"{service}@{socket.gethostname()}.{os.getpid()}.{time.time_ns() // 1_000_000:x}.{secrets.token_hex(4)}"


class Owner:
    """Keeps one owner alive on a partition. `beat` is called by the loop that runs the handlers, so that a loop
    that hangs falls silent. `silent_seconds` is how long ago the broker last heard of it."""

    def __init__(self, bus: EventBus, service: str, lease_seconds: float) -> None:
        self._bus = bus
        self._service = service
        self._lease_ms = int(lease_seconds * 1000)
        self._since = ""
        self._told: frozenset[str] = frozenset()
        self._heard = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard

    @property
    def at_ms(self) -> int:
        """The broker's time, in epoch milliseconds, up to which it has told this owner of stopped tasks."""
        return int(self._since or 0)

    async def enter(self) -> None:
        """Take a new name and make it known, before anything is read under it."""
        self._bus.owner = incarnation(self._service)
        since, _, _ = await self._bus.beat(self._lease_ms, True, self._since)
        self._since = self._since or since
        self._heard = time.monotonic()

    async def beat(self) -> list[str]:
        """Report that this owner lives. Return the tasks that ended early since the last beat.

        Raises Fenced if it was declared dead, also by itself: others may have adopted from an owner that was silent for
        a lease, so it must not write under its old name.
        """
        try:
            self._since, stopped, _ = await self._bus.beat(self._lease_ms, False, self._since)
        except Fenced:
            self._heard = time.monotonic()
            raise
        self._heard = time.monotonic()
        # The broker reports some of them twice.
        told, self._told = self._told, frozenset(stopped)
        return [task for task in stopped if task not in told]
