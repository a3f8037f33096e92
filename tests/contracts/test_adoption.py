"""Deliveries of a dead owner are reclaimed by owner, never by idle time: all of them, and once."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced
from tests.contracts.broker import Broker, answer, ask, complete, suspend

HOUR_MS = 3_600_000


async def entries_of(bus: EventBus, stream: str = "agent", count: int = 10) -> list[bytes]:
    return [delivery.entry for delivery in (await bus.adopt(stream, count, False)).deliveries]


async def held_by(broker: Broker, owner: EventBus, *tasks: str) -> list[Delivery]:
    for task in tasks:
        await broker.submit(owner, task)
    return [await broker.take(owner) for _ in tasks]


async def test_a_long_delivery_stays_with_its_living_owner(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A call that takes an hour is not a sign of death, whatever its idle time says."""
    (turn,) = await held_by(broker, other, "t")
    key = broker.keys.stream("agent")
    await broker.call("XCLAIM", key, "agent-handler", other.owner, 0, turn.entry, "IDLE", HOUR_MS, "JUSTID")
    assert await entries_of(bus) == []
    assert list(await other.own_pending("agent")) == [turn.entry]
    assert await complete(other, turn)


async def test_the_deliveries_of_a_dead_owner_are_adopted_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """If two owners adopt, each entry goes to one of them. The dead owner's late commit changes nothing."""
    third = await broker.owner()
    turns = await held_by(broker, other, "a", "b", "c")
    await broker.silence(other)
    first, second = await bus.adopt("agent", 10, False), await third.adopt("agent", 10, False)
    assert [delivery.entry for delivery in first.deliveries] == [turn.entry for turn in turns]
    assert [delivery.deliveries for delivery in first.deliveries] == [2, 2, 2]
    assert second.deliveries == []
    with pytest.raises(Fenced):
        await complete(other, turns[0], output=b'"late"')
    for delivery in first.deliveries:
        assert await complete(bus, delivery)
    assert [(await broker.final(task))["output"] for task in "abc"] == ["done"] * 3
    await broker.idle()


async def test_a_commit_after_the_new_owners_changes_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The stopped process continues after another has done its work."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(other, "tool")
    await broker.silence(other)
    (adopted,) = (await bus.adopt("tool", 10, False)).deliveries
    assert await answer(bus, adopted, b'"first"')
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await answer(other, call, b'"second"')
    assert await broker.snapshot() == before


async def test_adoption_comes_in_batches(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """It adopts as many as it has room for, oldest first; the rest waits."""
    turns = await held_by(broker, other, "a", "b", "c", "d", "e")
    await broker.silence(other)
    found = [await entries_of(bus, count=2) for _ in range(4)]
    expected = [turn.entry for turn in turns]
    assert found == [expected[:2], expected[2:4], expected[4:], []]


async def test_no_room_adopts_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await held_by(broker, other, "a")
    await broker.silence(other)
    assert await entries_of(bus, count=0) == []
    assert len(await entries_of(bus, count=1)) == 1


async def test_a_dead_name_leaves_the_group_when_nothing_is_pending(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Names never come back, so they must not pile up in the group."""
    await held_by(broker, other, "a")
    await broker.silence(other)

    async def names() -> set[bytes]:
        reply = await broker.call("XINFO", "CONSUMERS", broker.keys.stream("agent"), "agent-handler")
        assert isinstance(reply, list)
        return {item[1] for item in reply if isinstance(item, list) and isinstance(item[1], bytes)}

    assert other.owner.encode() in await names()
    (turn,) = (await bus.adopt("agent", 10, False)).deliveries
    assert await complete(bus, turn)
    assert await entries_of(bus) == []
    assert other.owner.encode() not in await names()


async def test_a_deleted_entry_is_not_reclaimed_forever(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Somebody trimmed the stream by hand: pending entries that are gone end, the others are adopted."""
    gone, left = await held_by(broker, other, "gone", "left")
    await broker.call("XDEL", broker.keys.stream("agent"), gone.entry)
    await broker.silence(other)
    assert await entries_of(bus) == [left.entry]
    assert await bus.own_pending("agent") == {left.entry: 2}
    await bus.adopt("agent", 10, False)
    reply = await broker.call("XPENDING", broker.keys.stream("agent"), "agent-handler", "-", "+", 10)
    assert isinstance(reply, list)
    assert len(reply) == 1


async def test_deliveries_that_did_not_start_are_handed_back_uncounted(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A graceful stop counts no death against an entry that was only read."""
    (turn,) = await held_by(broker, other, "t")
    await other.leave([turn])
    assert not await broker.alive(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    assert adopted.deliveries == 1


async def test_a_call_that_may_not_be_repeated_and_never_began_runs(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A call that the dead owner had only read is not `unknown`."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    await broker.take(other, "tool")
    await broker.silence(other)
    (adopted,) = (await bus.adopt("tool", 10, False)).deliveries
    assert await bus.mark_started(adopted)


async def test_a_started_call_does_not_run_again(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Nobody knows whether it took effect. Its owner, whose reply was lost, may ask again."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(other, "tool")
    assert await other.mark_started(call)
    assert await other.mark_started(call)
    await broker.silence(other)
    (adopted,) = (await bus.adopt("tool", 10, False)).deliveries
    assert not await bus.mark_started(adopted)


async def test_an_owner_that_has_a_call_twice_begins_it_once(broker: Broker, bus: EventBus) -> None:
    """It could not store the result, and found the call again among its pending entries."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    ((again,), _) = await bus.reopen("tool", {call.entry: 1})
    assert await bus.mark_started(again) is False
    assert await bus.mark_started(call), "a repeat of the first call, whose reply was lost"
