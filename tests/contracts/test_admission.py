"""Admission: only the admitter with the newest epoch starts work, and only while there is room."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import NotYet
from runtime_core.errors import Fenced, InvalidInput, Rejected
from tests.contracts.broker import Broker, complete


async def test_one_owner_leads(broker: Broker, bus: EventBus, other: EventBus) -> None:
    epoch = await bus.lead("admit")
    assert epoch > 0
    assert await other.lead("admit") == 0
    assert await bus.lead("admit") == epoch, "it keeps the lead, and its epoch"
    assert await other.lead("another role") > 0


async def test_a_leader_whose_lead_the_broker_has_lost_is_replaced(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """It leads on, unaware, while another one takes the lead on the server that lost its last writes."""
    lost = await bus.lead("admit")
    await broker.call("DEL", broker.keys.base + "leader:admit")
    await broker.pass_time(1)
    assert await other.lead("admit") > lost
    with pytest.raises(Fenced):
        await broker.submit(bus, "t", epoch=str(lost))


async def test_a_new_leader_has_a_higher_epoch_than_a_later_time(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The clock has stepped back."""
    epoch = await bus.lead("admit")
    await broker.silence(bus)
    await broker.pass_time(-60_000)
    assert await other.lead("admit") == epoch + 1


async def test_a_replaced_admitter_starts_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """It read submits, stalled, and continues after another admitter has admitted later ones."""
    epoch = str(await bus.lead("admit"))
    assert (await broker.submit(bus, "s1", key="k", epoch=epoch)).started
    await broker.silence(bus)
    newer = str(await other.lead("admit"))
    assert int(newer) > int(epoch)
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
    epoch = await bus.lead("admit")
    await broker.silence(bus)
    assert await bus.lead("admit") == 0
    assert await bus.lead("another role") == 0
    assert await other.lead("admit") > epoch


async def test_an_epoch_never_comes_back(broker: Broker, bus: EventBus, other: EventBus) -> None:
    first = await bus.lead("admit")
    await bus.leave([])
    second = await other.lead("admit")
    await other.leave([])
    third = await broker.owner()
    assert await third.lead("admit") > second > first
    with pytest.raises(Fenced):
        await broker.submit(third, "t", epoch=str(second))


async def test_nothing_is_rejected_before_the_first_manifest(broker: Broker, bus: EventBus) -> None:
    await broker.call("DEL", broker.keys.agents)
    before = await broker.snapshot()
    with pytest.raises(NotYet) as refused:
        await broker.submit(bus, "t")
    assert refused.value.retry_after_seconds
    assert await broker.snapshot() == before


async def test_an_unknown_agent_is_rejected_by_name(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.agents, "weft.task", "agent")
    before = await broker.snapshot()
    with pytest.raises(InvalidInput, match=r"no agent is named nobody; choose from desk, editor, writer$"):
        await broker.submit(bus, "t", agent="nobody")
    assert await broker.snapshot() == before, "a rejected submit does not use up its id"
    assert (await broker.submit(bus, "t")).started


async def test_an_overloaded_partition_refuses_submits(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "open")
    await broker.call("HSET", broker.keys.meta, "overload", "memory is at 85 %")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="memory is at 85 %") as refused:
        await broker.submit(bus, "t")
    assert (refused.value.field, refused.value.retry_after_seconds) == ("overloaded", 1.0)
    assert await broker.snapshot() == before
    assert (await broker.submit(bus, "open")).started is False, "an equal submit is still answered"
    assert await complete(bus, await broker.take(bus)), "commits go on"


async def test_a_full_stream_refuses_submits(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.meta, "stream_max", 2)
    await broker.submit(bus, "a")
    await broker.submit(bus, "b")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="the stream agent holds as much open work as it may"):
        await broker.submit(bus, "c")
    assert await broker.snapshot() == before
    await complete(bus, await broker.take(bus))
    assert (await broker.submit(bus, "c")).started
