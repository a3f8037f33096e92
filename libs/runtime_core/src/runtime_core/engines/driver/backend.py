"""What a driver process needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from runtime_core.engines.driver.messages import Outcome, Work

Report = Callable[[bytes], None]
"""Takes progress, as JSON. Call it on the loop's thread."""


class Away(Exception):
    """The engine cannot be reached, or is not installed; the message says so in one line, with the remedy."""


class Backend(Protocol):
    """One engine. All methods are called on one event loop, and none may block it."""

    async def connect(self) -> Mapping[str, str]:
        """Reach the engine, or start one where none was named; what it says of itself. Raises Away.

        Called again, in the same process, until it succeeds once.
        """
        ...

    async def lost(self) -> str:
        """Wait until the engine is lost, and say how in one line. The process ends then, and another one connects."""
        ...

    async def run(self, work: Work, report: Report) -> Outcome:
        """Run one call, or attach to it where this key runs already. Cancelled, it stops the work where it runs."""
        ...

    async def forget(self, key: str) -> None:
        """Nobody asks for this work's result again."""
        ...

    async def close(self) -> None:
        """Let go of the engine. Work with a key goes on there where the engine outlives its driver."""
        ...
