"""One event in flight per instance: it is busy from the release of an event until the commit that ends its run."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, complete, fail, nap, question, send, suspend


async def test_events_wait_in_line_and_start_one_by_one(broker: Broker, bus: EventBus, other: EventBus) -> None:
    tasks = [f"t{number}" for number in range(6)]
    for task in tasks:
        await broker.submit(bus, task, key="k")
    assert await broker.mailbox("writer/k") == [f"{task}|r" for task in tasks[1:]]
    seen = []
    for number in range(len(tasks)):
        owner = (bus, other)[number % 2]
        turn = await broker.take(owner)
        await broker.nothing(bus)
        await broker.nothing(other)
        seen.append(turn.task)
        assert await complete(owner, turn, state=b"%d" % number)
    assert seen == tasks
    assert await broker.hash("inst:writer/k") == {"state": "5"}
    await broker.idle()


async def test_a_suspended_run_keeps_its_instance(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["second|r"]
    assert (await broker.hash("inst:writer/k"))["busy"] == "first|r"
    assert await answer(bus, await broker.take(bus, "tool"))
    resumed = await broker.take(bus)
    assert (resumed.kind, resumed.task) == ("resume", "first"), "a resume passes the mailbox by"
    await broker.nothing(bus)
    assert await complete(bus, resumed)
    assert (await broker.take(bus)).task == "second"


async def test_a_resume_by_timer_or_answer_passes_the_mailbox(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    await suspend(bus, await broker.take(bus), nap("1", 1000))
    await broker.pass_time(1001)
    assert (await bus.promote())[0] == 1
    turn = await broker.take(bus)
    assert (turn.kind, turn.task) == ("resume", "first")
    await suspend(bus, turn, question("2"))
    assert await bus.signal("first", "r:2", b"true") == ["ok"]
    turn = await broker.take(bus)
    assert (turn.kind, turn.task) == ("resume", "first")
    await complete(bus, turn)
    assert (await broker.take(bus)).task == "second"


async def test_a_failed_run_frees_its_instance(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    assert await fail(bus, await broker.take(bus))
    turn = await broker.take(bus)
    assert turn.task == "second"
    await complete(bus, turn)
    await broker.idle()


async def test_a_child_frees_its_instance_and_wakes_its_parent(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "parent")
    await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    await broker.submit(bus, "second", key="k")
    child = await broker.take(bus)
    assert (child.run, child.instance) == ("r/1", "writer/k")
    await broker.nothing(bus)
    assert await complete(bus, child, output=b'"facts"', state=b"1")
    following = {turn.task: turn for turn in [await broker.take(bus), await broker.take(bus)]}
    assert following["parent"].kind == "resume"
    assert following["parent"].data.endswith(b'"facts"')
    assert following["second"].kind == "start"
    for turn in following.values():
        await complete(bus, turn)
    await broker.idle()


async def test_instances_do_not_wait_for_each_other(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "a", key="k")
    await broker.submit(bus, "b", key="l")
    await broker.submit(bus, "c", agent="editor", key="k")
    assert {(await broker.take(bus)).task for _ in range(3)} == {"a", "b", "c"}


async def test_agents_without_a_key_never_wait(broker: Broker, bus: EventBus) -> None:
    for task in ("a", "b", "c"):
        await broker.submit(bus, task)
    assert [(await broker.take(bus)).task for _ in range(3)] == ["a", "b", "c"]


async def test_a_message_to_a_busy_instance_waits(broker: Broker, bus: EventBus) -> None:
    """A message that an agent sends to itself also waits behind earlier ones."""
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    assert await complete(bus, await broker.take(bus), send("note", "writer", "k"))
    for task in ("second", "note"):
        turn = await broker.take(bus)
        assert turn.task == task
        await broker.nothing(bus)
        await complete(bus, turn)
    await broker.idle()


async def test_mail_of_ended_tasks_is_skipped(broker: Broker, bus: EventBus) -> None:
    for task in ("first", "second", "third"):
        await broker.submit(bus, task, key="k")
    assert await bus.cancel("second", "no more") == ["cancelled"]
    await complete(bus, await broker.take(bus))
    turn = await broker.take(bus)
    assert turn.task == "third"
    await complete(bus, turn)
    await broker.idle()


async def test_mail_of_a_kept_ended_task_is_skipped(broker: Broker, bus: EventBus) -> None:
    """A task with a dead letter keeps its fields when it ends, `cur` too."""
    for task in ("first", "second", "third"):
        await broker.submit(bus, task, key="k")
    await broker.call("HSET", broker.keys.task("second"), "fl", "l", "lt", 1)
    assert await bus.cancel("second", "no more") == ["cancelled"]
    assert (await broker.task("second"))["cur"] == "mail"
    await complete(bus, await broker.take(bus))
    assert (await broker.take(bus)).task == "third"


async def test_a_run_that_is_in_the_mailbox_twice_starts_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "asker", "desk")
    held = await broker.take(bus)
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"), ask("2"))
    await broker.call("RPUSH", f"{broker.keys.base}mail:writer/k", "asker|r/1")
    assert await complete(bus, held)
    assert await complete(bus, await broker.take(bus)), "the child run"
    resumed = await broker.take(bus)
    assert (resumed.task, resumed.run) == ("asker", "r")
    await broker.nothing(bus)
    assert "busy" not in await broker.hash("inst:writer/k")


async def test_a_long_line_of_ended_tasks_does_not_stop_the_mailbox(broker: Broker, bus: EventBus) -> None:
    """A release checks 50 events at a time; the next one continues from there."""
    await broker.submit(bus, "first", key="k")
    for number in range(120):
        await broker.submit(bus, f"dropped-{number}", key="k")
        await bus.cancel(f"dropped-{number}", "no more")
    await broker.submit(bus, "last", key="k")
    await complete(bus, await broker.take(bus))
    await broker.nothing(bus)
    for _ in range(3):
        await bus.promote()
    turn = await broker.take(bus)
    assert turn.task == "last"
    await complete(bus, turn)
    await broker.idle()


async def test_a_late_timer_of_a_mailbox_starts_nothing_while_it_has_a_holder(broker: Broker, bus: EventBus) -> None:
    """Another release of the instance has started the next event already."""
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "second", key="k")
    turn = await broker.take(bus)
    await broker.call("ZADD", broker.keys.timers, 0, "i|writer/k")
    await bus.promote()
    await broker.nothing(bus)
    assert (await broker.hash("inst:writer/k"))["busy"] == "first|r"
    assert await complete(bus, turn)
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_message_keeps_its_place_behind_a_long_line_of_cancelled_ones(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    for number in range(60):
        await broker.submit(bus, f"dropped-{number}", key="k")
        await bus.cancel(f"dropped-{number}", "no more")
    await broker.submit(bus, "before", key="k")
    await complete(bus, await broker.take(bus))
    await broker.submit(bus, "after", key="k")
    order = []
    for _ in range(2):
        await bus.promote()
        turn = await broker.take(bus)
        order.append(turn.task)
        await broker.nothing(bus)
        await complete(bus, turn)
    assert order == ["before", "after"]
    await bus.promote()
    await broker.idle()
