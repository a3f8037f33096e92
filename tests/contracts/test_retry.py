"""A retry waits on the broker, keeps its instance busy, and is promoted once."""

from __future__ import annotations

import json

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, complete, suspend


async def test_a_retried_event_keeps_its_place(broker: Broker, bus: EventBus) -> None:
    for task in ("first", "second"):
        await broker.submit(bus, task, key="k")
    turn = await broker.take(bus)
    assert await bus.retry(turn, 500, b'{"type":"Broken"}')
    assert await broker.entries("agent") == []
    await broker.nothing(bus)
    await broker.submit(bus, "third", key="k")
    assert (await bus.promote())[0] == 0, "it is not due"
    await broker.pass_time(501)
    assert (await bus.promote())[0] == 1
    for task in ("first", "second", "third"):
        turn = await broker.take(bus)
        assert turn.task == task
        await broker.nothing(bus)
        await complete(bus, turn)
    await broker.idle()


async def test_attempts_and_errors_travel_with_the_event(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", context=b'{"tenant":"x"}')
    for attempt in (1, 2, 3):
        turn = await broker.take(bus)
        assert (turn.attempt, turn.data, turn.context) == (attempt, b'"hi"', b'{"tenant":"x"}')
        errors = json.loads(turn.errors) if turn.errors else []
        assert [error["n"] for error in errors] == list(range(1, attempt))
        assert await bus.retry(turn, 100, b'{"n":%d}' % attempt)
        await broker.pass_time(101)
        await bus.promote()
    turn = await broker.take(bus)
    assert await bus.retry(turn, 100, b"", counts=False)
    await broker.pass_time(101)
    await bus.promote()
    assert (await broker.take(bus)).attempt == 4


async def test_a_resume_may_be_retried(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1"))
    await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await bus.retry(turn, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    again = await broker.take(bus)
    assert (again.kind, again.step, again.data, again.turn) == (turn.kind, turn.step, turn.data, turn.turn)
    await complete(bus, again)
    await broker.idle()


async def test_a_retry_is_promoted_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Any number of consumers promote what is due."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    await bus.retry(await broker.take(bus, "tool"), 0, b"{}")
    await broker.pass_time(1)
    assert [(await bus.promote())[0], (await other.promote())[0]] == [1, 0]
    assert len(await broker.entries("tool")) == 1


async def test_a_retry_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """This also holds if the first one was promoted meanwhile."""
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await bus.retry(turn, 0, b"{}")
    before = await broker.snapshot()
    assert not await bus.retry(turn, 0, b"{}")
    assert await broker.snapshot() == before
    await broker.pass_time(1)
    await bus.promote()
    before = await broker.snapshot()
    assert not await bus.retry(turn, 0, b"{}")
    assert await broker.snapshot() == before


async def test_a_commit_after_the_retry_changes_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await bus.retry(turn, 0, b"{}")
    before = await broker.snapshot()
    assert not await complete(bus, turn, state=b"1")
    assert await broker.snapshot() == before


async def test_a_retry_of_an_ended_task_is_forgotten(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    await bus.retry(await broker.take(bus), 1000, b"{}")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    turn = await broker.take(bus)
    assert turn.task == "next", "the instance is free at once"
    await broker.pass_time(2000)
    assert (await bus.promote())[0] == 0
    await complete(bus, turn)
    await broker.idle()


async def test_a_call_whose_step_was_answered_is_not_promoted(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Two owners hold one call (the group was lost): one retries it, the other answers it."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    first = await broker.take(bus, "tool")
    await broker.lose_group("tool")
    second = await broker.take(other, "tool")
    assert await bus.retry(first, 100, b"{}")
    assert await answer(other, second)
    await broker.pass_time(101)
    await bus.promote()
    assert await broker.entries("tool") == []
    await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_timer_that_is_listed_twice_adds_one_entry(broker: Broker, bus: EventBus) -> None:
    """Two entries are in flight on one instance: the run's own state says that it waits for its retry."""
    await broker.submit(bus, "t", key="k")
    await bus.retry(await broker.take(bus), 0, b"{}")
    (member,) = await broker.hash_fields("delayed")
    packed = await broker.call("HGET", broker.keys.base + "delayed", member)
    assert isinstance(packed, bytes)
    await broker.call("HSET", broker.keys.base + "delayed", "e|agent|1-1", packed)
    await broker.call("ZADD", broker.keys.timers, 0, "e|agent|1-1")
    await broker.pass_time(1)
    assert (await bus.promote())[0] == 2
    turn = await broker.take(bus)
    await broker.nothing(bus)
    assert await complete(bus, turn)
    await broker.idle()
