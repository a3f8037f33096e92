"""Maps on a cluster: runs a function on many items in parallel, with several fast items per task."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from runtime_core.engines.protocol import Error, Mapped, Outcome, Report, Value, Work

CHUNK_SECONDS = 1.0
"""The time after which a worker with several items may return those that it has not started, in seconds."""
TASK_SECONDS = 0.25
"""The target duration of one task's items together, if one alone takes less, in seconds."""
MAX_CHUNK_ITEMS = 1000
MAX_CHUNK_BYTES = 8 * 1024**2
"""The limits of one task: items, and their JSON in bytes."""
MAX_GROWTH = 10
"""The highest growth factor of items from one task to the next: a few fast items say little about the rest."""
REPORT_SECONDS = 0.5
"""The shortest interval between two progress events, in seconds."""
MAX_RESULT_BYTES = 128 * 1024**2
"""The limit of all results together, in bytes: the process that runs the map holds them in memory."""


class Items(msgspec.Struct, frozen=True):
    """The outcomes of a task's first items: all of them, or as many as it has run."""

    outcomes: list[Outcome]
    seconds: float
    """The time that the items took."""


Answer = Value | Error | Items
RunItems = Callable[[Work, float], Awaitable[Answer]]
"""Runs some items of a map under a limit in seconds; 0 means no limit. An exception ends the map."""


async def run_map(
    work: Work, call: Mapped, in_flight: int, run: RunItems, report: Report, task_seconds: float = TASK_SECONDS
) -> Outcome:
    """Run all items. Return a Value with one entry per item, a result or an error, or the Error that ends them all.

    If cancelled, stop the running tasks. Items that shared a task with a dead worker run again, each alone.
    """
    return await _RunningMap(work, call, in_flight, run, report, task_seconds).run()


class _RunningMap:
    def __init__(
        self, work: Work, call: Mapped, in_flight: int, run: RunItems, report: Report, task_seconds: float
    ) -> None:
        self._task_seconds = task_seconds
        self._largest = 1
        self._work = work
        self._call = call
        self._in_flight = in_flight
        self._run_items = run
        self._report = report
        self._items = msgspec.json.decode(call.items, type=list[msgspec.Raw])
        self._ended: list[bytes] = [b""] * len(self._items)
        self._fresh = deque(range(len(self._items)))
        self._alone: deque[int] = deque()
        self._running: dict[asyncio.Task[Answer], list[int]] = {}
        self._done = self._failed = self._size = 0
        self._seconds, self._timed = 0.0, 0
        self._reported: tuple[int, int] | None = None
        self._reported_at = -math.inf

    async def run(self) -> Outcome:
        try:
            while self._begin_more():
                left = REPORT_SECONDS if self._reported != (self._done, self._failed) else None
                done, _ = await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._end(self._running.pop(task), task.result())
                if self._size > MAX_RESULT_BYTES:
                    return self._too_large()
                self._send_progress(REPORT_SECONDS)
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
        self._send_progress(0)
        return Value(b"[" + b",".join(self._ended) + b"]")

    def _begin_more(self) -> bool:
        """Start tasks up to the limit. Return whether any task is running."""
        while len(self._running) < self._in_flight and (self._alone or self._fresh):
            chunk = [self._alone.popleft()] if self._alone else self._chunk()
            items = b"[" + b",".join(bytes(self._items[index]) for index in chunk) + b"]"
            work = msgspec.structs.replace(self._work, call=msgspec.structs.replace(self._call, items=items))
            limit = self._work.timeout_seconds
            if limit and len(chunk) > 1:
                limit += CHUNK_SECONDS
            self._running[asyncio.create_task(self._run(work, limit))] = chunk
        return bool(self._running)

    async def _run(self, work: Work, limit: float) -> Answer:
        return await self._run_items(work, limit)

    def _chunk(self) -> list[int]:
        """Take the next items: one at a time until measurements show that they are fast."""
        size = 1
        if self._timed:
            small = int(self._task_seconds * self._timed / max(self._seconds, 1e-6))
            fair = math.ceil(len(self._fresh) / self._in_flight)
            self._largest = size = max(1, min(small, MAX_CHUNK_ITEMS, MAX_GROWTH * self._largest, fair))
        chunk: list[int] = []
        left = MAX_CHUNK_BYTES
        while self._fresh and len(chunk) < size and (not chunk or left > 0):
            chunk.append(self._fresh.popleft())
            left -= len(bytes(self._items[chunk[-1]]))
        return chunk

    def _end(self, chunk: list[int], answer: Answer) -> None:
        if isinstance(answer, Items):
            self._seconds += answer.seconds
            self._timed += len(answer.outcomes)
            for index, outcome in zip(chunk, answer.outcomes, strict=False):
                self._settle(index, outcome)
            self._fresh.extendleft(reversed(chunk[len(answer.outcomes) :]))
        elif len(chunk) > 1 and isinstance(answer, Error) and answer.cause in ("worker", "limit"):
            self._alone.extend(chunk)
        else:
            for index in chunk:
                self._settle(index, answer)

    def _settle(self, index: int, outcome: Outcome) -> None:
        if isinstance(outcome, Value):
            entry = b'{"value":' + outcome.data + b"}"
        else:
            self._failed += 1
            entry = msgspec.json.encode({"error": {"type": outcome.type, "message": outcome.message}})
        self._done += 1
        self._size += len(entry)
        self._ended[index] = entry

    def _send_progress(self, pause: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported_at < pause or self._reported == (self._done, self._failed):
            return
        self._reported, self._reported_at = (self._done, self._failed), now
        self._report(msgspec.json.encode({"done": self._done, "failed": self._failed, "total": len(self._items)}))

    def _too_large(self) -> Error:
        message = f"the results of the map are over {MAX_RESULT_BYTES:,} bytes together: return less per item"
        return Error("invalid", "ResultTooLarge", message, retryable=False)
