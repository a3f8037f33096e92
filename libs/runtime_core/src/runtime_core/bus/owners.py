"""Verbs of a process: it lives, it leads, it goes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from runtime_core.bus.connection import Argument
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.partition import Partition
from runtime_core.bus.reply import texts
from runtime_core.errors import Fenced


class OwnerVerbs(Partition):
    """Heartbeat, leadership, and a clean end."""

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        """Say that this owner lives, and count the silence of others.

        Returns the broker's time (for the next `since_ms`), the tasks that ended early from then on (those of that very
        millisecond may have been told before), and how many owners this beat declared dead. Raises `Fenced` where this
        owner was declared dead.
        """
        sent = time.monotonic()
        reply = texts(
            await self.call("beat", self.owner, lease_ms, max(100, lease_ms // 6), "1" if first else "0", since_ms)
        )
        if reply[0] != "OK":
            raise Fenced(f"{self.owner} was declared dead")
        self.alive_until = sent + lease_ms / 1000
        return reply[1], reply[3:], int(reply[2])

    async def recently_stopped(self, offset: int, count: int) -> list[tuple[str, int]]:
        """A page of what the broker remembers of stopped tasks, newest first, as heartbeats tell of them, and when."""
        reply = cast(
            list[bytes],
            await self.transport.call(
                "ZRANGE", self.keys.stopped, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            ),
        )
        return [(reply[at].decode(), int(float(reply[at + 1]))) for at in range(0, len(reply), 2)]

    async def lead(self, role: str, floor: int = 0) -> int:
        """The epoch under which this owner leads a role, above `floor`, or 0 where another leads."""
        return cast(int, await self.call("lead", role, self.owner, floor))

    async def leave(self, unstarted: Iterable[Delivery]) -> None:
        """Go: hand back what was not started without counting it, and let others adopt at once."""
        handed: list[Argument] = []
        for delivery in unstarted:
            handed += [delivery.stream, delivery.entry]
        # From here on others may have what this owner held: code that has not ended yet must ask before its next step.
        self.alive_until = 0.0
        await self.call("leave", self.owner, *handed)
