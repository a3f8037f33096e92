"""Tenants: their settings, and how much open and waiting work each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput
from runtime_core.wire.commands import checked_text

ALL_OTHERS = "*"
"""Settings under this name apply to each named tenant without settings of its own."""
MAX_WEIGHT = 1000
MAX_OPEN = 1_000_000_000
MAX_RATE = 1_000_000.0
MIN_RATE = 0.001


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's settings."""

    name: str
    """Empty: the tenant of tasks without one."""
    weight: int = 1
    """Tasks that it may start per turn, relative to other tenants."""
    max_open: int = 0
    """Open tasks that it may have in the namespace; 0: no limit."""
    rate: float = 0.0
    """Tasks per second that it may start in the namespace; 0: no limit."""

    def check(self) -> None:
        """Raise InvalidInput for settings that cannot be stored."""
        if self.name:
            checked_text("tenant", self.name)
        elif self.max_open or self.rate:
            raise InvalidInput("tenant", "the unnamed tenant cannot have limits, only a weight")
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise InvalidInput("weight", f"{self.weight} is not a whole number from 1 to {MAX_WEIGHT}")
        if not 0 <= self.max_open <= MAX_OPEN:
            raise InvalidInput("max_open", f"{self.max_open} is not a whole number from 0 to {MAX_OPEN}")
        if self.rate and not MIN_RATE <= self.rate <= MAX_RATE:
            raise InvalidInput("rate", f"{self.rate:g} is not 0 or a number from {MIN_RATE:g} to {MAX_RATE:g}")

    def stored(self, partitions: int) -> str:
        """Return what each partition stores: its share of the limits, then the limits."""
        share = -(-self.max_open // partitions)
        rate = max(self.rate / partitions, 0.000001) if self.rate else 0.0
        return f"{self.weight} {share} {rate:.6f} {self.max_open} {self.rate:.6f}"


async def set_tenant(buses: Sequence[EventBus], tenant: Tenant) -> None:
    """Store a tenant's settings in every partition. Raises InvalidInput."""
    tenant.check()
    for bus in buses:
        await bus.transport.call("HSET", bus.keys.tenants, tenant.name, tenant.stored(len(buses)))


async def remove_tenant(buses: Sequence[EventBus], name: str) -> bool:
    """Remove a tenant's settings. Return False if it has none. Its tasks stay."""
    return any([bool(await bus.transport.call("HDEL", bus.keys.tenants, name)) for bus in buses])


async def tenants(bus: EventBus) -> list[Tenant]:
    """Return all tenants with settings, sorted by name. Every partition stores the same ones."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.tenants))
    found = [_read(flat[at].decode(), flat[at + 1].decode()) for at in range(0, len(flat), 2)]
    return sorted(found, key=lambda tenant: tenant.name)


async def open_tasks(buses: Sequence[EventBus], name: str) -> int:
    """Return how many tasks a named tenant has open."""
    asked = [bus.transport.call("ZCARD", bus.keys.open_tasks_of(name)) for bus in buses]
    return sum([cast(int, await one) for one in asked])


async def waiting_tasks(bus: EventBus, most: int = 1000) -> dict[str, Counter[str]]:
    """Return how many new tasks wait, by work stream and tenant.

    Counts the next `most` tenants of each stream separately, and all others together under `*`.
    """
    call, keys = bus.transport.call, bus.keys
    flat = cast(list[bytes], await call("HGETALL", keys.queues))
    totals = {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2) if _is_stream(flat[at])}
    found: dict[str, Counter[str]] = {}
    for stream, total in totals.items():
        names = [name.decode() for name in cast(list[bytes], await call("ZRANGE", keys.turns(stream), 0, most - 1))]
        asked = [call("ZCARD", keys.queue(stream, name)) for name in names]
        counts = Counter({name: cast(int, await one) for name, one in zip(names, asked, strict=True)})
        counts[ALL_OTHERS] += max(0, total - counts.total())
        found[stream] = +counts
    return found


def _is_stream(field: bytes) -> bool:
    return field != b"seq" and b"|" not in field


def _read(name: str, stored: str) -> Tenant:
    parts = stored.split(" ")
    return Tenant(name, int(parts[0]), int(parts[-2]), float(parts[-1]))
