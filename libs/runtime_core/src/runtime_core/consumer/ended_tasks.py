"""The tasks that ended early, as far as one consumer knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST_TASKS = 10_000
KEEP_MS = 600_000
"""The broker remembers a stopped task for this long (`stop_running` in shared/ends.lua)."""


class EndedTasks:
    """Ids of tasks that were cancelled or failed, so that their queued work is not started. Bounded by count and age.

    Times are the broker's, in epoch milliseconds.
    """

    def __init__(self, most: int = MOST_TASKS) -> None:
        self._most = most
        self._ended: OrderedDict[str, int] = OrderedDict()
        self.since_ms = 0
        """Nothing is known about tasks that ended before this time: an entry as old may belong to one of them."""

    def __contains__(self, task: str) -> bool:
        return task in self._ended

    def heard(self, tasks: Iterable[str], now_ms: int, asked_from_ms: int) -> None:
        """Add the tasks that a heartbeat reported: those that ended since `asked_from_ms`."""
        if now_ms - asked_from_ms > KEEP_MS:
            self.since_ms = max(self.since_ms, now_ms - KEEP_MS)  # the broker has forgotten some of them
        for task in tasks:
            self._add(task, now_ms)
        while self._ended and next(iter(self._ended.values())) <= now_ms - KEEP_MS:
            self._drop_oldest()

    def recalled(self, found: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Add all tasks that the broker remembers, with their end times, oldest first."""
        self.since_ms = max(self.since_ms, now_ms - KEEP_MS)
        for task, ended_ms in found:
            self._add(task, ended_ms)

    def forget(self, task: str) -> None:
        """The task was reopened."""
        self._ended.pop(task, None)

    def _add(self, task: str, ended_ms: int) -> None:
        self._ended.pop(task, None)
        self._ended[task] = ended_ms
        if len(self._ended) > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.since_ms = max(self.since_ms, self._ended.popitem(last=False)[1])
