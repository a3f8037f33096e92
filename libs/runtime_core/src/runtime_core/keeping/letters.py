"""Keeps the dead letters of a partition within their bounds, and says what had to go."""

from __future__ import annotations

import logging
import time

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_memory
from runtime_core.dead_letters import trimmed_letters
from runtime_core.settings import LEAST_DEAD_BYTES, Settings

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
RECOUNT_SECONDS = 60.0
"""The shortest time between two counts of all letters."""
MEMORY_SHARE = 10
"""Dead letters of all partitions take no more than this part (one tenth) of the server's `maxmemory`."""


class LetterKeeper:
    """One partition's; run by its leader. Functions of the bus keep to the bound that it stores."""

    def __init__(
        self,
        bus: EventBus,
        most_bytes: int = Settings.dead_max_bytes,
        retention_seconds: float = Settings.dead_retention_seconds,
        partitions: int = 1,
    ) -> None:
        self._bus = bus
        self._most_bytes = most_bytes
        self._retention_ms = int(retention_seconds * 1000)
        self._partitions = partitions
        self._looked = self._recounted = float("-inf")
        self._seen: dict[tuple[str, str], int] | None = None

    async def look(self) -> None:
        """Trim what is too old or too much, unless that was done a moment ago."""
        if time.monotonic() - self._looked < INTERVAL_SECONDS:
            return
        self._looked = time.monotonic()
        await self.trim()

    async def trim(self) -> None:
        """Trim until the bounds hold, and log what went since the last time, by whomever."""
        if self._seen is None:
            self._seen = await trimmed_letters(self._bus)
        bound = await self._bound()
        done = await self._bus.trim_letters(bound, self._retention_ms)
        if done.counted != done.stored and time.monotonic() - self._recounted >= RECOUNT_SECONDS:
            self._recounted = time.monotonic()
            await self._bus.recount_letters()
            done = await self._bus.trim_letters(bound, self._retention_ms)
        while done.old or done.large:
            done = await self._bus.trim_letters(bound, self._retention_ms)
        now = await trimmed_letters(self._bus)
        for (cause, share), count in now.items():
            if more := count - self._seen.get((cause, share), 0):
                why = (
                    f"dead letters may have {bound} bytes (WEFT_DEAD_MAX_BYTES), and {share} had the most"
                    if cause == "bytes"
                    else "they were older than WEFT_DEAD_RETENTION_SECONDS"
                )
                logger.warning("partition %d: trimmed %d dead letters: %s", self._bus.keys.partition, more, why)
        self._seen = now

    async def _bound(self) -> int:
        """The setting; less on a small server, which letters must not fill."""
        memory = await server_memory(self._bus.transport)
        limit = int(memory.get("maxmemory", 0))
        if not limit:
            return self._most_bytes
        return min(self._most_bytes, max(LEAST_DEAD_BYTES, limit // MEMORY_SHARE // self._partitions))
