"""An event loop on virtual time: when nothing is ready, it asks the scheduler what happens next."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.simulation.processes import Process

PROCESS: ContextVar[Process] = ContextVar("PROCESS")
"""The simulated process that the running code belongs to."""
SAME_TIME = 1e-9
"""Timers this close to each other, in seconds, are due at the same time."""

Timer = tuple[float, int, asyncio.TimerHandle]
"""When it is due, its number among all timers, and what it calls."""


class _Handle(asyncio.Handle):
    """A handle without asyncio's questions for its debug mode: a history makes hundreds of them."""

    def __init__(self, callback: Any, args: tuple[Any, ...], loop: SimLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class SimLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order in which they became ready. `quiescent` is called when none is.

    It replaces the parts of asyncio's loop that wait for sockets and threads: there are none, and they cost a third of
    a history's time.
    """

    _ready: Any  # of BaseEventLoop: a deque of handles
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.quiescent: Callable[[], None] = lambda: None
        self._timers: list[Timer] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            due = self.next_timer()
            if due is None or due > self.now:
                self.quiescent()
        until = self.now + SAME_TIME
        while timers and timers[0][0] < until:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def call_soon(  # type: ignore[override]  # any callback and arguments
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as call_soon
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as call_soon
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it among the timers: it is dropped when it is due."""

    def _write_to_self(self) -> None:
        """Nothing sleeps, so nothing needs to be woken."""

    def run_in_executor(self, executor: object, function: object, *args: object) -> NoReturn:
        raise AssertionError(f"a simulation has no threads: {function} must be async")

    def next_timer(self) -> float | None:
        """When the next timer is due; None if there is none."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def next_process(self) -> Process | None:
        """The process of the next timer; None where it belongs to the harness."""
        return _process_of(self._timers[0])

    def take_timers(self, process: Process) -> list[Timer]:
        """Remove the timers of a process, oldest first."""
        taken = sorted(timer for timer in self._timers if _process_of(timer) is process)
        self._timers[:] = [timer for timer in self._timers if _process_of(timer) is not process]
        heapq.heapify(self._timers)
        return taken

    def put_timers(self, timers: Iterable[Timer]) -> None:
        """Put timers back; those that are overdue fire now."""
        for timer in timers:
            heapq.heappush(self._timers, timer)

    def drop_timers(self) -> None:
        """Remove all timers."""
        self._timers.clear()


def _process_of(timer: Timer) -> Process | None:
    context: Context = timer[2]._context  # type: ignore[attr-defined]
    return context.get(PROCESS)
