"""A delivery count does not quarantine an entry: only deaths of owners that ran it alone do."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import CONDEMN_AFTER, QUARANTINE_AFTER, Adopted
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced, ServerError
from tests.contracts.broker import Broker, bury, complete, group


async def die(broker: Broker, victim: EventBus) -> EventBus:
    """The owner dies; another comes."""
    successor = await broker.owner()
    await broker.silence(victim)
    return successor


async def adopt_alone(owner: EventBus) -> Adopted:
    """Take entries as a consumer does: first those outside the quarantine, then one alone."""
    adopted = await owner.adopt("agent", 10, False)
    return await owner.adopt("agent", 1, True) if adopted.must_be_idle else adopted


async def test_an_entry_is_run_alone_and_then_condemned(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "poison", key="k")
    await broker.submit(bus, "next", key="k")
    await broker.take(bus)
    owner = bus
    for deliveries in range(2, QUARANTINE_AFTER + 1):
        owner = await die(broker, owner)
        adopted = await owner.adopt("agent", 10, False)
        assert [(turn.deliveries, turn.quarantined) for turn in adopted.deliveries] == [(deliveries, False)]
    for death in range(CONDEMN_AFTER):
        owner = await die(broker, owner)
        adopted = await owner.adopt("agent", 10, False)
        assert adopted.deliveries == []
        assert adopted.must_be_idle
        alone = await owner.adopt("agent", 1, True)
        assert [turn.quarantined for turn in alone.deliveries] == [True], f"death {death}"
        assert alone.condemned == []
    owner = await die(broker, owner)
    adopted = await adopt_alone(owner)
    assert [turn.task for turn in adopted.condemned] == ["poison"]
    assert await bury(owner, adopted.condemned[0], "poison")
    await owner.leave_quarantine(adopted.condemned[0])
    assert await broker.hash("quarantine") == {}
    turn = await broker.take(owner)
    assert turn.task == "next"
    await complete(owner, turn)
    await broker.idle()


async def test_innocents_are_never_convicted(broker: Broker, bus: EventBus) -> None:
    """However often the processes that read them die, each entry gets to run alone, and ends well."""
    tasks = [f"t{number}" for number in range(5)]
    for task in tasks:
        await broker.submit(bus, task)
    taken, _ = await bus.read(["agent"], 10, 5)
    owner, held = bus, len(taken)
    while held:
        owner = await die(broker, owner)
        adopted = await owner.adopt("agent", 10, False)
        assert adopted.condemned == []
        if not adopted.must_be_idle:
            continue
        alone = await owner.adopt("agent", 10, True)
        assert alone.condemned == []
        assert len(alone.deliveries) == 1, "one at a time"
        assert await complete(owner, alone.deliveries[0])
        await owner.leave_quarantine(alone.deliveries[0])
        held -= 1
    assert [await broker.status(task) for task in tasks] == ["completed"] * len(tasks)
    assert await broker.hash("quarantine") == {}
    await broker.idle()


async def test_one_consumer_at_a_time_runs_the_quarantined(broker: Broker, bus: EventBus, other: EventBus) -> None:
    for task in ("a", "b"):
        await broker.submit(bus, task)
    await bus.read(["agent"], 10, 5)
    for entry in await broker.entries("agent"):
        key = broker.keys.stream("agent")
        await broker.call("XCLAIM", key, "agent-handler", bus.owner, 0, entry["id"], "RETRYCOUNT", QUARANTINE_AFTER)
    owner = await die(broker, bus)
    assert (await owner.adopt("agent", 10, False)).must_be_idle
    assert (await other.adopt("agent", 10, False)).must_be_idle is False, "another has its turn"
    alone = await owner.adopt("agent", 1, True)
    assert len(alone.deliveries) == 1
    assert (await other.adopt("agent", 10, True)).deliveries == []
    await complete(owner, alone.deliveries[0])
    await owner.leave_quarantine(alone.deliveries[0])
    assert (await other.adopt("agent", 10, False)).must_be_idle
    alone = await other.adopt("agent", 1, True)
    assert len(alone.deliveries) == 1
    await complete(other, alone.deliveries[0])
    await broker.idle()


async def test_the_quarantine_of_a_killed_owner_ends_once_its_entry_is_settled(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A kill between the commit of an entry that ran alone and the next command."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    key = broker.keys.stream("agent")
    await broker.call("XCLAIM", key, "agent-handler", bus.owner, 0, turn.entry, "RETRYCOUNT", QUARANTINE_AFTER)
    owner = await die(broker, bus)
    alone = (await adopt_alone(owner)).deliveries[0]
    deaths = f"agent|{alone.entry.decode()}"
    held = {deaths: "1", "~agent": owner.owner}
    await other.adopt("agent", 10, False)
    await other.adopt("tool", 10, False)
    assert await broker.hash("quarantine") == held, "another may not forget what is under way"
    assert await complete(owner, alone)
    await other.adopt("tool", 10, False)
    assert await broker.hash("quarantine") == held, "each stream looks after its own"
    await other.adopt("agent", 10, False)
    assert await broker.hash("quarantine") == {"~agent": owner.owner}, "its owner lives, and gives its turn back itself"
    await broker.silence(owner)
    await other.adopt("agent", 10, False)
    assert await broker.hash("quarantine") == {}
    await broker.idle()


async def test_an_adoption_without_a_group_forgets_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.call("HSET", broker.keys.quarantine, "~agent", bus.owner, "agent|1-1", 1)
    await broker.silence(bus)
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group("agent"))
    before = await broker.snapshot()
    with pytest.raises(ServerError, match="NOGROUP"):
        await other.adopt("agent", 10, False)
    assert await broker.snapshot() == before


async def test_deliveries_that_were_handed_back_do_not_count(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A rolling update: each replica reads, and stops before it has started anything."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.leave([turn])
    for _ in range(2 * QUARANTINE_AFTER):
        owner = await broker.owner()
        adopted = await owner.adopt("agent", 10, False)
        assert [(taken.deliveries, taken.quarantined) for taken in adopted.deliveries] == [(1, False)]
        await owner.leave(adopted.deliveries)
    assert await complete(other, (await other.adopt("agent", 10, False)).deliveries[0])
    await broker.idle()


async def test_handing_back_an_entry_that_ran_alone_is_not_a_death(broker: Broker, bus: EventBus) -> None:
    """A rolling update in which each replica stops while it runs a long quarantined entry."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    key = broker.keys.stream("agent")
    await broker.call(
        "XCLAIM", key, "agent-handler", bus.owner, 0, turn.entry, "RETRYCOUNT", QUARANTINE_AFTER, "JUSTID"
    )
    owner = await die(broker, bus)
    for _ in range(2 * CONDEMN_AFTER):
        adopted = await adopt_alone(owner)
        assert adopted.condemned == []
        assert [taken.quarantined for taken in adopted.deliveries] == [True]
        await owner.leave(adopted.deliveries)
        owner = await broker.owner()
    last = (await adopt_alone(owner)).deliveries[0]
    assert await complete(owner, last)
    await owner.leave_quarantine(last)
    assert await broker.hash("quarantine") == {}
    await broker.idle()


async def test_a_retry_starts_a_new_count(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await broker.take(bus)
    await broker.silence(bus)
    await other.retry((await other.adopt("agent", 1, False)).deliveries[0], 0, b"{}")
    await broker.pass_time(1)
    await other.promote()
    await broker.take(other)
    assert list((await other.own_pending("agent")).values()) == [1]


async def test_a_dead_owner_adopts_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await broker.take(bus)
    await broker.silence(bus)
    with pytest.raises(Fenced):
        await bus.adopt("agent", 10, False)
    assert len((await other.adopt("agent", 10, False)).deliveries) == 1


async def quarantined(broker: Broker, victim: EventBus, task: str = "poison") -> str:
    """Put the first turn of a task into quarantine, in the hands of an owner that dies. Return its entry."""
    await broker.submit(victim, task)
    turn = await broker.take(victim)
    entry, key = turn.entry.decode(), broker.keys.stream("agent")
    await broker.call("XCLAIM", key, group("agent"), victim.owner, 0, entry, "RETRYCOUNT", QUARANTINE_AFTER, "JUSTID")
    await broker.silence(victim)
    return entry


async def test_an_idle_owner_takes_only_what_must_run_alone(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Anything else would run beside the quarantined entry that comes next."""
    await broker.submit(bus, "t")
    await broker.take(other)
    await broker.silence(other)
    assert (await bus.adopt("agent", 10, True)).deliveries == []
    assert [turn.task for turn in (await bus.adopt("agent", 10, False)).deliveries] == ["t"]


async def test_an_owner_gives_up_its_turn_in_quarantine_if_nothing_is_left_there(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """No other owner could run a quarantined entry while it lives."""
    entry = await quarantined(broker, other)
    assert (await bus.adopt("agent", 1, False)).must_be_idle
    await broker.call("XACK", broker.keys.stream("agent"), group("agent"), entry)
    await broker.call("XDEL", broker.keys.stream("agent"), entry)
    assert not (await bus.adopt("agent", 1, True)).must_be_idle
    assert await broker.hash("quarantine") == {}


async def test_an_adoption_leaves_another_owner_its_turn_in_quarantine(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    third = await broker.owner()
    await quarantined(broker, other)
    assert (await bus.adopt("agent", 1, False)).must_be_idle
    before = await broker.hash("quarantine")
    for idle in (False, True):
        adopted = await third.adopt("agent", 1, idle)
        assert (adopted.deliveries, adopted.must_be_idle) == ([], False)
    assert await broker.hash("quarantine") == before
    assert len((await bus.adopt("agent", 1, True)).deliveries) == 1
