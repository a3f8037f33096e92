"""Accepted submits after a power cut: the server's disk keeps only synced data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime_core.bus.connection import Reply
from runtime_core.bus.event_bus import EventBus
from tests.conftest import missing
from tests.contracts.broker import Broker, complete
from tests.contracts.test_durability import durable, partition
from tests.servers.power import PowerServer
from tests.servers.process import Append
from tests.servers.unavailable import Unavailable

LOAD_SECONDS = 2.5
"""Longer than everysec waits for a sync, so that some submits are synced and some are not."""
Start = Callable[..., PowerServer]


@pytest.fixture
def power_server(tmp_path: Path) -> Iterator[Start]:
    """Starts a server whose power the test can cut."""
    started: list[PowerServer] = []

    def start(append: Append, sync_delay_ms: int = 0) -> PowerServer:
        try:
            server = PowerServer(tmp_path / f"power-{len(started)}", append=append, sync_delay_ms=sync_delay_ms)
        except Unavailable as reason:
            missing("a server whose power is cut", reason)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


async def submit_for(broker: Broker, bus: EventBus, seconds: float, first: int = 0) -> list[float]:
    """Submit tasks one after the other, t0 (or `first`) and so on, and return when each was accepted.

    At most 1,000 in a second: nobody takes them, and a stream holds only so much open work.
    """
    accepted: list[float] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert (await broker.submit(bus, f"t{first + len(accepted)}")).started
        accepted.append(time.monotonic())
        await asyncio.sleep(0.001)
    return accepted


async def lost_tasks(broker: Broker, count: int) -> list[int]:
    return [number for number in range(count) if not await broker.status(f"t{number}")]


@pytest.mark.parametrize("sync_delay_ms", [0, 20], ids=["quick disk", "slow disk"])
async def test_an_fsynced_submit_outlives_a_power_cut(power_server: Start, namespace: str, sync_delay_ms: int) -> None:
    """Accepted means on the disk, even while several clients submit and while the file is rewritten."""
    server = power_server("always", sync_delay_ms)
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fsync") as bus:
            await bus.check_durability()
            first = await submit_for(broker, bus, LOAD_SECONDS / 2)
            await broker.call("BGREWRITEAOF")
            rest = await submit_together(broker, bus, len(first), LOAD_SECONDS / 2)
            server.cut_power()
        server.start()
        assert await lost_tasks(broker, rest) == []
        bus = await broker.owner()
        assert await complete(bus, await broker.take(bus))


async def submit_together(broker: Broker, bus: EventBus, first: int, seconds: float) -> int:
    """Submit tasks from number `first` on, several at the same time. Return the number after the last accepted one."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        await asyncio.gather(*(broker.submit(bus, f"t{number}") for number in range(first, first + 8)))
        first += 8
    return first


async def test_a_synced_write_outlives_a_power_cut_without_waiting(power_server: Start, namespace: str) -> None:
    """With `appendfsync always` the server syncs before each reply, even under `fast`."""
    server = power_server("always")
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fast") as bus:
            count = len(await submit_for(broker, bus, LOAD_SECONDS / 2))
            server.cut_power()
        server.start()
        assert await lost_tasks(broker, count) == []


@pytest.mark.parametrize("sync_delay_ms", [0, 1500], ids=["quick disk", "slow disk"])
async def test_a_power_cut_under_everysec_loses_the_last_seconds(
    power_server: Start, namespace: str, sync_delay_ms: int
) -> None:
    """Only a tail is lost, and the rest is consistent: work goes on from what is left."""
    server = power_server("everysec", sync_delay_ms)
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fast") as bus:
            accepted = await submit_for(broker, bus, LOAD_SECONDS + 3 * sync_delay_ms / 1000)
            while not server.pause_unsynced():  # the server synced just now
                accepted += await submit_for(broker, bus, 0.01, first=len(accepted))
            cut = time.monotonic()
            assert server.cut_power() > 0
        server.start()
        lost = await lost_tasks(broker, len(accepted))
        assert lost == list(range(len(accepted) - len(lost), len(accepted)))
        assert 0 < len(lost) < len(accepted)
        window = cut - accepted[lost[0]]
        print(f"everysec, syncs delayed by {sync_delay_ms} ms: {len(lost)} of {len(accepted)}, {window:.2f} s")
        assert window < 2.5 + 2 * sync_delay_ms / 1000
        bus = await broker.owner()
        assert await complete(bus, await broker.take(bus))


async def test_a_confirmed_wait_under_everysec_proves_nothing(power_server: Start, namespace: str) -> None:
    """Therefore `WEFT_DURABILITY=fsync` is refused there: Valkey answers WAITAOF before its disk has the write."""
    server = power_server("everysec")
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fast") as bus:
            confirmed: list[Reply] = []
            ends = time.monotonic() + LOAD_SECONDS
            while time.monotonic() < ends or not server.pause_unsynced():
                await broker.submit(bus, f"t{len(confirmed)}")
                confirmed.append(await bus.transport.call("WAITAOF", 1, 0, 0))
            server.cut_power()
        server.start()
        assert confirmed == [[1, 0]] * len(confirmed)
        assert await lost_tasks(broker, len(confirmed))


async def test_a_power_cut_without_syncs_may_lose_everything(power_server: Start, namespace: str) -> None:
    server = power_server("no")
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fast") as bus:
            count = len(await submit_for(broker, bus, 0.5))
            assert server.cut_power() > 0
        server.start()
        assert len(await lost_tasks(broker, count)) == count
