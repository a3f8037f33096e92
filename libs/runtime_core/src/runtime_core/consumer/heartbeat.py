"""An owner's heartbeat, which keeps its deliveries, and the ended tasks that the broker reports with it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import NamedTuple, TypeVar

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

BEATS_PER_LEASE = 6
MAX_UNANSWERED = 4 * BEATS_PER_LEASE
"""The most heartbeats in flight while a reply is late. A process that gets no reply for longer must stop sending."""
SLOW_LOG_SECONDS = 60.0
"""How long a slow broker is not logged again."""
MAX_ENDED_TASKS = 10_000
ENDED_TASK_KEPT_MS = 600_000
"""How long the broker remembers a stopped task (`stop_running` in shared/ends.lua)."""


def incarnation(service: str) -> str:
    """Return a name that is never reused: service, host, process, start time and a random part."""
    return f"{service}@{socket.gethostname()}.{os.getpid()}.{time.time_ns() // 1_000_000:x}.{secrets.token_hex(4)}"


class Owner:
    """Keeps one owner alive on a partition.

    The event loop that runs the handlers calls `beat`, so a blocked loop sends no heartbeat. On a slow network a reply
    may take longer than the lease. Therefore heartbeats do not wait for each other's replies.
    """

    def __init__(self, bus: EventBus, service: str, lease_seconds: float) -> None:
        self._bus = bus
        self._service = service
        self._lease_ms = int(lease_seconds * 1000)
        self._since = ""
        self._reported: frozenset[str] = frozenset()
        self._heard = time.monotonic()
        self._further: set[asyncio.Task[object]] = set()
        """Heartbeats that were sent while a reply was late, and have no reply yet."""
        self._waits = 0
        """How long the last answer took, in parts of a lease, without the time that the event loop was blocked."""
        self._logged_slow = -SLOW_LOG_SECONDS

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
        since, _, _ = await self.alive_until(self._bus.beat(self._lease_ms, True, self._since))
        self._since = self._since or since
        self._heard = time.monotonic()

    async def beat(self) -> list[str]:
        """Send a heartbeat, and more of them while its reply is late. Return the tasks that ended early since the last
        call.

        Raises Fenced if this owner was declared dead, or has itself been silent for a lease: others may have reclaimed
        its deliveries, so it must not write under its old name.
        """
        sent = time.monotonic()
        try:
            self._since, stopped, _ = await self.alive_until(self._bus.beat(self._lease_ms, False, self._since))
        except Fenced:
            self._heard = time.monotonic()
            raise
        self._heard = time.monotonic()
        self._warn_if_slow(self._heard - sent)
        # Two heartbeats may report the same task.
        before, self._reported = self._reported, frozenset(stopped)
        return [task for task in stopped if task not in before]

    async def beat_beside(self, bus: EventBus, lasts: Callable[[], bool]) -> None:
        """Send heartbeats while `lasts` returns True, from the loop of another thread, over that thread's `bus`.

        Raises Fenced if this owner was declared dead.
        """
        while lasts():
            bus.owner = self._bus.owner
            await bus.beat(self._lease_ms, False, self._since)
            self._bus.alive_until, self._heard = bus.alive_until, time.monotonic()
            await asyncio.sleep(self._lease_ms / 1000 / BEATS_PER_LEASE)

    async def alive_until(self, answer: Coroutine[None, None, Answer]) -> Answer:
        """Wait for an answer of the broker, and send heartbeats meanwhile."""
        waiting = asyncio.get_running_loop().create_task(answer)
        self._waits = 0
        try:
            while not (await asyncio.wait((waiting,), timeout=self._lease_ms / 1000 / BEATS_PER_LEASE))[0]:
                self._waits += 1
                if len(self._further) < MAX_UNANSWERED:
                    self._send_further()
        except asyncio.CancelledError:
            for task in (waiting, *self._further):
                task.cancel()
            raise
        return waiting.result()

    def _send_further(self) -> None:
        """Send a heartbeat whose reply only confirms that this owner lives: the next `beat` reports the rest."""
        beat = asyncio.get_running_loop().create_task(self._bus.beat(self._lease_ms, False, self._since))
        self._further.add(beat)
        beat.add_done_callback(self._answered)

    def _answered(self, beat: asyncio.Task[object]) -> None:
        self._further.discard(beat)
        if not beat.cancelled() and beat.exception() is None:
            self._heard = time.monotonic()

    def _warn_if_slow(self, seconds: float) -> None:
        if self._waits >= BEATS_PER_LEASE and self._heard - self._logged_slow > SLOW_LOG_SECONDS:
            self._logged_slow = self._heard
            logger.warning(
                "the broker's reply to a heartbeat took %.1f s, longer than the lease of %g s: work continues, and "
                "each of its writes takes that long. Run this service nearer to the broker, or raise "
                "WEFT_LEASE_SECONDS in all services",
                seconds,
                self._lease_ms / 1000,
            )


class EndedPart(NamedTuple):
    """A task that ended early, or the part of one that a run has withdrawn."""

    task: str
    path: str
    """The path of a call or a child run, as `r/2.0.1`, with all below it; empty: the whole task."""

    @classmethod
    def of(cls, name: str) -> EndedPart:
        """Return what a heartbeat names: `task`, or `task|path`."""
        task, _, path = name.partition("|")
        return cls(task, path)

    def has(self, run: str) -> bool:
        """Return whether this run of the task, or the call of this path, is a part of it."""
        return not self.path or run == self.path or run.startswith(f"{self.path}/")


class EndedTasks:
    """Tasks that were cancelled or failed: their queued work does not start. Bounded by count and age.

    A part that has ended of a task that continues is stored as `task|`. Times are the broker's, in epoch
    milliseconds.
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

    def concern(self, task: str) -> bool:
        """Return whether the task, or a part of it, has ended."""
        return task in self.ended_ms or f"{task}|" in self.ended_ms

    def forget(self, task: str) -> None:
        """Remove a task that was reopened."""
        self.ended_ms.pop(task, None)

    def _add(self, name: str, ended_ms: int) -> None:
        task, part, _ = name.partition("|")
        task += part
        self.ended_ms.pop(task, None)
        self.ended_ms[task] = ended_ms
        if len(self.ended_ms) > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.since_ms = max(self.since_ms, self.ended_ms.popitem(last=False)[1])
