"""The one loop that every periodic role uses: start, run now and then, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

LONGEST_BACKOFF_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Periodic:
    """Calls an async function at once and then every `interval_seconds`, counted from the end of a call.

    An error never ends the loop: it goes to `on_error` (by default to the log), and the pause doubles
    with each error in a row, up to a minute or the interval, whichever is longer.
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
        """Calls that have ended, with or without an error."""
        self._function = function
        self._on_error = on_error or self._log
        self._errors_in_a_row = 0
        self._wake = asyncio.Event()
        self._run_ended = asyncio.Condition()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the loop in a task of its own. Starting what is started changes nothing."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.get_running_loop().create_task(self._loop(), name=self.name)

    async def stop(self) -> None:
        """Cancels the function if it is running, and returns when the loop has ended."""
        task, self._task = self._task, None
        self._stopping = True
        if task is not None:
            task.cancel()
            # `wait` and not `await task`: the cancellation of the loop must not look like one of the caller.
            await asyncio.wait([task])
        self.started.clear()

    def trigger(self) -> None:
        """Calls the function now, or once more if it is running."""
        self._wake.set()

    async def ran(self, times: int = 1) -> None:
        """Waits until so many more calls have ended."""
        until = self.runs + times
        async with self._run_ended:
            await self._run_ended.wait_for(lambda: self.runs >= until)

    async def _loop(self) -> None:
        self.started.set()
        # A function that swallows its cancellation must not keep the loop alive, hence the flag.
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
        # An interval of nothing must not spin on an error either.
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
