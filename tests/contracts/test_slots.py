"""Limits by key: work above a limit waits on the broker, in order, and every end of work lets the next one start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced
from runtime_core.state_manager.stuck import Stuck, find_stuck, free
from tests.contracts.broker import (
    Broker,
    acquire,
    answer,
    ask,
    bury,
    complete,
    fail,
    question,
    release,
    send,
    suspend,
    withdraw,
)

ONE = ("agent:writer|tenant|a", 1, 0, 0)
TWO = ("agent:writer||", 2, 0, 0)
CALL = ("tool:search||", 1, 0, 0)
RATE = ("tool:search|/60s|", 0, 2, 60_000)


async def take(
    broker: Broker, bus: EventBus, *limits: tuple[str, int, int, int], stream: str = "agent", each: bool = False
) -> tuple[Delivery, bool | None]:
    """Read the next delivery and take its slots."""
    delivery = await broker.take(bus, stream)
    return delivery, await bus.take_slots(delivery, limits or (ONE,), each_attempt=each)


async def started(broker: Broker, bus: EventBus, tasks: Sequence[str], *limits: tuple[str, int, int, int]) -> Delivery:
    """Submit tasks and take their slots: the first one starts, and the others wait."""
    for task in tasks:
        await broker.submit(bus, task)
    first, taken = await take(broker, bus, *limits)
    assert taken is True
    for task in tasks[1:]:
        waiting, taken = await take(broker, bus, *limits)
        assert (waiting.task, taken) == (task, False)
        assert (await broker.task(task))["cur"] == "slot"
    await broker.nothing(bus)
    return first


async def clean(broker: Broker, *, rates: bool = False) -> None:
    """Assert that no slot is held, nothing waits, and nothing of a limit is left except times of starts."""
    assert await broker.hash_fields("waiting") == []
    for pattern in ("slots:*", "waits:*", "held:*", *(() if rates else ("starts:*",))):
        assert await broker.call("KEYS", broker.keys.base + pattern) == [], f"{pattern} is left"
    assert set(await broker.hash("limits")) <= {"seq"}
    await broker.pass_time(20_000)
    bus = broker.buses[0]
    await bus.promote()
    assert await broker.call("ZCARD", broker.keys.timers) == 0


async def test_work_above_a_limit_waits_in_order(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2", "t3"])
    for following in ("t2", "t3", ""):
        assert await complete(bus, turn)
        if not following:
            break
        turn, taken = await take(broker, bus)
        assert (turn.task, turn.attempt, taken) == (following, 1, True)
        await broker.nothing(bus)
    await clean(broker)
    await broker.idle()


async def test_other_keys_do_not_wait(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    await broker.submit(bus, "other")
    other, taken = await take(broker, bus, ("agent:writer|tenant|b", 1, 0, 0))
    assert (other.task, taken) == ("other", True)
    await complete(bus, other)
    await broker.nothing(bus)
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "t2"


async def test_a_run_keeps_its_slot_while_it_waits(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    await suspend(bus, turn, ask("1"))
    await broker.nothing(bus)
    await answer(bus, await broker.take(bus, "tool"))
    resumed = await broker.take(bus)
    assert resumed.task == "t1"
    await complete(bus, resumed)
    assert (await broker.take(bus)).task == "t2"


async def test_taking_twice_for_one_entry_takes_one_slot(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The reply was lost, or the owner died: the adopter of the same entry takes it again."""
    await broker.submit(bus, "t1")
    await broker.submit(bus, "t2")
    turn, taken = await take(broker, bus, TWO)
    assert taken is True
    assert await bus.take_slots(turn, [TWO], each_attempt=False) is True
    assert (await take(broker, bus, TWO))[1] is True
    await broker.silence(bus)
    adopted = await other.adopt("agent", 10, idle=False)
    assert {each.task for each in adopted.deliveries} == {"t1", "t2"}
    for delivery in adopted.deliveries:
        assert await other.take_slots(delivery, [TWO], each_attempt=False) is True
        assert await complete(other, delivery)
    await clean(broker)


async def test_a_wait_that_is_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """The reply was lost. A repeat after the next start finds that others own the work."""
    turn = await started(broker, bus, ["t1"])
    await broker.submit(bus, "t2")
    second, taken = await take(broker, bus)
    assert taken is False
    before = await broker.snapshot()
    assert await bus.take_slots(second, [ONE], each_attempt=False) is False
    assert await broker.snapshot() == before
    await complete(bus, turn)
    before = await broker.snapshot()
    assert await bus.take_slots(second, [ONE], each_attempt=False) is None
    assert await broker.snapshot() == before


async def test_a_dead_owner_takes_no_slot(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t1")
    turn = await broker.take(bus)
    await broker.silence(bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await bus.take_slots(turn, [ONE], each_attempt=False)
    assert await broker.snapshot() == before


async def test_work_that_is_no_longer_wanted_takes_no_slot(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t1")
    turn = await broker.take(bus)
    await bus.cancel("t1", "no more")
    before = await broker.snapshot()
    assert await bus.take_slots(turn, [ONE], each_attempt=False) is None
    assert await broker.snapshot() == before


async def test_a_retry_keeps_the_slot_of_a_run(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    await bus.retry(turn, 100, b"{}")
    await broker.nothing(bus)
    await broker.pass_time(101)
    await bus.promote()
    turn, taken = await take(broker, bus)
    assert (turn.task, turn.attempt, taken) == ("t1", 2, True)
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "t2"


ENDS = ("complete", "fail", "cancel", "deadline", "dead letter", "over limit")


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_of_a_task_starts_the_next(broker: Broker, bus: EventBus, end: str) -> None:
    await broker.submit(bus, "t1", timeout_ms=5_000)
    turn, _ = await take(broker, bus)
    await broker.submit(bus, "t2")
    assert (await take(broker, bus))[1] is False
    match end:
        case "complete":
            await complete(bus, turn)
        case "fail":
            await fail(bus, turn)
        case "over limit":
            await fail(bus, turn, mode="x")
        case "cancel":
            assert await bus.cancel("t1", "no more") == ["cancelled"]
        case "deadline":
            await broker.pass_time(5_001)
            await bus.promote()
        case _:
            await bury(bus, turn)
    turn, taken = await take(broker, bus)
    assert (turn.task, taken) == ("t2", True)
    await complete(bus, turn)
    await clean(broker)


async def test_a_parked_run_keeps_its_slot(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    await bury(bus, turn, "diverged")
    await broker.nothing(bus)
    await bus.cancel("t1", "no more")
    assert (await broker.take(bus)).task == "t2"


async def test_a_reopened_task_takes_its_slot_again(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    await bury(bus, turn)
    second, taken = await take(broker, bus)
    assert (second.task, taken) == ("t2", True)
    (letter,) = await broker.entries("dead")
    assert (await bus.redrive(letter["id"], reopen=True))[0] == "ok"
    again, taken = await take(broker, bus)
    assert (again.task, taken) == ("t1", False)
    await complete(bus, second)
    again, taken = await take(broker, bus)
    assert (again.task, taken) == ("t1", True)
    await complete(bus, again)
    await clean(broker)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_task_may_end_while_it_waits(broker: Broker, bus: EventBus, end: str) -> None:
    """It also frees its instance, and is not in the way of those behind it."""
    await broker.submit(bus, "t1")
    turn, _ = await take(broker, bus)
    for task in ("t2", "next"):
        await broker.submit(bus, task, key="k", timeout_ms=5_000 if task == "t2" else 0)
    assert (await take(broker, bus))[1] is False
    if end == "cancel":
        await bus.cancel("t2", "no more")
    else:
        await broker.pass_time(5_001)
        await bus.promote()
    following, taken = await take(broker, bus)
    assert (following.task, taken) == ("next", False)
    await complete(bus, turn)
    following, taken = await take(broker, bus)
    assert (following.task, taken) == ("next", True)
    await complete(bus, following)
    await clean(broker)
    await broker.idle()


async def test_a_task_that_ends_behind_others_leaves_the_queue_at_once(broker: Broker, bus: EventBus) -> None:
    await started(broker, bus, ["t1", "t2", "t3"])
    assert (await broker.hash("limited")) == {"slots agent:writer": "1", "waits agent:writer": "2"}
    await bus.cancel("t3", "no more")
    assert await broker.call("ZCARD", broker.keys.base + f"waits:{ONE[0]}") == 1
    assert await broker.hash_fields("waiting") == [b"t2|r"]
    assert (await broker.hash("limited")) == {"slots agent:writer": "1", "waits agent:writer": "1"}


async def test_a_waiting_run_keeps_its_instance(broker: Broker, bus: EventBus) -> None:
    """So the order of its events stays."""
    await broker.submit(bus, "t1")
    turn, _ = await take(broker, bus)
    for task in ("t2", "t3"):
        await broker.submit(bus, task, key="k")
    assert (await take(broker, bus))[1] is False
    await broker.nothing(bus)
    await complete(bus, turn)
    for task in ("t2", "t3"):
        turn, taken = await take(broker, bus)
        assert (turn.task, taken) == (task, True)
        await complete(bus, turn)
    await clean(broker)


# -- calls and child runs ----------------------------------------------------------------------------------------------


async def away(broker: Broker, bus: EventBus, task: str = "t1") -> None:
    """A task that holds a slot and has given up the key of its instance."""
    await broker.submit(bus, task, key="k")
    turn, taken = await take(broker, bus, TWO)
    assert taken is True
    assert await suspend(bus, turn, release("1", b'{"n":1}'), question("2"))


async def back(broker: Broker, bus: EventBus, task: str = "t1") -> None:
    """It wants its key back."""
    assert await bus.signal(task, "r:2", b"true") == ["ok"]
    turn = await broker.take(bus)
    assert turn.task == task
    assert await suspend(bus, turn, acquire("3"))


async def test_a_key_held_by_a_run_without_a_slot_returns_to_the_run_that_released_it(
    broker: Broker, bus: EventBus
) -> None:
    """The holder waits for a slot that the other run has, so neither would ever continue."""
    one = ("agent:writer||", 1, 0, 0)
    await away(broker, bus)
    for task in ("t2", "t3"):
        await broker.submit(bus, task, key="k")
    assert (await take(broker, bus, one))[1] is False
    await back(broker, bus)
    assert await broker.mailbox("writer/k") == ["t2|r", "t3|r"]
    assert (await broker.task("t2"))["cur"] == "mail"
    assert await broker.hash_fields("waiting") == []
    turn = await broker.take(bus)
    assert (turn.task, turn.step) == ("t1", "3")
    await broker.nothing(bus)
    for following in ("t2", "t3", ""):
        assert await complete(bus, turn)
        if following:
            turn, taken = await take(broker, bus, one)
            assert (turn.task, turn.attempt, taken) == (following, 1, True)
    await clean(broker)
    await broker.idle()


async def test_a_key_is_returned_when_its_holder_begins_to_wait(broker: Broker, bus: EventBus) -> None:
    """The run wants its key back while the holder is in flight, and does not stand behind other events."""
    await away(broker, bus)
    await away(broker, bus, "t2")
    for task in ("t3", "t4"):
        await broker.submit(bus, task, key="k")
    third = await broker.take(bus)
    await back(broker, bus)
    await back(broker, bus, "t2")
    assert await broker.mailbox("writer/k") == ["t2|r", "t1|r", "t4|r"]
    await bus.cancel("t2", "no more")
    await broker.submit(bus, "other")
    assert (await take(broker, bus, TWO))[1] is True
    assert await bus.take_slots(third, [TWO], each_attempt=False) is False
    assert await broker.mailbox("writer/k") == ["t3|r", "t4|r"]
    turn = await broker.take(bus)
    assert (turn.task, turn.step) == ("t1", "3")
    assert await complete(bus, turn)
    turn, taken = await take(broker, bus, TWO)
    assert (turn.task, taken) == ("t3", True)


async def test_a_holder_that_waits_for_a_slot_keeps_the_key_if_no_run_wants_it_back(
    broker: Broker, bus: EventBus
) -> None:
    await started(broker, bus, ["t1"])
    for task in ("t2", "t3"):
        await broker.submit(bus, task, key="k")
    assert (await take(broker, bus))[1] is False
    assert await broker.mailbox("writer/k") == ["t3|r"]
    assert (await broker.task("t2"))["cur"] == "slot"


async def two_calls(broker: Broker, bus: EventBus, *limits: tuple[str, int, int, int]) -> Delivery:
    """A task with two calls: the first has a slot, the second waits."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    first, taken = await take(broker, bus, *(limits or (CALL,)), stream="tool", each=True)
    assert taken is True
    second, taken = await take(broker, bus, *(limits or (CALL,)), stream="tool", each=True)
    assert (second.run, taken) == ("r/2", False)
    await broker.nothing(bus, "tool")
    return first


@pytest.mark.parametrize("end", ["result", "error", "dead letter", "lost"])
async def test_every_end_of_a_call_starts_the_next(broker: Broker, bus: EventBus, end: str) -> None:
    first = await two_calls(broker, bus)
    match end:
        case "result":
            await answer(bus, first)
        case "error":
            await answer(bus, first, b'{"type":"Broken"}', status=b"E")
        case "dead letter":
            await bury(bus, first)
        case _:
            await broker.call("XDEL", broker.keys.stream("tool"), first.entry)
            assert await bus.call("repair", "call", "t", "r/1", "", 1_700_000_000_000, b'{"type":"Lost"}') == b"OK"
    second, taken = await take(broker, bus, CALL, stream="tool", each=True)
    assert (second.run, second.attempt, taken) == ("r/2", 1, True)
    await answer(bus, second)
    await clean(broker)


async def test_the_end_of_a_task_ends_its_waiting_calls(broker: Broker, bus: EventBus) -> None:
    first = await two_calls(broker, bus)
    await broker.submit(bus, "other")
    await suspend(bus, await broker.take(bus), ask("1"))
    assert (await take(broker, bus, CALL, stream="tool", each=True))[1] is False
    await bus.cancel("t", "no more")
    following, taken = await take(broker, bus, CALL, stream="tool", each=True)
    assert (following.task, taken) == ("other", True)
    assert not await answer(bus, first)
    await broker.nothing(bus, "tool")
    await answer(bus, following)
    await complete(bus, await broker.take(bus))
    await clean(broker)


@pytest.mark.parametrize("step", ["1", "2"])
async def test_a_withdrawn_call_gives_up_its_slot_or_its_wait(broker: Broker, bus: EventBus, step: str) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"), ask("3"), ask("4"))
    calls = [await take(broker, bus, CALL, stream="tool", each=True) for _ in range(3)]
    assert [taken for _, taken in calls] == [True, False, False]
    await answer(bus, await broker.take(bus, "tool"))
    await suspend(bus, await broker.take(bus), withdraw(step), ask("9"))
    assert await bus.is_awaited(calls[0][0]) is (step == "2")
    if step == "2":
        await answer(bus, calls[0][0])
    # The call of step 9 was made meanwhile.
    found = {(await broker.take(bus, "tool")).run for _ in range(2)}
    assert found == {{"1": "r/2", "2": "r/3"}[step], "r/9"}


async def test_a_child_run_waits_like_a_task(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2", "editor", stream="agent"))
    limit = ("agent:editor||", 1, 0, 0)
    first, taken = await take(broker, bus, limit)
    assert taken is True
    second, taken = await take(broker, bus, limit)
    assert (second.run, taken) == ("r/2", False)
    # Its own call ends with it.
    await suspend(bus, first, ask("1"))
    call, taken = await take(broker, bus, CALL, stream="tool", each=True)
    await answer(bus, call)
    await complete(bus, await broker.take(bus))
    # Both the run that waited and the task itself continue.
    runs = [await broker.take(bus) for _ in range(2)]
    assert {each.run for each in runs} == {"r", "r/2"}


async def test_a_run_that_calls_its_own_agent_shares_its_slot(broker: Broker, bus: EventBus) -> None:
    """The called run would wait for its caller forever."""
    await broker.submit(bus, "t")
    turn, _ = await take(broker, bus, ONE)
    await suspend(bus, turn, ask("1", "writer", stream="agent"))
    child, taken = await take(broker, bus, ONE)
    assert (child.run, taken) == ("r/1", True)
    await complete(bus, child)
    assert await broker.call("ZCARD", broker.keys.base + f"slots:{ONE[0]}") == 1
    await complete(bus, await broker.take(bus))
    await clean(broker)


# -- several limits ----------------------------------------------------------------------------------------------------


async def test_work_holds_nothing_while_it_waits_for_another_limit(broker: Broker, bus: EventBus) -> None:
    a, b = ("agent:writer|tenant|a", 1, 0, 0), ("agent:writer|session|s", 1, 0, 0)
    for task in ("has b", "wants both", "wants a"):
        await broker.submit(bus, task)
    first, taken = await take(broker, bus, b)
    assert taken is True
    assert (await take(broker, bus, a, b))[1] is False
    third, taken = await take(broker, bus, a)
    assert taken is True, "the second one holds no slot of a"
    await complete(bus, first)
    await broker.nothing(bus)
    await complete(bus, third)
    second, taken = await take(broker, bus, a, b)
    assert (second.task, taken) == ("wants both", True)
    await complete(bus, second)
    await clean(broker)


async def test_work_that_waits_keeps_its_other_limits(broker: Broker, bus: EventBus) -> None:
    """Nothing uses them meanwhile, so the broker has forgotten them."""
    one, rate = ("agent:writer||", 1, 0, 0), ("agent:writer|/60s|", 0, 1, 60_000)
    for task in ("t1", "t2", "t3"):
        await broker.submit(bus, task)
    turn, _ = await take(broker, bus, one, rate)
    await complete(bus, turn)
    assert (await take(broker, bus, one, rate))[1] is False
    await broker.pass_time(60_001)
    await bus.promote()
    third = await broker.take(bus)
    turn, taken = await take(broker, bus, one, rate)
    assert (turn.task, taken) == ("t2", True)
    assert await bus.take_slots(third, [one], each_attempt=False) is False
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "t3"


# -- rates -------------------------------------------------------------------------------------------------------------


async def test_no_window_has_more_starts_than_the_rate(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), *(ask(str(n)) for n in range(1, 6)))
    for expected in (True, True, False, False, False):
        delivery, taken = await take(broker, bus, RATE, stream="tool", each=True)
        assert taken is expected
        if taken:
            await answer(bus, delivery)
    await broker.pass_time(59_000)
    await bus.promote()
    await broker.nothing(bus, "tool")
    await broker.pass_time(2_000)
    await bus.promote()
    for step in ("3", "4"):
        delivery, taken = await take(broker, bus, RATE, stream="tool", each=True)
        assert (delivery.run, delivery.attempt, taken) == (f"r/{step}", 1, True)
        await answer(bus, delivery)
    await broker.nothing(bus, "tool")
    await broker.pass_time(60_001)
    await bus.promote()
    delivery, taken = await take(broker, bus, RATE, stream="tool", each=True)
    assert (delivery.run, taken) == ("r/5", True)
    await answer(bus, delivery)
    await broker.call("DEL", broker.keys.base + f"starts:{RATE[0]}")
    await clean(broker)


async def test_a_rate_waits_no_longer_than_its_window_after_the_clock_has_gone_back(
    broker: Broker, bus: EventBus
) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), *(ask(str(n)) for n in range(1, 6)))
    for expected in (True, True):
        delivery, taken = await take(broker, bus, RATE, stream="tool", each=True)
        assert taken is expected
        await answer(bus, delivery)
    await broker.pass_time(-3_600_000)
    for _ in range(3):
        assert (await take(broker, bus, RATE, stream="tool", each=True))[1] is False
    await broker.pass_time(59_000)
    await bus.promote()
    await broker.nothing(bus, "tool")
    await broker.pass_time(2_000)
    await bus.promote()
    for step in ("3", "4"):
        delivery, taken = await take(broker, bus, RATE, stream="tool", each=True)
        assert (delivery.run, taken) == (f"r/{step}", True)


async def test_each_attempt_of_a_call_is_a_start(broker: Broker, bus: EventBus) -> None:
    """A call that has a slot of another limit keeps it meanwhile."""
    limits = (CALL, ("tool:search|/60s|", 0, 1, 60_000))
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    first, taken = await take(broker, bus, *limits, stream="tool", each=True)
    assert taken is True
    assert (await take(broker, bus, *limits, stream="tool", each=True))[1] is False
    await bus.retry(first, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    first, taken = await take(broker, bus, *limits, stream="tool", each=True)
    assert (first.run, first.attempt, taken) == ("r/1", 2, False)
    await broker.pass_time(60_001)
    await bus.promote()
    first, taken = await take(broker, bus, *limits, stream="tool", each=True)
    assert (first.run, first.attempt, taken) == ("r/1", 2, True)
    await answer(bus, first)
    await broker.pass_time(60_001)
    await bus.promote()
    second, taken = await take(broker, bus, *limits, stream="tool", each=True)
    assert (second.run, taken) == ("r/2", True)
    await answer(bus, second)
    await clean(broker, rates=True)


async def test_a_run_counts_once_toward_a_rate(broker: Broker, bus: EventBus) -> None:
    rate = ("agent:writer|/60s|", 0, 1, 60_000)
    await broker.submit(bus, "t")
    turn, taken = await take(broker, bus, rate)
    assert taken is True
    await bus.retry(turn, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    turn, taken = await take(broker, bus, rate)
    assert (turn.attempt, taken) == (2, True)


# -- order, and changes of the code ------------------------------------------------------------------------------------


async def test_higher_priorities_go_first(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", in_turn=True)
    turn, _ = await take(broker, bus)
    for task, priority in (("low", 1), ("usual", 5), ("high", 9), ("high too", 9)):
        await broker.submit(bus, task, in_turn=True, priority=priority)
        assert (await take(broker, bus))[1] is False
    for task in ("high", "high too", "usual", "low"):
        await complete(bus, turn)
        turn, taken = await take(broker, bus)
        assert (turn.task, taken) == (task, True)
    await complete(bus, turn)
    await clean(broker)


async def test_no_run_overtakes_waiting_ones(broker: Broker, bus: EventBus) -> None:
    """The rate lets one more start, but the timer has not fired yet."""
    rate = ("agent:writer|/60s|", 0, 1, 60_000)
    turn = await started(broker, bus, ["t1", "t2"], rate)
    await complete(bus, turn)
    await broker.pass_time(60_001)
    await broker.submit(bus, "t3")
    turn, taken = await take(broker, bus, rate)
    assert (turn.task, taken) == ("t3", False)
    turn, taken = await take(broker, bus, rate)
    assert (turn.task, taken) == ("t2", True)


async def test_the_newest_declaration_counts(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2", "t3"])
    await broker.submit(bus, "t4")
    assert (await take(broker, bus, (ONE[0], 3, 0, 0)))[1] is False
    for task in ("t2", "t3"):
        following, taken = await take(broker, bus, (ONE[0], 3, 0, 0))
        assert (following.task, taken) == (task, True)
    await broker.nothing(bus)
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "t4"


async def test_new_code_releases_slots_of_limits_that_it_no_longer_declares(broker: Broker, bus: EventBus) -> None:
    first = await two_calls(broker, bus)
    await bus.retry(first, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    first, taken = await take(broker, bus, ("tool:search|tenant|a", 1, 0, 0), stream="tool", each=True)
    assert (first.run, taken) == ("r/1", True)
    assert (await broker.take(bus, "tool")).run == "r/2"


async def test_a_timer_frees_slots_of_work_that_an_older_release_has_ended(broker: Broker, bus: EventBus) -> None:
    await started(broker, bus, ["t1", "t2"])
    # As a function that knows no slots: the task is over, and its slot stays.
    await broker.call("DEL", broker.keys.task("t1"))
    await bus.promote()
    await broker.nothing(bus)
    await broker.pass_time(10_001)
    await bus.promote()
    assert (await broker.take(bus)).task == "t2"
    assert await broker.call("EXISTS", broker.keys.base + "held:t1") == 0


async def test_many_ended_tasks_at_the_head_delay_no_other(broker: Broker, bus: EventBus) -> None:
    tasks = [f"t{number}" for number in range(130)]
    turn = await started(broker, bus, ["first", *tasks, "last"])
    for task in tasks:
        await broker.call("HSET", broker.keys.task(task), "status", "cancelled")
    await complete(bus, turn)
    await bus.promote()
    assert (await broker.take(bus)).task == "last"


async def test_an_end_changes_nothing_if_the_stream_of_others_has_another_type(broker: Broker, bus: EventBus) -> None:
    first = await two_calls(broker, bus)
    await broker.call("RENAME", broker.keys.stream("tool"), broker.keys.base + "aside")
    await broker.call("SET", broker.keys.stream("tool"), "another program's")
    await bus.cancel("t", "no more")
    assert await broker.status("t") == "cancelled"
    assert first


async def test_waiting_work_starts_later_if_its_stream_is_not_one_now(broker: Broker, bus: EventBus) -> None:
    await started(broker, bus, ["t1", "t2"])
    stream, aside = broker.keys.stream("agent"), broker.keys.base + "aside"
    await broker.call("RENAME", stream, aside)
    await broker.call("SET", stream, "another program's")
    await bus.cancel("t1", "no more")
    await broker.call("RENAME", aside, stream)
    await broker.pass_time(61_000)
    await bus.promote()
    assert (await broker.take(bus)).task == "t2"


async def test_the_timer_of_a_limit_stays_while_others_come_to_wait(broker: Broker, bus: EventBus) -> None:
    await started(broker, bus, ["t1", "t2"])
    due = await broker.call("ZSCORE", broker.keys.timers, f"l|{ONE[0]}")
    await broker.pass_time(5_000)
    await broker.submit(bus, "t3")
    assert (await take(broker, bus))[1] is False
    assert await broker.call("ZSCORE", broker.keys.timers, f"l|{ONE[0]}") == due


async def test_waiting_work_is_not_stuck_but_a_run_that_lost_its_wait_is(broker: Broker, bus: EventBus) -> None:
    await two_calls(broker, bus)
    await started(broker, bus, ["t1", "t2"])
    assert await find_stuck(bus) == []
    await broker.call("DEL", broker.keys.base + "waiting")
    found = await find_stuck(bus)
    assert {(each.what, each.task, each.run) for each in found} == {("call", "t", "r/2"), ("run", "t2", "r")}


async def test_a_slot_that_ended_work_holds_is_found_and_repaired(broker: Broker, bus: EventBus) -> None:
    await started(broker, bus, ["t1", "t2"])
    await broker.call("DEL", broker.keys.task("t1"))
    await broker.call("ZREM", broker.keys.index, "t1")
    (found,) = await find_stuck(bus)
    assert (found.what, found.task, found.run, found.detail) == ("slot", "t1", "r", ONE[0])
    assert await free(bus, found)
    assert (await broker.take(bus)).task == "t2"
    assert await find_stuck(bus) == []
    assert not await free(bus, Stuck(0, "slot", "t2", "r", ONE[0]))


async def test_a_child_run_that_ends_while_it_waits_frees_its_instance(broker: Broker, bus: EventBus) -> None:
    limit = ("agent:editor||", 1, 0, 0)
    await broker.submit(bus, "holder", "editor")
    await take(broker, bus, limit)
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key="e"))
    assert (await take(broker, bus, limit))[1] is False
    await bus.cancel("t", "no more")
    await broker.submit(bus, "next", "editor", "e")
    assert (await broker.take(bus)).task == "next"


async def test_work_that_waits_is_open_work(broker: Broker, bus: EventBus) -> None:
    turn = await started(broker, bus, ["t1", "t2"])
    assert (await bus.idle())[0] == 2
    await asyncio.gather(bus.cancel("t2", "no more"), complete(bus, turn))
    assert (await bus.idle())[0] == 0


async def test_a_task_without_limits_pays_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), send("s"))
    await answer(bus, await broker.take(bus, "tool"))
    assert "p" not in (await broker.task("t")).get("fl", "")
    assert await broker.call("EXISTS", broker.keys.base + "limits") == 0


# -- the newest wins ---------------------------------------------------------------------------------------------------


async def arrive(
    broker: Broker,
    bus: EventBus,
    *,
    replaces: str = "waiting",
    quiet_ms: int = 0,
    limit: tuple[str, int, int, int] = ONE,
) -> tuple[Delivery, bool | None]:
    delivery = await broker.take(bus)
    return delivery, await bus.take_slots(delivery, [limit], each_attempt=False, replaces=replaces, quiet_ms=quiet_ms)


async def submitted(broker: Broker, bus: EventBus, task: str, agent: str = "writer", key: str = "") -> None:
    """Submit a task in a later millisecond than the one before."""
    await broker.submit(bus, task, agent, key)
    await asyncio.sleep(0.002)


async def superseded(broker: Broker, task: str, by: str) -> None:
    final = await broker.final(task)
    assert (final["status"], cast(dict[str, str], final["error"])["type"]) == ("cancelled", "Superseded")
    assert f"task {by}" in cast(dict[str, str], final["error"])["message"]


async def test_the_newest_waiting_run_stays(broker: Broker, bus: EventBus) -> None:
    for task in ("t1", "t2", "t3"):
        await submitted(broker, bus, task)
    turn, taken = await arrive(broker, bus)
    assert taken is True
    for _ in range(2):
        assert (await arrive(broker, bus))[1] is False
    await superseded(broker, "t2", "t3")
    await complete(bus, turn)
    turn, taken = await arrive(broker, bus)
    assert (turn.task, taken) == ("t3", True)
    await complete(bus, turn)
    await clean(broker)
    await broker.idle()


async def test_an_older_run_that_arrives_late_is_replaced(broker: Broker, bus: EventBus) -> None:
    """Its first owner died before it took its slot."""
    for task in ("t1", "late", "newer"):
        await submitted(broker, bus, task)
    assert (await arrive(broker, bus))[1] is True
    late = await broker.take(bus)
    assert (await arrive(broker, bus))[1] is False
    assert await bus.take_slots(late, [ONE], each_attempt=False, replaces="waiting") is None
    await superseded(broker, "late", "newer")
    assert (await broker.task("newer"))["cur"] == "slot"


async def test_the_newest_run_may_end_the_running_one(broker: Broker, bus: EventBus) -> None:
    for task in ("t1", "t2"):
        await submitted(broker, bus, task)
    first, taken = await arrive(broker, bus, replaces="running")
    assert taken is True
    second, taken = await arrive(broker, bus, replaces="running")
    assert taken is True
    await superseded(broker, "t1", "t2")
    assert await broker.call("ZRANGE", broker.keys.base + f"slots:{ONE[0]}", 0, -1) == [b"t2|r"]
    assert not await complete(bus, first)
    assert await complete(bus, second)
    await clean(broker)
    await broker.idle()


async def test_the_newest_event_of_an_instance_starts_next(broker: Broker, bus: EventBus) -> None:
    for task in ("t1", "t2", "t3"):
        await submitted(broker, bus, task, key="k")
    turn, taken = await arrive(broker, bus)
    assert taken is None, "t2 and t3 wait in the mailbox"
    await superseded(broker, "t1", "t3")
    turn, taken = await arrive(broker, bus)
    assert (turn.task, taken) == ("t2", None)
    turn, taken = await arrive(broker, bus)
    assert (turn.task, taken) == ("t3", True)
    await complete(bus, turn)
    await clean(broker)
    await broker.idle()


@pytest.mark.parametrize("key", ["", "k"])
async def test_the_last_one_starts_after_a_quiet_time(broker: Broker, bus: EventBus, key: str) -> None:
    await submitted(broker, bus, "t1", key=key)
    assert (await arrive(broker, bus, quiet_ms=5_000))[1] is False
    await broker.pass_time(3_000)
    await bus.promote()
    await broker.nothing(bus)
    await submitted(broker, bus, "t2", key=key)
    if not key:
        assert (await arrive(broker, bus, quiet_ms=5_000))[1] is False
        await superseded(broker, "t1", "t2")
    await broker.pass_time(2_500)
    await bus.promote()
    if key:
        assert (await arrive(broker, bus, quiet_ms=5_000))[1] is None, "t1 finds t2 in the mailbox"
        await superseded(broker, "t1", "t2")
        assert (await arrive(broker, bus, quiet_ms=5_000))[1] is False
    await broker.nothing(bus)
    await broker.pass_time(5_000)
    await bus.promote()
    turn, taken = await arrive(broker, bus, quiet_ms=5_000)
    assert (turn.task, taken) == ("t2", True)
    assert await bus.take_slots(turn, [ONE], each_attempt=False, replaces="waiting", quiet_ms=5_000) is True
    await complete(bus, turn)
    await clean(broker)
    await broker.idle()


async def test_a_child_run_is_replaced_with_an_error_for_its_caller(broker: Broker, bus: EventBus) -> None:
    limit = ("agent:editor||", 1, 0, 0)
    await submitted(broker, bus, "holder", "editor")
    assert (await arrive(broker, bus, limit=limit))[1] is True
    await submitted(broker, bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key="e"))
    assert (await arrive(broker, bus, limit=limit))[1] is False
    await asyncio.sleep(0.002)
    await submitted(broker, bus, "newer", "editor")
    assert (await arrive(broker, bus, limit=limit))[1] is False
    resumed = await broker.take(bus)
    assert (resumed.task, resumed.step) == ("t", "1")
    assert b"Superseded" in resumed.data
    await complete(bus, resumed)
    await broker.submit(bus, "next", "editor", "e")
    assert (await broker.take(bus)).task == "next"
