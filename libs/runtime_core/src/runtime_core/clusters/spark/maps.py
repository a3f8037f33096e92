"""One function over many items: several to a call where they are quick, so that they do not pay for a job each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from runtime_core.clusters.spark.calls import Calls
from runtime_core.clusters.spark.sessions import Paced
from runtime_core.clusters.spark.worker import Items
from runtime_core.engines.protocol import Error, Mapped, Outcome, Report, Value, Work

CALL_SECONDS = 1.0
"""How long the functions of one call are to take together: longer ones have a call for each item."""
GROWTH = 10
"""How many times as many items a call has than the one before, at most: few calls tell little of the rest."""
PAUSE_SECONDS = 0.05
"""Between two looks for work, while items are under way that may come back to be run alone."""
MAX_ITEMS = 1_000
MAX_ITEM_BYTES = 8 * 1024 * 1024
"""Of one call."""
TOGETHER = frozenset({"worker", "limit"})
"""What ends all items of a call at once: which of them was the cause shows when each is run alone."""


async def run_map(calls: Calls, work: Work, report: Report, in_flight: int) -> Outcome:
    """How a map ended: a Value with an end for each item, in order; an Error where Spark was lost."""
    assert isinstance(work.call, Mapped)
    items = msgspec.json.decode(work.call.items, type=list[msgspec.Raw])
    running = _Map(calls, work, work.call, items, Paced(report))
    places = min(work.call.in_flight or in_flight, max(1, len(items)))
    tasks = [asyncio.ensure_future(running.work_off(places)) for _ in range(places)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, _Lost):
                return error.error
            raise error
    running.tell(last=True)
    return Value(running.value())


class _Lost(Exception):
    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class _Map:
    """The items that wait, and the ends of the others."""

    def __init__(self, calls: Calls, work: Work, call: Mapped, items: Sequence[msgspec.Raw], report: Paced) -> None:
        self._calls = calls
        self._work = work
        self._call = call
        self._items = items
        self._ends: list[Outcome | None] = [None] * len(items)
        self._waiting = deque(range(len(items)))
        self._alone: deque[int] = deque()
        self._under_way = 0
        self._at_once = 1
        self._failed = self._done = 0
        self._report = report

    async def work_off(self, places: int) -> None:
        """Run items until none waits, and none is under way that might come back to be run alone."""
        while self._waiting or self._alone or self._under_way:
            taken = self._take(places)
            if not taken:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._under_way += 1
            try:
                await self._run(taken)
            finally:
                self._under_way -= 1

    def value(self) -> bytes:
        """The ends as JSON."""
        return msgspec.json.encode([_end(end) for end in self._ends])

    def tell(self, last: bool = False) -> None:
        """Report how far it is."""
        counts = {"done": self._done, "failed": self._failed, "total": len(self._items)}
        self._report(msgspec.json.encode(counts), last)

    def _take(self, places: int) -> list[int]:
        if self._alone:
            return [self._alone.popleft()]
        # So that at the end all places have something to do.
        most = min(self._at_once, MAX_ITEMS, 1 + len(self._waiting) // places)
        taken: list[int] = []
        size = 0
        while self._waiting and len(taken) < most and (not taken or size < MAX_ITEM_BYTES):
            taken.append(self._waiting.popleft())
            size += len(bytes(self._items[taken[-1]]))
        return taken

    async def _run(self, taken: list[int]) -> None:
        call = Items(self._call.function, self._call.over, msgspec.json.encode([self._items[one] for one in taken]))
        work = self._work
        answer = await self._calls.run(call, work.step, work.name, work.key, work.timeout_seconds)
        ends = answer.ends
        if len(ends) != len(taken) or len(taken) == 1:
            first = ends[0]
            if isinstance(first, Error) and first.cause == "lost":
                raise _Lost(first)
            if isinstance(first, Error) and len(taken) > 1:
                if first.cause in TOGETHER:
                    self._alone.extend(taken)
                    self._at_once = 1
                    return
                ends = [first] * len(taken)
        if len(ends) == len(taken):
            self._measure(answer.seconds, len(taken))
        for one, end in zip(taken, ends, strict=True):
            self._ends[one] = end
            self._done += 1
            self._failed += isinstance(end, Error)
        self.tell()

    def _measure(self, seconds: float, count: int) -> None:
        fitting = int(CALL_SECONDS * count / max(seconds, 1e-6))
        self._at_once = max(1, min(fitting, GROWTH * count))


def _end(end: Outcome | None) -> dict[str, object]:
    assert end is not None
    if isinstance(end, Error):
        return {"error": {"type": end.type, "message": end.message}}
    return {"value": msgspec.Raw(end.data)}
