"""Two partitions of one namespace with relays that a test advances step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.state_manager.relay import Relay
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker

Saved = dict[bytes, bytes]
"""A partition's keys as they were at one moment."""


@dataclass(slots=True)
class Side:
    """One partition: its broker, an owner there, and its relay."""

    broker: Broker
    bus: EventBus
    relay: Relay

    async def save(self) -> Saved:
        """Return what this partition holds now."""
        broker = self.broker
        keys = cast(list[bytes], await broker.call("KEYS", broker.keys.base + "*"))
        return {key: cast(bytes, await broker.call("DUMP", key)) for key in keys}

    async def lose_tail(self, saved: Saved) -> None:
        """Go back to what was saved, as a server that comes back without the end of its append-only file."""
        broker = self.broker
        keys = cast(list[bytes], await broker.call("KEYS", broker.keys.base + "*"))
        # The clock goes on: a server that comes back is not in the past.
        offset = await broker.call("HGET", broker.keys.meta, "offset")
        await broker.call("DEL", *keys)
        for key, value in saved.items():
            await broker.call("RESTORE", key, 0, value)
        if offset is not None:
            await broker.call("HSET", broker.keys.meta, "offset", cast(bytes, offset))


@dataclass(slots=True)
class Pair:
    """Partition 0, where tasks make requests, and partition 1, which answers them."""

    here: Side
    there: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.here, self.there

    @property
    def buses(self) -> list[EventBus]:
        return [side.bus for side in self.sides]

    async def carry(self) -> None:
        """Relay what waits on either side, until nothing does."""
        while sum([await side.relay.relay_once() for side in self.sides]):
            pass

    async def look(self, after_ms: int = 11_000) -> None:
        """Let time pass, poll open requests, and relay the results."""
        for side in self.sides:
            await side.broker.pass_time(after_ms)
        for side in self.sides:
            await side.relay.follow_requests()
        await self.carry()


@asynccontextmanager
async def two_partitions(first: Broker) -> AsyncIterator[Pair]:
    """A pair whose first partition is `first`."""
    second = Broker(first.kind, Keys(first.keys.namespace, 1), first.connect, first.admin)
    await second.prepare()
    buses = [await first.owner(), await second.owner()]
    relays = [Relay(bus, buses, first.admin, Metrics(CollectorRegistry(), "test")) for bus in buses]
    yield Pair(Side(first, buses[0], relays[0]), Side(second, buses[1], relays[1]))
    for transport in second.transports:
        await transport.close()
