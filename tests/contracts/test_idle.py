"""Idleness: work in flight, retries and relayed messages count as work; waiting does not."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, complete, nap, suspend


async def left(bus: EventBus) -> int:
    return (await bus.idle())[0]


async def test_work_counts_until_it_is_committed(broker: Broker, bus: EventBus) -> None:
    assert await left(bus) == 0
    await broker.submit(bus, "t")
    assert await left(bus) == 1
    turn = await broker.take(bus)
    assert await left(bus) == 1
    await suspend(bus, turn, ask("1"))
    assert await left(bus) == 1
    await answer(bus, await broker.take(bus, "tool"))
    assert await left(bus) == 1
    await complete(bus, await broker.take(bus))
    assert await left(bus) == 0


async def test_a_retry_counts_as_work(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await bus.retry(await broker.take(bus), 60_000, b'{"type":"x","message":"y"}')
    assert await left(bus) == 1


async def test_a_run_that_waits_for_a_timer_does_not_count(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), nap("1", 60_000))
    assert await left(bus) == 0


async def test_a_call_to_another_partition_counts_as_work(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="k"))
    assert await left(bus) == 1


async def test_work_of_a_pool_counts(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.agents, "painter", "agent:gpu")
    await broker.submit(bus, "t", "painter")
    assert await left(bus) == 1


async def test_the_mark_changes_with_every_append(broker: Broker, bus: EventBus) -> None:
    before = (await bus.idle())[1]
    assert (await bus.idle())[1] == before
    await broker.submit(bus, "t")
    await complete(bus, await broker.take(bus))
    assert await left(bus) == 0
    assert (await bus.idle())[1] != before
