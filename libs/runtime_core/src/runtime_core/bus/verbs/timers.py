"""Verbs for what is to happen later, by the broker's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from runtime_core.bus.verbs.partition import Partition


class TimerVerbs(Partition):
    """Timers of this partition, and schedules."""

    async def promote(self, count: int = 100) -> tuple[int, int]:
        """Do what is due: (how many, ms until the next timer or -1)."""
        done, wait, self.queued = cast(list[int], await self.call("promote", count))
        return done, wait

    async def refill(self, count: int, streams: Sequence[str] = ()) -> int:
        """Move tasks that wait for their tenants' turns until `count` entries of each stream are unread.

        Without `streams`, of all. Returns how many tasks still wait.
        """
        self.queued = cast(int, await self.call("refill", count, *streams))
        return self.queued

    async def schedule(self, schedule: str, seen: str | bytes, new: bytes, look_ms: int | None, most: int = 0) -> int:
        """Keep or (`new` empty) remove a schedule, if it still is as `seen`: 1 done, 0 not, -1 over `most`."""
        look = "" if look_ms is None else look_ms
        return cast(int, await self.call("schedule", schedule, seen, new, look, most))

    async def time_ms(self) -> int:
        """The broker's clock, in epoch milliseconds."""
        seconds, micros = cast(list[bytes], await self.transport.call("TIME"))
        return int(seconds) * 1000 + int(micros) // 1000
