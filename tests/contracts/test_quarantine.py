"""A delivery count does not quarantine an entry: only deaths of owners that ran it alone do."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import CONDEMN_AFTER, QUARANTINE_AFTER, Adopted, Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced, ServerError
from runtime_core.state_manager.backlog import find_quarantines
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, group, now

VALUE = f'{DIGEST}K1700000000000"done"'.encode()
MOST_WAITS = 100
"""See `ask.lua`."""


async def die(broker: Broker, victim: EventBus) -> EventBus:
    """The owner dies; another comes."""
    successor = await broker.owner()
    await broker.silence(victim)
    return successor


async def adopt_alone(owner: EventBus) -> Adopted:
    """Take entries as a consumer does: first those outside the quarantine, then one alone."""
    adopted = await owner.adopt("agent", 10, False)
    return await owner.adopt("agent", 1, True) if adopted.must_be_idle else adopted


async def test_an_entry_runs_alone_and_then_becomes_a_dead_letter(broker: Broker, bus: EventBus) -> None:
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


async def test_entries_that_kill_no_process_never_become_dead_letters(broker: Broker, bus: EventBus) -> None:
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


async def test_an_owner_gives_up_its_turn_in_quarantine_if_it_is_empty(
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


async def delivered_again(broker: Broker, victim: EventBus, owner: EventBus, times: int = QUARANTINE_AFTER) -> Delivery:
    """Start a task whose first turn was delivered so often. Return it in the hands of the owner."""
    await broker.submit(victim, "t")
    turn = await broker.take(victim)
    key = broker.keys.stream("agent")
    await broker.call("XCLAIM", key, group("agent"), victim.owner, 0, turn.entry, "RETRYCOUNT", times - 1, "JUSTID")
    await broker.silence(victim)
    (adopted,) = (await adopt_alone(owner)).deliveries
    assert adopted.deliveries == times
    assert adopted.quarantined == (times > QUARANTINE_AFTER)
    return adopted


async def count(owner: EventBus) -> int:
    (found,) = (await owner.own_pending("agent")).values()
    return found


async def asks(owner: EventBus, turn: Delivery, step: str) -> dict[str, tuple[bytes, bytes]] | None:
    """Request a call in mid-turn, with the count that the delivery has."""
    return await owner.ask(turn, now(), "asker", b"", ask(step), 1)


@pytest.mark.parametrize("deliveries", [2, QUARANTINE_AFTER, QUARANTINE_AFTER + 1])
@pytest.mark.parametrize("kind", ["a step", "a model call"])
async def test_a_new_step_clears_the_deaths_of_its_turn(
    broker: Broker, bus: EventBus, other: EventBus, kind: str, deliveries: int
) -> None:
    """Each kill meets another step of a long turn. None of them is to blame."""
    turn = await delivered_again(broker, bus, other, deliveries)
    write = other.record if kind == "a step" else other.settle_call
    assert await write(turn, "1", VALUE) is not None
    assert turn.deliveries == 1
    assert await count(other) == 1
    assert f"agent|{turn.entry.decode()}" not in await broker.hash("quarantine")
    successor = await die(broker, other)
    (adopted,) = (await successor.adopt("agent", 1, False)).deliveries
    assert (adopted.deliveries, adopted.quarantined) == (2, False)


@pytest.mark.parametrize("kind", ["a step", "a model call"])
async def test_a_step_that_is_journaled_already_clears_nothing(
    broker: Broker, bus: EventBus, other: EventBus, kind: str
) -> None:
    """Code that kills its process behind a step comes there each time."""
    turn = await delivered_again(broker, bus, other)
    for step in (VALUE, VALUE[:-1] + b"!"):
        turn.deliveries = 1
        await other.record(turn, "1", VALUE)
        turn.deliveries = QUARANTINE_AFTER
        write = other.record if kind == "a step" else other.settle_call
        assert await write(turn, "1", step) is not None
        assert await count(other) == QUARANTINE_AFTER


async def test_a_wait_clears_the_deaths_of_its_turn(broker: Broker, bus: EventBus, other: EventBus) -> None:
    turn = await delivered_again(broker, bus, other, QUARANTINE_AFTER + 1)
    assert await asks(other, turn, "c1") == {}
    assert await count(other) == 1
    assert f"agent|{turn.entry.decode()}" not in await broker.hash("quarantine")
    owner = other
    for _ in range(3 * QUARANTINE_AFTER):
        owner = await die(broker, owner)
        (turn,) = (await owner.adopt("agent", 1, False)).deliveries
        assert (turn.deliveries, turn.quarantined) == (2, False)
        assert await asks(owner, turn, "c1") == {}, "it waits for the same answer again"
    await answer(owner, await broker.take(owner, "tool"))
    for deliveries in range(2, QUARANTINE_AFTER + 1):
        owner = await die(broker, owner)
        (turn,) = (await owner.adopt("agent", 1, False)).deliveries
        assert turn.deliveries == deliveries
        assert await asks(owner, turn, "c1"), "the answer is recorded, so the code behind it runs"
        assert await count(owner) == deliveries
    owner = await die(broker, owner)
    assert (await owner.adopt("agent", 1, False)).must_be_idle


async def test_waits_clear_deaths_only_so_often(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Code may kill its process while it waits, too. Then it runs alone, and still leaves quarantine to wait."""
    turn = await delivered_again(broker, bus, other, QUARANTINE_AFTER + 1)
    key, place = broker.keys.stream("agent"), f"agent|{turn.entry.decode()}"
    deliveries = QUARANTINE_AFTER + 1

    async def counted_after(step: str) -> int:
        claim = ("XCLAIM", key, group("agent"), other.owner, 0, turn.entry, "RETRYCOUNT", deliveries, "JUSTID")
        await broker.call(*claim)
        await broker.call("HSET", broker.keys.quarantine, place, 1)
        turn.deliveries = deliveries
        await asks(other, turn, step)
        assert place not in await broker.hash("quarantine"), "the agent that it waits for may need this process"
        return await count(other)

    for number in range(MOST_WAITS):
        assert await counted_after(f"c{number % 3}") == 1
    assert await counted_after("c1") == deliveries
    assert await counted_after("c4") == deliveries


async def test_a_turn_that_was_delivered_once_has_nothing_to_clear(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await asks(bus, turn, "c1")
    await asks(bus, turn, "c1")
    assert "cw" not in await broker.task("t")


async def test_progress_does_not_take_an_entry_from_its_owner(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A recreated group gave it to another owner, which lives."""
    turn = await delivered_again(broker, bus, other)
    third, key = await broker.owner(), broker.keys.stream("agent")
    await broker.call("XCLAIM", key, group("agent"), third.owner, 0, turn.entry, "RETRYCOUNT", 2, "JUSTID")
    assert await other.record(turn, "1", VALUE) == VALUE
    assert await count(third) == 2
    assert await other.own_pending("agent") == {}


async def test_progress_is_stored_while_the_group_is_lost(broker: Broker, bus: EventBus, other: EventBus) -> None:
    turn = await delivered_again(broker, bus, other)
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group("agent"))
    assert await other.record(turn, "1", VALUE) == VALUE
    turn.deliveries = QUARANTINE_AFTER
    assert await other.settle_call(turn, "2", VALUE) == (VALUE, "")
    turn.deliveries = QUARANTINE_AFTER
    assert await asks(other, turn, "c1") == {}


async def test_a_handler_that_runs_a_delivery_alone_is_shown_with_what_waits_for_it(
    broker: Broker, bus: EventBus
) -> None:
    """Nothing else tells why a lone handler takes no work."""
    for task in ("poison", "second", "third"):
        await broker.submit(bus, task)
    await bus.read(["agent"], 10, 5)
    key = broker.keys.stream("agent")
    for entry in await broker.entries("agent"):
        await broker.call("XCLAIM", key, "agent-handler", bus.owner, 0, entry["id"], "RETRYCOUNT", QUARANTINE_AFTER)
    owner = await die(broker, bus)
    await broker.submit(owner, "slow")
    slow = await broker.take(owner)
    assert await find_quarantines(owner) == []
    assert (await owner.adopt("agent", 10, False)).must_be_idle
    (found,) = await find_quarantines(owner)
    assert (found.stream, found.handler, found.task, found.held, found.behind) == ("agent", owner.owner, "poison", 1, 2)
    assert "until 1 other delivery ends (the first: a turn of agent 'writer' of task slow, taken " in str(found)
    assert f"of task poison, delivered {QUARANTINE_AFTER} times, alone" in str(found)
    await complete(owner, slow)
    (found,) = await find_quarantines(owner)
    assert str(found).startswith(f"{owner.owner} is about to run a turn of agent 'writer' of task poison, delivered ")
    (adopted,) = (await owner.adopt("agent", 1, True)).deliveries
    (found,) = await find_quarantines(owner)
    assert (found.task, found.held, found.first, found.behind) == (adopted.task, 0, "", 2)
    assert f"{owner.owner} has run a turn of agent 'writer' of task {adopted.task}, delivered " in str(found)
    successor = await die(broker, owner)
    assert await find_quarantines(successor) == [], "another one takes its turn"


async def test_a_handler_alone_is_distinguished_from_one_of_several(broker: Broker, bus: EventBus) -> None:
    """Others read on, so nothing waits for the delivery that runs alone."""
    await broker.submit(bus, "poison")
    turn = await broker.take(bus)
    key = broker.keys.stream("agent")
    await broker.call("XCLAIM", key, "agent-handler", bus.owner, 0, turn.entry, "RETRYCOUNT", QUARANTINE_AFTER)
    owner = await broker.owner()
    await broker.silence(bus)
    assert (await adopt_alone(owner)).deliveries
    (found,) = await find_quarantines(owner)
    assert found.others == 0
    assert str(found).endswith("it is the only handler, so all other work waits")
    another = await broker.owner()
    await another.join("agent")  # as every consumer does: before Redis 7.2 a read without an entry adds none
    await another.read(["agent"], 1, 5)
    (found,) = await find_quarantines(owner)
    assert found.others == 1
    assert str(found).endswith("other handlers read on")
