"""An event loop on virtual time: where nothing is ready, it asks the scheduler what happens next."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.simulation.processes import Process

PROCESS: ContextVar[Process] = ContextVar("PROCESS")
"""The simulated process that the running code belongs to."""


class _Selector:
    """Stands where a selector waits for sockets: there are none, and nothing ever waits."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None or timeout > 0:
            self._loop.quiescent()
        return []

    def close(self) -> None:
        """Nothing is open."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order in which they became ready. `quiescent` is called when none is."""

    _ready: Any  # of BaseEventLoop: a deque of handles
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.quiescent: Callable[[], None] = lambda: None
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def _process_events(self, events: list[object]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """Nothing sleeps, so nothing needs to be woken."""

    def run_in_executor(self, executor: object, function: object, *args: object) -> NoReturn:
        raise AssertionError(f"a simulation has no threads: {function} must be async")

    def next_timer(self) -> float | None:
        """When the next timer is due; None where there is none."""
        while self._scheduled and self._scheduled[0].cancelled():
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count = max(0, getattr(self, "_timer_cancelled_count", 0) - 1)
        return self._scheduled[0].when() if self._scheduled else None

    def take_timers(self, process: Process) -> list[asyncio.TimerHandle]:
        """Remove the timers of a process, oldest first."""
        taken: list[asyncio.TimerHandle] = []
        kept: list[asyncio.TimerHandle] = []
        for handle in self._scheduled:
            (taken if handle._context.get(PROCESS) is process else kept).append(handle)  # type: ignore[attr-defined]
        for handle in taken:
            handle._scheduled = False  # type: ignore[attr-defined]
        heapq.heapify(kept)
        self._scheduled[:] = kept
        return sorted(taken, key=lambda handle: handle.when())

    def put_timers(self, handles: list[asyncio.TimerHandle]) -> None:
        """Put timers back; those that are overdue fire now."""
        for handle in handles:
            if not handle.cancelled():
                handle._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, handle)
