"""Bounds what turns have on its way to the broker without waiting for each answer: deltas, progress and notes."""

from __future__ import annotations

import asyncio
from collections import deque

PIECE_BYTES = 1024
"""What a write costs besides its data: a task, its command and its reply."""
RUN_BYTES = 1024 * 1024
"""How much one run may have on its way before `ctx.emit` waits."""
RUN_MAX_BYTES = 8 * RUN_BYTES
"""How much one run may have on its way through calls that cannot wait, such as `ModelCall.stream`."""
PROCESS_BYTES = 32 * RUN_BYTES
"""How much all runs of a process may have on its way before `ctx.emit` waits."""


class Outflow:
    """Counts the bytes on their way, of a run or of the whole process, and lets writers wait. Belongs to one loop."""

    __slots__ = ("_limit", "_waiting", "bytes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes > self._limit

    def begin(self, size: int) -> None:
        self.bytes += size

    def end(self, size: int) -> None:
        self.bytes -= size
        while self._waiting and not self.full:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def room(self) -> None:
        """Wait until less than the limit is on its way."""
        while self.full:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
