"""Background tasks: the loop of every periodic role, the end of a task, slices of long work, and a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

LONGEST_BACKOFF_SECONDS = 60.0

logger = logging.getLogger(__name__)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:  # Any: whatever they return
    """Cancel tasks and return when they have ended. Their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    if tasks:
        # `wait` and not `await task`: the cancellation of a task must not look like one of the caller.
        await asyncio.wait(tasks)


class Slices:
    """Divides long work of a coroutine: other work of the event loop runs after every `size` bytes of it."""

    __slots__ = ("_left", "_size")

    def __init__(self, size: int) -> None:
        self._size = self._left = size

    async def worked(self, size: int) -> None:
        """Count work that is done or comes next."""
        self._left -= size
        if self._left < 0:
            self._left = self._size
            await asyncio.sleep(0)


class Periodic:
    """Calls an async function immediately, then again `interval_seconds` after the end of each call.

    An error never ends the loop: it goes to `on_error` (by default to the log), and the pause doubles with each
    consecutive error, up to a minute or the interval, whichever is longer.
    """

    def __init__(
        self,
        name: str,
        interval_seconds: float,
        function: Callable[[], Awaitable[None]],
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.name = name
        self.interval_seconds = interval_seconds
        self.started = asyncio.Event()
        """Set while the loop runs."""
        self.runs = 0
        """Number of calls that have ended, with or without an error."""
        self._function = function
        self._on_error = on_error or self._log
        self._errors_in_a_row = 0
        self._wake = asyncio.Event()
        self._run_ended = asyncio.Condition()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop in a separate task. Does nothing if it is started."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.get_running_loop().create_task(self._loop(), name=self.name)

    async def stop(self) -> None:
        """Cancel the function if it is running, and wait until the loop has ended."""
        task, self._task = self._task, None
        self._stopping = True
        if task is not None:
            await cancel_and_wait(task)
        self.started.clear()

    def trigger(self) -> None:
        """Call the function now, or once more if it is running."""
        self._wake.set()

    async def ran(self, times: int = 1) -> None:
        """Wait until `times` more calls have ended."""
        until = self.runs + times
        async with self._run_ended:
            await self._run_ended.wait_for(lambda: self.runs >= until)

    async def _loop(self) -> None:
        self.started.set()
        # The flag ends the loop even if the function swallows its cancellation.
        while not self._stopping:
            self._wake.clear()
            await self._run_once()
            await self._pause()

    async def _run_once(self) -> None:
        try:
            await self._function()
            self._errors_in_a_row = 0
        except Exception as error:
            self._errors_in_a_row += 1
            self._on_error(error)
        async with self._run_ended:
            self.runs += 1
            self._run_ended.notify_all()

    async def _pause(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._pause_seconds(), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _pause_seconds(self) -> float:
        doublings = min(self._errors_in_a_row, 30)
        # An interval of zero must not spin on an error.
        base = max(self.interval_seconds, 0.01) if doublings else self.interval_seconds
        return min(base * 2.0**doublings, max(LONGEST_BACKOFF_SECONDS, self.interval_seconds))

    def _log(self, error: Exception) -> None:
        logger.error(
            "%s failed (%s in a row), next try in %.3g s: %s: %s",
            self.name,
            self._errors_in_a_row,
            self._pause_seconds(),
            type(error).__name__,
            error,
            exc_info=error if self._errors_in_a_row == 1 else None,
        )


class TimeLimit:
    """`with TimeLimit(seconds):` does what `async with asyncio.timeout(seconds):` does, at a third of its cost.

    After `seconds` (None: never) the running task is cancelled, and the block raises TimeoutError.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_timer", "passed")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.passed = False
        """Whether this limit has cancelled the task."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer = None if self._seconds is None else task.get_loop().call_later(self._seconds, self._pass)
        return self

    def runs_here(self) -> bool:
        """Whether the task that entered the block is the one that runs now."""
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:  # no loop runs
            return False

    def _pass(self) -> None:
        self.passed = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A cancellation from outside counts more than the limit.
        if self.passed and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
