"""Writes without an acknowledgement are fenced, too: by their owner, or by the end of a task."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced
from tests.contracts.broker import DIGEST, Broker, ask, bury, complete, emit_pieces, now, question, suspend

VALUE = DIGEST.encode() + b"K1700000000000null"


async def test_a_dead_owner_emits_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.silence(bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await emit_pieces(bus, turn, b'"text"', first=1)
    assert await broker.snapshot() == before


async def call_of_a_dead_owner(broker: Broker, bus: EventBus) -> Delivery:
    """Let the owner take a tool call, and declare it dead."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    await broker.silence(bus)
    return call


async def test_a_dead_owner_reports_no_progress(broker: Broker, bus: EventBus, other: EventBus) -> None:
    call = await call_of_a_dead_owner(broker, bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await bus.progress(call, b"0.5")
    assert await broker.snapshot() == before


async def test_a_dead_owner_starts_no_call(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Its mark would make the adopter report an unknown outcome for a call that never began."""
    call = await call_of_a_dead_owner(broker, bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await bus.mark_started(call)
    assert await broker.snapshot() == before
    [adopted] = (await other.adopt("tool", 10, False)).deliveries
    assert await other.mark_started(adopted)


async def test_a_mark_whose_reply_was_lost_is_repeated(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    assert await bus.mark_started(call), "the same owner may ask again"
    assert await other.mark_started(call) is False


async def test_a_partition_refuses_epochs_below_the_newest_it_has_seen(broker: Broker, bus: EventBus) -> None:
    """An admitter leads in one partition and writes to all. The others learn its epoch only from submits."""
    assert (await broker.submit(bus, "first", epoch="5")).started
    with pytest.raises(Fenced):
        await broker.submit(bus, "second", epoch="4")
    assert await broker.task("second") == {}


async def test_a_new_epoch_is_above_the_one_in_the_store(broker: Broker, bus: EventBus) -> None:
    """After a flush the broker has forgotten the epochs that the recorder's store remembers."""
    store = await bus.lead("record") + 60_000
    epoch = await bus.lead("record", floor=store)
    assert epoch == store + 1
    assert await bus.lead("record", floor=store) == epoch
    assert await bus.lead("record", floor=epoch) == epoch + 1, "its own epoch is not above the one in the store"


async def test_the_state_of_a_busy_instance_is_not_replaced(broker: Broker, bus: EventBus) -> None:
    assert await bus.put_state("writer/k", b'{"n":1}')
    await broker.submit(bus, "t", key="k")
    assert not await bus.put_state("writer/k", b'{"n":2}')
    assert await complete(bus, await broker.take(bus))
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":1}'


async def pin(broker: Broker, task: str) -> None:
    """Give the task a dead letter, so that its end keeps its journal and its missing steps."""
    await broker.call("HSET", broker.keys.task(task), "fl", "l", "lt", 1)


async def test_an_answer_for_an_ended_task_that_keeps_its_journal_writes_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"))
    await pin(broker, "t")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    before = await broker.snapshot()
    await bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b"")
    assert await broker.snapshot() == before


async def test_a_question_of_an_ended_task_that_keeps_its_journal_cannot_be_answered(
    broker: Broker, bus: EventBus
) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), question("1"))
    await pin(broker, "t")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b"true") == ["ended", "cancelled"]
    assert await broker.snapshot() == before


async def ask_in_mid_turn(bus: EventBus, turn: Delivery) -> dict[str, tuple[bytes, bytes]] | None:
    return await bus.ask(turn, now(), "asker", b"", ask("9"), 1)


async def test_a_process_sends_no_request_for_a_turn_that_it_has_lost(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    await broker.submit(bus, "t")
    first = await broker.take(bus)
    await broker.lose_group()
    second = await broker.take(other)
    assert await suspend(bus, first, ask("1"))
    before = await broker.snapshot()
    assert await ask_in_mid_turn(other, second) is None
    assert await broker.snapshot() == before


async def test_an_ended_task_that_keeps_its_journal_asks_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await pin(broker, "t")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    before = await broker.snapshot()
    assert await ask_in_mid_turn(bus, turn) is None
    assert await broker.snapshot() == before


async def test_a_turn_whose_run_moved_is_not_retried(broker: Broker, bus: EventBus) -> None:
    """A task that was cancelled and reopened has another entry; another owner still holds the old one."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("HSET", broker.keys.task("t"), "cur", "99-1")
    assert not await bus.retry(turn, 0, b"")
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    assert (await broker.task("t"))["cur"] == "99-1"


async def test_an_answered_call_is_not_retried(broker: Broker, bus: EventBus) -> None:
    """A repair answered the step while an owner held its entry."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    error = b'{"type":"Lost","message":"lost"}'
    assert await bus.call("repair", "call", "t", "r/1", "", now(), error) == b"OK"
    assert not await bus.retry(call, 0, b"")
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    assert await broker.entries("tool") == []


async def test_an_ended_task_that_keeps_its_journal_is_not_retried(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await pin(broker, "t")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert not await bus.retry(turn, 0, b"")
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    assert await broker.entries("agent") == []


async def test_a_running_task_is_not_erased(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    before = await broker.snapshot()
    assert await bus.erase("t") == "accepted"
    assert await broker.snapshot() == before


async def test_an_erased_task_leaves_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", streamed=1)
    assert await bury(bus, await broker.take(bus))
    output = broker.keys.base + "out:t"
    assert await broker.call("EXISTS", output) == 1
    assert await bus.erase("t") == "OK"
    for key in ("task:t", "out:t", "letters", "index"):
        assert await broker.call("EXISTS", broker.keys.base + key) == 0, key
    assert await broker.entries("dead") == []
    await broker.call("XADD", output, "*", "type", "of a task that has expired")
    assert await bus.erase("t") == "OK"
    assert await bus.erase("t") == "unknown"


async def test_nothing_is_withdrawn_from_an_ended_task(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await complete(bus, await broker.take(bus))
    before = await broker.snapshot()
    assert not await bus.withdraw_request("t")
    assert await broker.snapshot() == before
