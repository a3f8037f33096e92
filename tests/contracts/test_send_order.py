"""The sends of one turn are applied in program order, and the instance is released last."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, complete, send, suspend


async def drain(broker: Broker, bus: EventBus) -> list[str]:
    """Complete turn after turn. Return the tasks in the order in which they came."""
    order = []
    while (await broker.entries("agent")) != []:
        turn = await broker.take(bus)
        order.append(turn.task)
        assert await complete(bus, turn)
    return order


async def test_two_sends_to_one_instance_keep_their_order(broker: Broker, bus: EventBus) -> None:
    """This holds for the turn that ends its run."""
    await broker.submit(bus, "t")
    notes = [send(f"n{number}", key="k", step=str(number)) for number in range(5)]
    assert await complete(bus, await broker.take(bus), *notes)
    assert await drain(broker, bus) == ["n0", "n1", "n2", "n3", "n4"]
    await broker.idle()


async def test_sends_of_a_turn_that_waits_keep_their_order(broker: Broker, bus: EventBus) -> None:
    """A message before a question to the same instance comes before it."""
    await broker.submit(bus, "t")
    parts = (send("n0", key="k", step="0"), ask("1", "editor", stream="agent", key="k"), send("n2", key="k", step="2"))
    assert await suspend(bus, await broker.take(bus), *parts)
    seen = []
    for _ in range(4):
        turn = await broker.take(bus)
        seen.append((turn.task, turn.run))
        assert await complete(bus, turn)
    assert [run for run in seen if run != ("t", "r")] == [("n0", "r"), ("t", "r/1"), ("n2", "r")]


async def test_a_message_to_itself_is_queued_behind_waiting_ones(broker: Broker, bus: EventBus) -> None:
    """The release comes last, so a message that an agent sends itself does not overtake waiting events."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "waits", key="k")
    turn = await broker.take(bus)
    assert await complete(bus, turn, send("own", "writer", "k", step="1"))
    assert await drain(broker, bus) == ["waits", "own"]
    await broker.idle()


async def test_a_send_to_itself_waits_for_its_own_end(broker: Broker, bus: EventBus) -> None:
    """A turn that waits is not over."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), send("own", "writer", "k", step="1"), ask("2"))
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["own|r"]


async def test_messages_without_a_subscriber_are_kept(broker: Broker, bus: EventBus) -> None:
    """A message to an agent that no app has declared starts nothing and is a dead letter; the commit stands."""
    await broker.submit(bus, "t")
    assert await complete(bus, await broker.take(bus), send("note", "poet", step="1"))
    assert await broker.status("t") == "completed"
    assert await broker.status("note") == ""
    [letter] = await broker.entries("dead")
    assert (letter["reason"], letter["name"], letter["taskid"]) == ("unknown_name", "poet", "t")


async def test_a_message_is_sent_once(broker: Broker, bus: EventBus) -> None:
    """A turn that is replayed names the same task for the same step."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), send("note", step="1"), ask("2"))
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", 1_700_000_000_000, b"1", b"[]", 1)
    turns = {turn.task: turn for turn in [await broker.take(bus), await broker.take(bus)]}
    assert await complete(bus, turns["t"], send("note", step="1"))
    assert len(await broker.entries("agent")) == 1
    assert await complete(bus, turns["note"])
    await broker.idle()
