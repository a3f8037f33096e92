"""Admission: only the admitter with the newest epoch starts work, and only while there is room."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import NotYet
from runtime_core.errors import Fenced, InvalidInput, Rejected
from tests.contracts.broker import Broker, complete


async def test_one_owner_leads(broker: Broker, bus: EventBus, other: EventBus) -> None:
    assert await bus.lead("admit") == 1
    assert await other.lead("admit") == 0
    assert await bus.lead("admit") == 1, "it keeps the lead, and its epoch"
    assert await other.lead("another role") == 1


async def test_a_replaced_admitter_starts_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """It read submits, stalled, and continues after another admitter has admitted later ones."""
    epoch = str(await bus.lead("admit"))
    assert (await broker.submit(bus, "s1", key="k", epoch=epoch)).started
    await broker.silence(bus)
    newer = str(await other.lead("admit"))
    assert newer == "2"
    assert (await broker.submit(other, "s2", key="k", epoch=newer)).started
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await broker.submit(bus, "s3", key="k", epoch=epoch)
    assert await broker.snapshot() == before
    assert await bus.lead("admit") == 0, "who was declared dead leads nothing"
    assert (await broker.submit(other, "s3", key="k", epoch=newer)).started
    assert await broker.mailbox("writer/k") == ["s2|r", "s3|r"]


async def test_an_owner_that_was_declared_dead_does_not_lead(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The same holds if nobody has taken the lead yet."""
    assert await bus.lead("admit") == 1
    await broker.silence(bus)
    assert await bus.lead("admit") == 0
    assert await bus.lead("another role") == 0
    assert await other.lead("admit") == 2


async def test_an_epoch_never_comes_back(broker: Broker, bus: EventBus, other: EventBus) -> None:
    assert await bus.lead("admit") == 1
    await bus.leave([])
    assert await other.lead("admit") == 2
    await other.leave([])
    third = await broker.owner()
    assert await third.lead("admit") == 3
    with pytest.raises(Fenced):
        await broker.submit(third, "t", epoch="2")


async def test_nothing_is_rejected_before_the_first_manifest(broker: Broker, bus: EventBus) -> None:
    await broker.call("DEL", broker.keys.agents)
    before = await broker.snapshot()
    with pytest.raises(NotYet) as refused:
        await broker.submit(bus, "t")
    assert refused.value.retry_after_seconds
    assert await broker.snapshot() == before


async def test_an_unknown_agent_is_rejected_by_name(broker: Broker, bus: EventBus) -> None:
    before = await broker.snapshot()
    with pytest.raises(InvalidInput, match=r"data\.agent: no agent is named nobody; known are desk, editor, writer"):
        await broker.submit(bus, "t", agent="nobody")
    assert await broker.snapshot() == before, "a rejected submit does not use up its id"
    assert (await broker.submit(bus, "t")).started


async def test_an_overloaded_partition_refuses(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "open")
    await broker.call("HSET", broker.keys.meta, "overload", "memory is at 85 %")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="memory is at 85 %") as refused:
        await broker.submit(bus, "t")
    assert (refused.value.field, refused.value.retry_after_seconds) == ("overloaded", 1.0)
    assert await broker.snapshot() == before
    assert (await broker.submit(bus, "open")).started is False, "an equal submit is still answered"
    assert await complete(bus, await broker.take(bus)), "commits go on"


async def test_a_full_stream_refuses(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.meta, "stream_max", 2)
    await broker.submit(bus, "a")
    await broker.submit(bus, "b")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="the stream agent holds as much open work as it may"):
        await broker.submit(bus, "c")
    assert await broker.snapshot() == before
    await complete(bus, await broker.take(bus))
    assert (await broker.submit(bus, "c")).started
