"""Whether a process makes progress: waiting work without progress is unhealthy."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`; `reason` says in one line why it is not ok."""

    ok: bool
    reason: str = ""


HEALTHY = Health(True)


class ProgressWatch:
    """Unhealthy when work has waited, and nothing has progressed, for longer than `limit_seconds`.

    A process without work is healthy however long it is idle, and so is one that waits for its broker: time in which
    a broker owes an answer does not count. `monotonic` gives seconds.
    """

    def __init__(self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._waiting = False
        self._since = monotonic()
        """When work began to wait, or last progressed; later by the time that brokers owed answers since then."""
        self._asked: set[Hashable] = set()
        self._asked_at = 0.0

    def waiting(self, waits: bool) -> None:
        """Report whether there is work for this process now. Reporting the same again changes nothing."""
        if waits and not self._waiting:
            self._since = self._monotonic()
        self._waiting = waits

    def progressed(self) -> None:
        """Report that a piece of work was taken, or has ended."""
        self._since = self._monotonic()

    def asks_broker(self, broker: Hashable) -> None:
        """Report that this broker, one of several, got a request. Another one before its answer changes nothing."""
        if not self._asked:
            self._asked_at = self._monotonic()
        self._asked.add(broker)

    def broker_answered(self, broker: Hashable) -> None:
        """Report that this broker answers: the clock continues once all brokers with requests have answered."""
        if broker in self._asked:
            self._asked.remove(broker)
            if not self._asked:
                self._since += max(0.0, self._monotonic() - max(self._asked_at, self._since))

    @property
    def stalled_seconds(self) -> float:
        """How long work has waited without progress while the brokers answered; 0 if none waits."""
        now = self._asked_at if self._asked else self._monotonic()
        return max(0.0, now - self._since) if self._waiting else 0.0

    def health(self) -> Health:
        silent = self.stalled_seconds
        if silent <= self._limit_seconds:
            return HEALTHY
        return Health(
            False,
            f"work waits and nothing has progressed for {silent:.1f} s (limit {self._limit_seconds:g} s)",
        )
