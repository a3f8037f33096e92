"""Gates: pieces wait behind one until the test releases them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Passage:
    open: bool = False
    permits: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Gates:
    """All are closed at first."""

    def __init__(self) -> None:
        self._passages: defaultdict[str, Passage] = defaultdict(Passage)

    def is_open(self, name: str) -> bool:
        return self._passages[name].open

    def release(self, name: str, pieces: int | None) -> None:
        """Let this many pieces pass; None opens the gate for all later ones."""
        passage = self._passages[name]
        if pieces is None:
            passage.open = True
        else:
            passage.permits += pieces
        passage.changed.set()

    def close(self, name: str) -> None:
        passage = self._passages[name]
        passage.open, passage.permits = False, 0

    async def passed(self, name: str) -> None:
        """Wait until one piece may pass."""
        passage = self._passages[name]
        while not passage.open and passage.permits == 0:
            passage.changed.clear()
            await passage.changed.wait()
        if not passage.open:
            passage.permits -= 1
