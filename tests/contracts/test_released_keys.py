"""A run that gives up its key: others use the instance, and the run gets it back in its turn."""

from __future__ import annotations

import json

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import (
    Broker,
    acquire,
    again,
    answer,
    ask,
    bury,
    complete,
    fail,
    question,
    release,
    suspend,
)


async def holders(broker: Broker) -> str:
    return (await broker.hash("inst:writer/k")).get("busy", "")


async def state(broker: Broker) -> str:
    return (await broker.hash("inst:writer/k")).get("state", "")


async def result(broker: Broker, task: str, step: str, run: str = "r") -> str:
    """The journal's result of a step, without digest and time."""
    key = f"task:{task}" if run == "r" else f"run:{task}/{run}"
    value = (await broker.hash(key)).get(f"j:{step}", "")
    return value[8:9] + value[22:]


async def asleep(broker: Broker, bus: EventBus, task: str = "first", left: bytes = b'{"n":1}') -> None:
    """A task that has given up its key and waits for an answer."""
    await broker.submit(bus, task, key="k")
    assert await suspend(bus, await broker.take(bus), release("1", left), question("2"))


async def wake(broker: Broker, bus: EventBus, task: str = "first", step: str = "2") -> None:
    """The answer comes, and the task wants its key back."""
    assert await bus.signal(task, f"r:{step}", b"true") == ["ok"]
    turn = await broker.take(bus)
    assert (turn.kind, turn.task) == ("resume", task)
    assert await suspend(bus, turn, acquire("3"))


async def test_the_next_event_starts_with_the_state_that_the_run_leaves(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    assert await suspend(bus, await broker.take(bus), release("1", b'{"n":1}'), question("2"))
    assert await state(broker) == '{"n":1}'
    second = await broker.take(bus)
    assert second.task == "second"
    assert (await bus.load(second)).state == b'{"n":1}'  # type: ignore[union-attr]  # it exists
    assert await complete(bus, second, state=b'{"n":2}')
    await wake(broker, bus)
    resumed = await broker.take(bus)
    assert (resumed.task, resumed.step) == ("first", "3")
    assert await result(broker, "first", "3") == 'K{"n":2}'
    assert await holders(broker) == "first|r"
    await broker.submit(bus, "third", key="k")
    await broker.nothing(bus)
    assert await complete(bus, resumed, state=b'{"n":3}')
    third = await broker.take(bus)
    assert await complete(bus, third)
    assert await broker.hash("inst:writer/k") == {"state": '{"n":3}'}
    await broker.idle()


async def test_a_run_is_resumed_while_another_holds_its_key(broker: Broker, bus: EventBus) -> None:
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await wake(broker, bus)
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["first|r"]
    assert await holders(broker) == "second|r"
    assert await complete(bus, second, state=b'{"n":2}')
    assert (await broker.take(bus)).task == "first"
    assert await result(broker, "first", "3") == 'K{"n":2}'


async def test_the_state_at_the_key_s_return_is_numbered_among_those_of_nested_runs(
    broker: Broker, bus: EventBus
) -> None:
    """A replay may take the result of a nested run, from before or after, later than the key's return."""
    await asleep(broker, bus)
    await wake(broker, bus)
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    number, _, kept = loaded.overrides["3"].partition(b" ")
    assert kept == b'{"n":1}'
    assert await suspend(bus, turn, ask("4", "writer", stream="agent", key="k"))
    assert await complete(bus, await broker.take(bus), state=b'{"n":2}')
    loaded = await bus.load(await broker.take(bus))
    assert loaded is not None
    later, _, kept = loaded.overrides["4"].partition(b" ")
    assert (int(later) > int(number), kept) == (True, b'{"n":2}')


async def test_the_mailbox_keeps_its_order(broker: Broker, bus: EventBus) -> None:
    await asleep(broker, bus)
    for task in ("second", "third"):
        await broker.submit(bus, task, key="k")
    second = await broker.take(bus)
    await wake(broker, bus)
    assert await broker.mailbox("writer/k") == ["third|r", "first|r"]
    assert await complete(bus, second)
    third = await broker.take(bus)
    assert third.task == "third"
    await broker.nothing(bus)
    assert await complete(bus, third)
    assert (await broker.take(bus)).task == "first"


async def test_a_replay_begins_with_the_state_of_the_run_s_start(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "before", key="k")
    assert await complete(bus, await broker.take(bus), state=b'{"n":0}')
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    assert await complete(bus, await broker.take(bus), state=b'{"n":2}')
    await wake(broker, bus)
    turn = await broker.take(bus)
    assert (await bus.load(turn)).state == b'{"n":0}'  # type: ignore[union-attr]  # it exists
    # A second time: the state of the start stays.
    assert await suspend(bus, turn, release("4", b'{"n":3}'), acquire("5"))
    assert (await bus.load(await broker.take(bus))).state == b'{"n":0}'  # type: ignore[union-attr]  # it exists
    assert await result(broker, "first", "5") == 'K{"n":3}'


async def test_a_late_or_repeated_commit_releases_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, release("1", b'{"n":1}'), question("2"))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    before = await broker.snapshot()
    assert not await suspend(bus, turn, release("1", b'{"n":9}'), question("2"))
    assert await broker.snapshot() == before
    assert await complete(bus, second)


async def test_a_run_that_ends_meanwhile_leaves_the_instance_alone(broker: Broker, bus: EventBus) -> None:
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await bus.cancel("first", "no more")
    assert await holders(broker) == "second|r"
    assert await complete(bus, second)
    await broker.idle()


async def test_a_cancelled_run_in_the_mailbox_is_skipped(broker: Broker, bus: EventBus) -> None:
    await asleep(broker, bus)
    for task in ("second", "third"):
        await broker.submit(bus, task, key="k")
    second = await broker.take(bus)
    assert await bus.signal("first", "r:2", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), acquire("3"))
    await bus.cancel("first", "no more")
    await bus.cancel("third", "no more")
    assert await complete(bus, second)
    await broker.nothing(bus)
    assert await holders(broker) == ""
    await broker.idle()


async def test_steps_of_a_gather_wait_while_the_key_is_awaited(broker: Broker, bus: EventBus) -> None:
    """A job still waits for its own step when the run wants its key."""
    await broker.submit(bus, "first", key="k")
    assert await suspend(bus, await broker.take(bus), release("1"), ask("2.1"), question("3"))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    assert await bus.signal("first", "r:3", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), again("2.1"), acquire("4"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), again("4"))
    assert await complete(bus, second)
    turn = await broker.take(bus)
    assert (turn.task, turn.step) == ("first", "4")


async def test_a_child_run_gives_up_its_key_and_frees_it_at_its_end(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "parent")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    assert await suspend(bus, await broker.take(bus), release("1", b"{}"), question("2"))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    assert await bus.signal("parent", "r/1:2", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), acquire("3"))
    assert await complete(bus, second)
    child = await broker.take(bus)
    assert (child.task, child.run, child.step) == ("parent", "r/1", "3")
    assert await complete(bus, child)
    assert await complete(bus, await broker.take(bus))
    assert await holders(broker) == ""
    await broker.idle()


async def test_an_interleaving_agent_gets_its_key_back_while_others_run(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.interleaved, "writer", "1")
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await wake(broker, bus)
    assert await holders(broker) == "second|r\nfirst|r"
    for turn in (await broker.take(bus), second):
        assert await complete(bus, turn)
    await broker.idle()


async def test_the_return_of_a_key_is_on_the_record(broker: Broker, bus: EventBus) -> None:
    await asleep(broker, bus)
    await wake(broker, bus)
    rows = [row for entry in await broker.entries("record") if entry["d"] for row in json.loads(entry["d"])]
    assert [(row["kind"], row["status"]) for row in rows if row.get("step") == "3"] == [("acquire", "completed")]


async def test_a_key_that_no_run_waits_for_has_no_row(broker: Broker, bus: EventBus) -> None:
    """A job that wanted it was cancelled."""
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await wake(broker, bus)
    await broker.call("HDEL", broker.keys.run("first", "r"), "m:3")
    assert await complete(bus, second)
    rows = [row for entry in await broker.entries("record") if entry["d"] for row in json.loads(entry["d"])]
    assert [row["kind"] for row in rows if row.get("step") == "3"] == []


async def test_a_circle_at_the_return_of_a_key_is_found(broker: Broker, bus: EventBus) -> None:
    """The desk's run calls the writer, which gives up its key; its next holder asks the desk."""
    await broker.submit(bus, "one", agent="desk", key="d")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    assert await suspend(bus, await broker.take(bus), release("1"), question("2"))
    await broker.submit(bus, "two", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "desk", stream="agent", key="d"))
    await broker.nothing(bus)
    assert await bus.signal("one", "r/1:2", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), acquire("3"))
    assert json.loads((await result(broker, "one", "3", "r/1"))[1:])["type"] == "Deadlock"
    assert (await broker.take(bus)).run == "r/1"


async def test_a_circle_after_the_wait_for_a_key_is_found(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "one", agent="desk", key="d")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    assert await suspend(bus, await broker.take(bus), release("1"), question("2"))
    await broker.submit(bus, "two")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    holder = await broker.take(bus)
    assert await bus.signal("one", "r/1:2", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), acquire("3"))
    await broker.nothing(bus)
    assert await suspend(bus, holder, ask("1", "desk", stream="agent", key="d"))
    assert json.loads((await result(broker, "two", "1", "r/1"))[1:])["type"] == "Deadlock"


async def test_a_nested_run_keeps_the_key_of_its_caller(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "one", key="k")
    await broker.submit(bus, "two", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    nested = await broker.take(bus)
    assert nested.run == "r/1"
    assert await suspend(bus, nested, release("1", b'{"n":1}'), acquire("2"))
    assert await state(broker) == ""
    assert await result(broker, "one", "2", "r/1") == "Kfalse"
    assert await holders(broker) == "one|r\none|r/1"
    assert await complete(bus, await broker.take(bus))
    assert await complete(bus, await broker.take(bus))
    assert (await broker.take(bus)).task == "two"


async def test_a_nested_run_of_one_that_keeps_the_key_begins_with_the_state_it_left(
    broker: Broker, bus: EventBus
) -> None:
    await broker.submit(bus, "one", key="k")
    to_itself = ask("1", "writer", stream="agent", key="k")
    assert await suspend(bus, await broker.take(bus), to_itself)
    assert await suspend(
        bus, await broker.take(bus), release("1", b'{"n":1}'), ask("2", "writer", stream="agent", key="k")
    )
    innermost = await broker.take(bus)
    assert innermost.run == "r/1/2"
    assert (await bus.load(innermost)).state == b'{"n":1}'  # type: ignore[union-attr]  # it exists


async def test_a_commit_without_the_key_starts_no_nested_call(broker: Broker, bus: EventBus) -> None:
    """A reentrant call into the key's holder waits for the holder's own commit."""
    await asleep(broker, bus)
    await broker.submit(bus, "second", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "desk", stream="agent"), ask("2"))
    desk, tool = await broker.take(bus), await broker.take(bus, "tool")
    assert await answer(bus, tool)
    holder = await broker.take(bus)
    assert await suspend(bus, desk, ask("1", "writer", stream="agent", key="k"))
    await broker.nothing(bus)
    assert await bus.signal("first", "r:2", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), question("3"))
    await broker.nothing(bus)
    assert await suspend(bus, holder, again("1"))
    assert (await broker.take(bus)).run == "r/1/1"


async def reopened(broker: Broker, bus: EventBus) -> None:
    (letter, _), *_ = pairs(await broker.call("XRANGE", broker.keys.dead, "-", "+"))
    assert await bus.redrive(letter.decode(), reopen=True) == ["ok", "first"]


async def test_a_reopened_run_without_its_key_waits_for_no_holder(broker: Broker, bus: EventBus) -> None:
    """It failed inside the block. Others use the instance, and it continues from its journal, without the key."""
    await broker.submit(bus, "before", key="k")
    assert await complete(bus, await broker.take(bus), state=b'{"n":0}')
    await asleep(broker, bus)
    assert await bus.signal("first", "r:2", b"true") == ["ok"]
    assert await bury(bus, await broker.take(bus))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await reopened(broker, bus)
    again_first = await broker.take(bus)
    assert again_first.task == "first"
    assert (await bus.load(again_first)).state == b'{"n":0}'  # type: ignore[union-attr]  # it exists
    assert await holders(broker) == "second|r"
    assert await suspend(bus, again_first, acquire("3"))
    assert await complete(bus, second, state=b'{"n":2}')
    assert (await broker.take(bus)).step == "3"
    assert await result(broker, "first", "3") == 'K{"n":2}'


async def test_a_reopened_run_takes_its_key_again(broker: Broker, bus: EventBus) -> None:
    """It failed after the block. The state of then is out of date: the end of the block gets the new state."""
    await asleep(broker, bus)
    await wake(broker, bus)
    assert await bury(bus, await broker.take(bus))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    await reopened(broker, bus)
    turn = await broker.take(bus)
    assert turn.task == "first"
    assert await result(broker, "first", "3") == ""
    assert await result(broker, "first", "1") == "Knull"
    assert await suspend(bus, turn, acquire("3"))
    await broker.nothing(bus)
    assert await complete(bus, second, state=b'{"n":2}')
    assert await result(broker, "first", "3") == 'K{"n":2}'
    assert await complete(bus, await broker.take(bus))


async def test_a_run_that_ended_in_the_mailbox_is_reopened_without_its_key(broker: Broker, bus: EventBus) -> None:
    """A call of it became a dead letter while it waited for its key."""
    await broker.submit(bus, "first", key="k")
    assert await suspend(bus, await broker.take(bus), release("1"), ask("2.1"), question("3"))
    await broker.submit(bus, "second", key="k")
    second = await broker.take(bus)
    assert await bus.signal("first", "r:3", b"true") == ["ok"]
    assert await suspend(bus, await broker.take(bus), again("2.1"), acquire("4"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    await reopened(broker, bus)
    await broker.take(bus, "tool")
    turn = await broker.take(bus)
    assert turn.task == "first"
    assert await suspend(bus, turn, again("2.1"), acquire("4"))
    assert await complete(bus, second)
    assert (await broker.take(bus)).step == "4"
