"""A request that would complete a circle of waiting runs is rejected."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.state_manager.stuck import find_circles
from tests.contracts.broker import Broker, answer, ask, complete, now, suspend


def ask_agent(step: str, name: str, key: str, wait: str = "!") -> list[Argument]:
    return ask(step, name, stream="agent", key=key, wait=wait)


async def start(broker: Broker, bus: EventBus, task: str, agent: str, key: str) -> Delivery:
    await broker.submit(bus, task, agent, key)
    turn = await broker.take(bus)
    assert (turn.task, turn.run) == (task, "r")
    return turn


async def refusal(broker: Broker, bus: EventBus, task: str, step: str = "1", run: str = "r") -> str:
    """Return the message of the Deadlock error that the step got; empty if it still waits."""
    key = f"task:{task}" if run == "r" else f"run:{task}/{run}"
    value = (await broker.hash(key)).get(f"j:{step}")
    if value is None:
        return ""
    error = json.loads(value[22:])
    assert (value[8], error["type"]) == ("E", "Deadlock")
    return str(error["message"])


async def test_a_deadlock_of_two_agents_is_found(broker: Broker, bus: EventBus) -> None:
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    assert await refusal(broker, bus, "one") == "", "the first one only waits"
    await suspend(bus, two, ask_agent("1", "writer", "k"))
    said = await refusal(broker, bus, "two")
    assert "writer/k (task one), which waits for editor/k (task two), which waits for writer/k" in said
    resumed = await broker.take(bus)
    assert (resumed.task, resumed.kind, resumed.step) == ("two", "resume", "1")
    await complete(bus, resumed)
    child = await broker.take(bus)
    assert (child.task, child.run) == ("one", "r/1"), "the first request has its turn"
    await complete(bus, child)
    await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_deadlock_of_three_agents_is_found(broker: Broker, bus: EventBus) -> None:
    turns = [await start(broker, bus, f"t{n}", "writer", f"k{n}") for n in range(3)]
    for n in (0, 1, 2):
        await suspend(bus, turns[n], ask_agent("1", "writer", f"k{(n + 1) % 3}"))
    assert await refusal(broker, bus, "t0") == await refusal(broker, bus, "t1") == ""
    said = await refusal(broker, bus, "t2")
    assert [f"writer/k{n} (task t{n})" in said for n in range(3)] == [True, True, True]


async def test_a_deadlock_of_two_branches_of_one_task_is_found(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask_agent("1", "writer", "k", "g0"), ask_agent("2", "editor", "k", "g0"))
    one, two = await broker.take(bus), await broker.take(bus)
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    await suspend(bus, two, ask_agent("1", "writer", "k"))
    assert await refusal(broker, bus, "t", run="r/1") == ""
    assert await refusal(broker, bus, "t", run="r/2")


async def test_a_deadlock_through_agents_without_a_key_is_found(broker: Broker, bus: EventBus) -> None:
    """The instance is held by a run that waits for a child, and only that child asks."""
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask("1", "desk", stream="agent"))
    desk = await broker.take(bus)
    await suspend(bus, desk, ask_agent("1", "editor", "k"))
    await suspend(bus, two, ask("1", "desk", stream="agent"))
    desk = await broker.take(bus)
    await suspend(bus, desk, ask_agent("1", "writer", "k"))
    assert await refusal(broker, bus, "two", run="r/1")


async def test_a_deadlock_of_requests_in_mid_turn_is_found(broker: Broker, bus: EventBus) -> None:
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    assert await bus.ask(one, now(), "client", b"", ask_agent("1", "editor", "k"), 1) == {}
    answers = await bus.ask(two, now(), "client", b"", ask_agent("1", "writer", "k"), 1)
    assert answers is not None
    assert json.loads(answers["1"][0][22:])["type"] == "Deadlock"
    assert await complete(bus, two)
    await complete(bus, await broker.take(bus))
    assert await complete(bus, one)
    await broker.idle()


async def two_call_backs(broker: Broker, bus: EventBus) -> tuple[Delivery, Delivery]:
    """A run of writer/k asks editor/e and a desk, which calls back into writer/k: that turn, and the editor's."""
    one = await start(broker, bus, "one", "writer", "k")
    await suspend(bus, one, ask_agent("1", "editor", "e", "g0"), ask("2", "desk", stream="agent", wait="g0"))
    editor, desk = await broker.take(bus), await broker.take(bus)
    await suspend(bus, desk, ask_agent("1", "writer", "k"))
    back = await broker.take(bus)
    assert back.run == "r/2/1", "called back at once, since its caller waits"
    return back, editor


async def finish(broker: Broker, bus: EventBus, *runs: str) -> None:
    for run in runs:
        turn = await broker.take(bus)
        assert turn.run == run
        assert await complete(bus, turn)
    await broker.idle()


async def test_a_second_reentrant_call_starts_when_the_first_one_waits(broker: Broker, bus: EventBus) -> None:
    """The first reentrant call waits for an instance whose holder makes the second one: no circle."""
    back, editor = await two_call_backs(broker, bus)
    await suspend(bus, editor, ask_agent("1", "writer", "k"))
    assert (await broker.hash("run:one/r/1/1"))["cur"] == "nest", "the first one is in a turn"
    await suspend(bus, back, ask_agent("1", "editor", "e"))
    assert await refusal(broker, bus, "one", run="r/2/1") == ""
    await finish(broker, bus, "r/1/1", "r/1", "r/2/1/1", "r/2/1", "r/2", "r")


async def test_a_second_reentrant_call_starts_when_the_first_one_asks_in_mid_turn(
    broker: Broker, bus: EventBus
) -> None:
    """The first reentrant call keeps its turn while it waits."""
    back, editor = await two_call_backs(broker, bus)
    await suspend(bus, editor, ask_agent("1", "writer", "k"))
    assert await bus.ask(back, now(), "client", b"", ask_agent("1", "editor", "e"), 1) == {}
    for run in ("r/1/1", "r/1", "r/2/1/1"):
        turn = await broker.take(bus)
        assert turn.run == run
        assert await complete(bus, turn)
    assert await complete(bus, back)
    await finish(broker, bus, "r/2", "r")


async def test_reentrant_calls_are_not_part_of_a_circle(broker: Broker, bus: EventBus) -> None:
    """The first reentrant call waits in the mailbox of an instance whose holder calls back, too."""
    one = await start(broker, bus, "one", "writer", "k")
    await suspend(bus, one, ask_agent("1", "editor", "b", "g0"), ask_agent("2", "desk", "c", "g0"))
    editor, desk = await broker.take(bus), await broker.take(bus)
    await suspend(bus, editor, ask_agent("1", "writer", "k"))
    await suspend(bus, await broker.take(bus), ask_agent("1", "desk", "c"))
    await suspend(bus, desk, ask_agent("1", "writer", "k", "g0"), ask_agent("2", "writer", "k", "g0"))
    assert await refusal(broker, bus, "one", "2", "r/2") == ""
    await finish(broker, bus, "r/2/1", "r/2/2", "r/2", "r/1/1/1", "r/1/1", "r/1", "r")


async def test_no_request_is_refused_without_a_circle(broker: Broker, bus: EventBus) -> None:
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    three = await start(broker, bus, "three", "writer", "other")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    await suspend(bus, three, ask_agent("1", "writer", "k"))
    await suspend(bus, two, ask("1"))
    assert [await refusal(broker, bus, task) for task in ("one", "two", "three")] == ["", "", ""]
    assert await answer(bus, await broker.take(bus, "tool"))
    for task in ("two", "one", "one", "three", "three"):
        turn = await broker.take(bus)
        assert turn.task == task
        await complete(bus, turn)
    await broker.idle()


async def test_an_abandoned_request_is_not_part_of_a_circle(broker: Broker, bus: EventBus) -> None:
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    await broker.call("HDEL", broker.keys.base + "task:one", "m:1")
    await suspend(bus, two, ask_agent("1", "writer", "k"))
    assert await refusal(broker, bus, "two") == ""


async def test_a_late_copy_of_a_waiting_run_does_not_hide_a_circle(broker: Broker, bus: EventBus) -> None:
    """A process had the run in hand when the server lost its last writes, and commits it while it waits again."""
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    late = Delivery(0, "agent", b"1-1", [b"h", b"1\nstart\none\nr/1\neditor\nk\n1\n0"])
    assert not await complete(bus, late)
    await suspend(bus, two, ask_agent("1", "writer", "k"))
    assert "which waits for editor/k (task two)" in await refusal(broker, bus, "two")


@pytest.mark.parametrize("end", ["cancel", "complete"])
async def test_an_ended_task_leaves_the_queue(broker: Broker, bus: EventBus, end: str) -> None:
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    assert await broker.hash("line:one") == {"r/1": "editor/k"}
    if end == "cancel":
        await bus.cancel("one", "no more")
        assert await broker.hash("line:one") == {}
        await complete(bus, two)
    else:
        await complete(bus, two)
        assert await broker.hash("line:one") == {}
        await complete(bus, await broker.take(bus))
        await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_another_type_in_place_of_the_line_changes_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.call("SET", broker.keys.base + "line:one", "not ours")
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    assert await suspend(bus, one, ask_agent("1", "editor", "k"))
    assert await suspend(bus, two, ask_agent("1", "writer", "k"))
    assert await refusal(broker, bus, "two") == "", "what cannot be read is not followed"


async def test_doctor_names_a_circle_that_was_not_refused(broker: Broker, bus: EventBus) -> None:
    """An older release does not list who waits."""
    one = await start(broker, bus, "one", "writer", "k")
    two = await start(broker, bus, "two", "editor", "k")
    await suspend(bus, one, ask_agent("1", "editor", "k"))
    assert await find_circles([bus]) == []
    await broker.call("DEL", broker.keys.base + "line:one")
    await suspend(bus, two, ask_agent("1", "writer", "k"))
    assert await find_circles([bus]) == [
        "editor/k (task one) waits for writer/k (task two) waits for editor/k (task one)"
    ]
