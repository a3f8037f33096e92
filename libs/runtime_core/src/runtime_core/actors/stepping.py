"""Lets a program step through its messages: a handler begins only when the program asks for the next one."""

from __future__ import annotations

import asyncio
from collections import deque


class Stepping:
    """Handlers that wait to begin, and answers that the program has not stepped over. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], asyncio.Future[None]]] = deque()
        """For each handler: what it waits for, and what is done when it has begun."""
        self._answers = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """The number of handlers that wait to begin."""
        return len(self._waiting)

    async def enter(self) -> asyncio.Future[None]:
        """Wait for this handler's step. The caller ends the returned future when the handler has begun, or ended."""
        loop = asyncio.get_running_loop()
        place = (loop.create_future(), loop.create_future())
        self._waiting.append(place)
        self._changed.set()
        try:
            await place[0]
        except asyncio.CancelledError:
            done(place[1])
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
        return place[1]

    def note_answer(self) -> None:
        """Count an answer: it is one step too."""
        self._answers += 1
        self._changed.set()

    async def step(self) -> None:
        """Wait for the next message or answer. Returns when the message's handler has begun."""
        while not (self._answers or self._waiting):
            self._changed.clear()
            await self._changed.wait()
        if self._answers:
            self._answers -= 1
            return
        turn, begun = self._waiting.popleft()
        done(turn)
        await begun
        await asyncio.sleep(0)  # the handler continues until it waits for something

    def end(self) -> None:
        """Let all handlers begin."""
        while self._waiting:
            done(self._waiting.popleft()[0])


def done(future: asyncio.Future[None]) -> None:
    """End a future, unless it has ended."""
    if not future.done():
        future.set_result(None)
