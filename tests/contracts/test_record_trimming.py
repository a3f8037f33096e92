"""The record is trimmed behind both its groups, and never past a missing one."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Rejected
from tests.contracts.broker import Broker, complete

GROUPS = ("state-manager", "trajectory-recorder")


async def finished(broker: Broker, bus: EventBus, count: int) -> list[str]:
    """The record's entry ids after so many tasks."""
    for number in range(count):
        await broker.submit(bus, f"t{number}")
        assert await complete(bus, await broker.take(bus))
    return [entry["id"] for entry in await broker.entries("record")]


async def left(broker: Broker) -> list[str]:
    return [entry["id"] for entry in await broker.entries("record")]


async def test_without_a_record_nothing_is_trimmed(broker: Broker, bus: EventBus) -> None:
    assert await bus.trim_record() == (0, 0)


async def test_the_slower_group_counts(broker: Broker, bus: EventBus) -> None:
    entries = await finished(broker, bus, 5)
    assert await bus.trim_record() == (0, 0)
    await bus.publish_cursor(GROUPS[0], entries[4])
    assert await bus.trim_record() == (0, 0)
    await bus.publish_cursor(GROUPS[1], entries[1])
    assert await bus.trim_record() == (2, 0)
    assert await left(broker) == entries[2:]
    await bus.publish_cursor(GROUPS[1], entries[4])
    assert await bus.trim_record() == (3, 0)
    assert await left(broker) == []


@pytest.mark.parametrize("slow", GROUPS)
async def test_either_group_may_be_the_slower(broker: Broker, bus: EventBus, slow: str) -> None:
    entries = await finished(broker, bus, 3)
    for name in GROUPS:
        await bus.publish_cursor(name, entries[0] if name == slow else entries[2])
    assert await bus.trim_record() == (1, 0)
    assert await left(broker) == entries[1:]


@pytest.mark.parametrize("lost", GROUPS)
async def test_a_missing_group_stops_trimming(broker: Broker, bus: EventBus, lost: str) -> None:
    """It is created again from 0, so that it reads what it had not; the code fixes the groups."""
    entries = await finished(broker, bus, 3)
    for name in GROUPS:
        await bus.publish_cursor(name, entries[2])
    await broker.call("XGROUP", "DESTROY", broker.keys.record, lost)
    assert await bus.trim_record() == (0, 1)
    assert await left(broker) == entries
    assert await bus.trim_record() == (0, 0), "from 0: it has read nothing yet"
    assert await left(broker) == entries
    await bus.publish_cursor(lost, entries[2])
    assert await bus.trim_record() == (3, 0)


async def test_a_foreign_group_does_not_count(broker: Broker, bus: EventBus) -> None:
    """Neither does one more group hold trimming back for ever."""
    entries = await finished(broker, bus, 2)
    await broker.call("XGROUP", "CREATE", broker.keys.record, "somebody", "0")
    for name in GROUPS:
        await bus.publish_cursor(name, entries[1])
    assert await bus.trim_record() == (2, 0)


async def test_trimming_a_missing_record_does_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.call("DEL", broker.keys.record)
    assert await bus.trim_record() == (0, 0)


async def test_a_cursor_of_a_lost_group_is_published_again(broker: Broker, bus: EventBus) -> None:
    entries = await finished(broker, bus, 2)
    await bus.publish_cursor(GROUPS[0], entries[1])
    await broker.call("XGROUP", "DESTROY", broker.keys.record, GROUPS[1])
    await bus.publish_cursor(GROUPS[1], entries[0])
    assert await bus.trim_record() == (1, 0)


async def test_long_work_holds_nothing_back(broker: Broker, bus: EventBus) -> None:
    """A delivery that takes hours keeps only its own entry."""
    await broker.submit(bus, "long")
    await broker.take(bus)
    entries = await finished(broker, bus, 3)
    for name in GROUPS:
        await bus.publish_cursor(name, entries[2])
    assert await bus.trim_record() == (3, 0)
    assert [entry["h"].split("\n")[2] for entry in await broker.entries("agent")] == ["long"]


async def test_a_full_record_stops_admission_and_nothing_else(broker: Broker, bus: EventBus) -> None:
    """A recorder that is down causes backpressure, not lost rows or unbounded memory."""
    await broker.submit(bus, "open")
    turn = await broker.take(bus)
    await finished(broker, bus, 2)
    await broker.call("HSET", broker.keys.meta, "record_max", 2)
    with pytest.raises(Rejected, match="record stream is over its limit") as refused:
        await broker.submit(bus, "more")
    assert refused.value.retry_after_seconds
    assert refused.value.field == "overloaded"
    assert await complete(bus, turn)
    for name in GROUPS:
        await bus.publish_cursor(name, (await left(broker))[-1])
    await bus.trim_record()
    assert (await broker.submit(bus, "more")).started
