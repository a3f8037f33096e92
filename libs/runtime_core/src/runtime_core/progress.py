"""Whether a process gets anywhere: work that waits while nothing moves is not healthy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`; `reason` says in one line why it is not ok."""

    ok: bool
    reason: str = ""


HEALTHY = Health(True)


class ProgressWatch:
    """Unhealthy when work has waited, and nothing has progressed, for longer than `limit_seconds`.

    A process without work is healthy however long it is idle. `monotonic` gives seconds.
    """

    def __init__(self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._waiting = False
        self._since = monotonic()
        """The latest moment at which all was well: work began to wait, or progressed."""

    def waiting(self, waits: bool) -> None:
        """Says whether there is work for this process now. Saying the same again changes nothing."""
        if waits and not self._waiting:
            self._since = self._monotonic()
        self._waiting = waits

    def progressed(self) -> None:
        """Says that a piece of work was taken, or has ended."""
        self._since = self._monotonic()

    @property
    def stalled_seconds(self) -> float:
        """How long work has waited while nothing has progressed; 0 where none waits."""
        return self._monotonic() - self._since if self._waiting else 0.0

    def health(self) -> Health:
        silent = self.stalled_seconds
        if silent <= self._limit_seconds:
            return HEALTHY
        return Health(
            False,
            f"work waits and nothing has progressed for {silent:.1f} s (limit {self._limit_seconds:g} s)",
        )
