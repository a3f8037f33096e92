"""A token by which a caller says that it wants no answer any more."""

from __future__ import annotations

import threading
from asyncio import Future
from collections.abc import Callable
from typing import Any


class CancellationToken:
    """Cancels the futures that are linked to it, and calls back; once. May be used from any thread.

    Callbacks run in the thread that cancels and outside of the lock, so that one may use the token again.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Cancel; a repeat does nothing."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_cancelled(self) -> bool:
        return self._cancelled

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call back at the cancellation; at once where it has been."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Forget a callback, so that a token that lives long does not collect them."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def link_future(self, future: Future[Any]) -> Future[Any]:  # Any: futures of all result types
        """Cancel the future with this token."""

        def cancel() -> None:
            future.cancel()

        self.add_callback(cancel)
        return future
