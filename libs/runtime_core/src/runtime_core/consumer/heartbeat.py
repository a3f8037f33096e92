"""An owner's heartbeat, which keeps its deliveries, and the ended tasks that the heartbeat reports."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Iterable

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced

MAX_ENDED_TASKS = 10_000
ENDED_TASK_KEPT_MS = 600_000
"""How long the broker remembers a stopped task (`stop_running` in shared/ends.lua)."""


def incarnation(service: str) -> str:
    """Return a name that is never reused: service, host, process, start time and a random part."""
    return f"{service}@{socket.gethostname()}.{os.getpid()}.{time.time_ns() // 1_000_000:x}.{secrets.token_hex(4)}"


class Owner:
    """Keeps one owner alive on a partition.

    The event loop that runs the handlers calls `beat`, so a blocked loop sends no heartbeat.
    """

    def __init__(self, bus: EventBus, service: str, lease_seconds: float) -> None:
        self._bus = bus
        self._service = service
        self._lease_ms = int(lease_seconds * 1000)
        self._since = ""
        self._reported: frozenset[str] = frozenset()
        self._heard = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """How long ago the broker last answered a heartbeat."""
        return time.monotonic() - self._heard

    @property
    def at_ms(self) -> int:
        """The broker's time, in epoch milliseconds, up to which it has reported stopped tasks to this owner."""
        return int(self._since or 0)

    async def enter(self) -> None:
        """Take a new name and register it before anything is read under it."""
        self._bus.owner = incarnation(self._service)
        since, _, _ = await self._bus.beat(self._lease_ms, True, self._since)
        self._since = self._since or since
        self._heard = time.monotonic()

    async def beat(self) -> list[str]:
        """Send a heartbeat. Return the tasks that ended early since the last one.

        Raises Fenced if this owner was declared dead, or has itself been silent for a lease: others may have adopted
        its deliveries, so it must not write under its old name.
        """
        try:
            self._since, stopped, _ = await self._bus.beat(self._lease_ms, False, self._since)
        except Fenced:
            self._heard = time.monotonic()
            raise
        self._heard = time.monotonic()
        # Two heartbeats may report the same task.
        before, self._reported = self._reported, frozenset(stopped)
        return [task for task in stopped if task not in before]


class EndedTasks:
    """Tasks that were cancelled or failed: their queued work does not start. Bounded by count and age.

    Times are the broker's, in epoch milliseconds.
    """

    def __init__(self, most: int = MAX_ENDED_TASKS) -> None:
        self._most = most
        self.ended_ms: OrderedDict[str, int] = OrderedDict()
        """When each task ended, oldest first."""
        self.since_ms = 0
        """Tasks that ended before this time may be missing here: ask the broker about entries that are this old."""

    def add_reported(self, tasks: Iterable[str], now_ms: int, since_ms: int) -> None:
        """Add the tasks that a heartbeat reported: those that ended since `since_ms`."""
        if now_ms - since_ms > ENDED_TASK_KEPT_MS:
            self.since_ms = max(self.since_ms, now_ms - ENDED_TASK_KEPT_MS)  # the broker may have forgotten some
        for task in tasks:
            self._add(task, now_ms)
        while self.ended_ms and next(iter(self.ended_ms.values())) <= now_ms - ENDED_TASK_KEPT_MS:
            self._drop_oldest()

    def add_remembered(self, found: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Add all tasks that the broker remembers: (task, end time), oldest first."""
        self.since_ms = max(self.since_ms, now_ms - ENDED_TASK_KEPT_MS)
        for task, ended_ms in found:
            self._add(task, ended_ms)

    def forget(self, task: str) -> None:
        """Remove a task that was reopened."""
        self.ended_ms.pop(task, None)

    def _add(self, task: str, ended_ms: int) -> None:
        self.ended_ms.pop(task, None)
        self.ended_ms[task] = ended_ms
        if len(self.ended_ms) > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.since_ms = max(self.since_ms, self.ended_ms.popitem(last=False)[1])
