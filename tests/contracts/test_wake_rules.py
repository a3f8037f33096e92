"""When a waiting run resumes: on which results, with one resume, and without missing a concurrent result."""

from __future__ import annotations

from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, suspend


async def resumes(broker: Broker) -> int:
    return sum(entry["h"].split("\n")[1] == "resume" for entry in await broker.entries("agent"))


async def waits(broker: Broker, bus: EventBus, *parts: list[Argument]) -> dict[str, Delivery]:
    """A task `t` whose first turn waits like this. Return its calls by step."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), *parts)
    calls = [await broker.take(bus, "tool") for _ in parts]
    return {call.run.rpartition("/")[2]: call for call in calls}


async def journal(broker: Broker, task: str = "t") -> set[str]:
    return {name[2:] for name in await broker.task(task) if name.startswith("j:")}


async def test_any_of_several_wakes(broker: Broker, bus: EventBus) -> None:
    """A branch that can continue does not wait for the others."""
    calls = await waits(broker, bus, ask("1", wait="!"), ask("2", wait="!"))
    assert await answer(bus, calls["2"], b'"two"')
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "2")
    assert turn.data.startswith(DIGEST.encode() + b"K")
    assert turn.data.endswith(b'"two"')
    assert await broker.status("t") == "running"


async def test_two_results_append_one_resume(broker: Broker, bus: EventBus) -> None:
    """The second result finds a resume on its way; both are in the journal."""
    calls = await waits(broker, bus, ask("1", wait="!"), ask("2", wait="!"))
    assert await answer(bus, calls["1"])
    assert await answer(bus, calls["2"])
    assert await resumes(broker) == 1
    assert await journal(broker) == {"1", "2"}


async def test_a_step_may_wake_no_branch(broker: Broker, bus: EventBus) -> None:
    """A step that is awaited only after another one does not wake the run needlessly."""
    calls = await waits(broker, bus, ask("1", wait="0"), ask("2", wait="!"))
    assert await answer(bus, calls["1"])
    assert await resumes(broker) == 0
    assert await answer(bus, calls["2"])
    assert await resumes(broker) == 1
    assert await journal(broker) == {"1", "2"}


async def test_a_group_wakes_with_its_last_result(broker: Broker, bus: EventBus) -> None:
    """Three parallel tools wake the agent once."""
    calls = await waits(broker, bus, *(ask(step, wait="g1") for step in "123"))
    for step, expected in (("2", 0), ("3", 0), ("1", 1)):
        assert await answer(bus, calls[step])
        assert await resumes(broker) == expected
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_two_groups_wake_each_for_itself(broker: Broker, bus: EventBus) -> None:
    """Each branch of a gather has its own count."""
    calls = await waits(broker, bus, ask("1", wait="g1"), ask("2", wait="g1"), ask("3", wait="g2"))
    assert await answer(bus, calls["1"])
    assert await resumes(broker) == 0
    assert await answer(bus, calls["3"])
    assert await resumes(broker) == 1


async def test_a_dead_letter_counts_as_a_result(broker: Broker, bus: EventBus) -> None:
    """The group's last step failed permanently; the run must still resume."""
    calls = await waits(broker, bus, ask("1", wait="g1"), ask("2", wait="g1"))
    assert await answer(bus, calls["1"])
    assert await bury(bus, calls["2"])
    assert await resumes(broker) == 1


async def test_a_result_counts_once(broker: Broker, bus: EventBus) -> None:
    """The group of consumers was lost and created again, so an answered call is delivered again."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), *(ask(step, wait="g1") for step in "123"))
    first = await broker.take(bus, "tool")
    # Its entry is put back under its id, as a server does that has lost the acknowledgement.
    fields = (await broker.entries("tool"))[0]
    assert await answer(bus, first)
    rest = await broker.entries("tool")
    await broker.call("DEL", broker.keys.stream("tool"))
    for entry in (fields, *rest):
        named = {name: value for name, value in entry.items() if name != "id"}
        flat = [item for pair in named.items() for item in pair]
        await broker.call("XADD", broker.keys.stream("tool"), entry["id"], *flat)
    await broker.call("XGROUP", "CREATE", broker.keys.stream("tool"), "tool-handler", "0")
    assert not await answer(bus, await broker.take(bus, "tool"), b'"again"')
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await resumes(broker) == 0
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await resumes(broker) == 1
    assert (await broker.task("t"))["j:1"].endswith('"found"')


async def test_a_result_during_the_turn_is_not_missed(broker: Broker, bus: EventBus) -> None:
    """It appends no resume, since the run is in flight. The commit that suspends the run finds the result and does."""
    calls = await waits(broker, bus, ask("1", wait="!"), ask("2", wait="!"))
    assert await answer(bus, calls["1"])
    turn = await broker.take(bus)
    assert await answer(bus, calls["2"], b'"meanwhile"')
    assert await resumes(broker) == 1
    assert await suspend(bus, turn, ["a", "2", "!"])
    resumed = await broker.take(bus)
    assert (resumed.step, resumed.turn) == ("2", 2)
    assert resumed.data.endswith(b'"meanwhile"')
    assert await complete(bus, resumed)
    await broker.idle()


async def test_a_group_that_filled_during_the_turn_is_not_missed(broker: Broker, bus: EventBus) -> None:
    """What is missing is counted again by the commit, as a set of steps."""
    calls = await waits(broker, bus, ask("1", wait="!"), ask("2", wait="!"), ask("3", wait="!"))
    assert await answer(bus, calls["1"])
    turn = await broker.take(bus)
    assert await answer(bus, calls["2"])
    assert await suspend(bus, turn, ["a", "2", "g1"], ["a", "3", "g1"])
    assert await resumes(broker) == 0
    assert await answer(bus, calls["3"])
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ["a", "2", "g2"], ["a", "3", "g2"])
    assert await resumes(broker) == 1


async def test_a_wait_is_replaced_by_the_next_turns(broker: Broker, bus: EventBus) -> None:
    """A step that woke nobody is awaited now."""
    calls = await waits(broker, bus, ask("1", wait="!"), ask("2", wait="0"))
    assert await answer(bus, calls["1"])
    assert await suspend(bus, await broker.take(bus), ["a", "2", "!"])
    assert await resumes(broker) == 0
    assert await answer(bus, calls["2"])
    assert await resumes(broker) == 1


async def test_one_results_resume_is_not_appended_twice_by_a_late_turn(broker: Broker, bus: EventBus) -> None:
    """The turn before was committed twice (a lost reply) while the next is under way."""
    await broker.submit(bus, "t")
    first = await broker.take(bus)
    assert await suspend(bus, first, ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert not await suspend(bus, first, ask("1"))
    assert await resumes(broker) == 1


async def test_runs_without_a_key_do_not_wait_for_each_other(broker: Broker, bus: EventBus) -> None:
    """The agent calls itself twice at once. A user's key with the task's name is another instance."""
    await broker.submit(bus, "t")
    await broker.submit(bus, "u", key="t")
    first, second = await broker.take(bus), await broker.take(bus)
    parts = (ask("1", "writer", stream="agent", wait="g1"), ask("2", "writer", stream="agent", wait="g1"))
    assert await suspend(bus, first, *parts)
    one, two = await broker.take(bus), await broker.take(bus)
    assert [one.run, two.run, one.instance] == ["r/1", "r/2", ""]
    # And the same below: recursion does not meet its own ancestors.
    assert await suspend(bus, one, ask("1", "writer", stream="agent"))
    deep = await broker.take(bus)
    assert deep.run == "r/1/1"
    for turn in (deep, two):
        assert await complete(bus, turn)
    assert await complete(bus, await broker.take(bus))
    assert await complete(bus, await broker.take(bus))
    assert await complete(bus, second)
    await broker.idle()


async def test_names_of_runs_are_derived(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The same turn, repeated by an adopter, requests the same runs."""
    await broker.submit(bus, "t")
    await broker.take(other)
    await broker.silence(other)
    (turn,) = (await bus.adopt("agent", 10, False)).deliveries
    assert await suspend(bus, turn, ask("2.0.1"))
    call = await broker.take(bus, "tool")
    assert (call.task, call.run) == ("t", "r/2.0.1")


async def test_a_resume_names_the_turn_that_it_begins(broker: Broker, bus: EventBus) -> None:
    """A handler that kept the run in memory continues it only if it has handled all earlier turns."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    for number in (1, 2, 3):
        assert await suspend(bus, turn, ask(str(number)))
        assert await answer(bus, await broker.take(bus, "tool"))
        turn = await broker.take(bus)
        assert turn.turn == number
