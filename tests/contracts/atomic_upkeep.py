"""Cases of test_atomicity.py: dead letters, owners, trimming and nodes."""

from __future__ import annotations

from runtime_core.bus.topics import TopicSubscription
from tests.contracts.atomic_tasks import Act, Stage, asked, busy, case
from tests.contracts.broker import (
    LEASE_MS,
    ask,
    bury,
    complete,
    nap,
    question,
    suspend,
    withdraw,
)


@case
async def redrive_of_a_call(stage: Stage) -> Act:
    await asked(stage)
    await bury(stage.bus, await stage.broker.take(stage.bus, "tool"))
    letter = (await stage.broker.entries("dead"))[0]
    turns = [await stage.broker.take(stage.bus) for _ in range(3)]
    # Its error ends the task; one that goes on could not take it back.
    await bury(stage.bus, next(turn for turn in turns if turn.run == "r" and turn.task == letter["taskid"]))
    return lambda: stage.bus.redrive(letter["id"], True)


@case
async def redrive_of_a_call_of_a_run_without_a_key(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "alone")
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1"))
    await bury(stage.bus, await stage.broker.take(stage.bus, "tool"))
    letter = (await stage.broker.entries("dead"))[0]["id"]
    await bury(stage.bus, await stage.broker.take(stage.bus))
    return lambda: stage.bus.redrive(letter, True)


@case
async def redrive_of_an_ended_task(stage: Stage) -> Act:
    await busy(stage)
    await bury(stage.bus, await stage.broker.take(stage.bus))
    letter = (await stage.broker.entries("dead"))[0]["id"]
    return lambda: stage.bus.redrive(letter, True, b'"mended"')


@case
async def drop_letter(stage: Stage) -> Act:
    await busy(stage)
    await bury(stage.bus, await stage.broker.take(stage.bus))
    letter = (await stage.broker.entries("dead"))[0]["id"]
    return lambda: stage.bus.drop_letter(letter)


@case
async def erase(stage: Stage) -> Act:
    await busy(stage)
    await bury(stage.bus, await stage.broker.take(stage.bus))
    return lambda: stage.bus.erase("t")


@case
async def beat(stage: Stage) -> Act:
    await stage.broker.call("HINCRBY", stage.broker.keys.meta, "beat_at", -50)
    return lambda: stage.bus.beat(LEASE_MS, False, "1")


@case
async def lead(stage: Stage) -> Act:
    return lambda: stage.bus.lead("admit")


@case
async def leave(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.leave([turn])


@case
async def adopt(stage: Stage) -> Act:
    await busy(stage)
    await stage.broker.take(stage.other)
    await stage.broker.silence(stage.other)
    return lambda: stage.bus.adopt("agent", 10, False)


@case
async def adopt_a_quarantined_entry(stage: Stage) -> Act:
    await busy(stage)
    await stage.broker.take(stage.other)
    key = stage.broker.keys.stream("agent")
    entry = (await stage.broker.entries("agent"))[0]["id"]
    await stage.broker.call("XCLAIM", key, "agent-handler", stage.other.owner, 0, entry, "RETRYCOUNT", 9)
    await stage.broker.silence(stage.other)
    return lambda: stage.bus.adopt("agent", 10, True)


@case
async def adopt_what_is_settled(stage: Stage) -> Act:
    """The quarantine still names a settled entry, and a dead owner that ran it."""
    await busy(stage)
    await stage.broker.take(stage.other)
    quarantine = stage.broker.keys.quarantine
    await stage.broker.call("HSET", quarantine, "~agent", stage.other.owner, "agent|1-1", 1)
    await stage.broker.silence(stage.other)
    return lambda: stage.bus.adopt("agent", 10, False)


@case
async def mark_started(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: stage.bus.mark_started(call)


@case
async def trim(stage: Stage) -> Act:
    await busy(stage)
    await complete(stage.bus, await stage.broker.take(stage.bus))
    last = (await stage.broker.entries("record"))[-1]["id"]
    for group in ("state-manager", "trajectory-recorder"):
        await stage.bus.publish_cursor(group, last)
    return lambda: stage.bus.trim_record()


@case
async def watch(stage: Stage) -> Act:
    await busy(stage, streamed=0)
    return lambda: stage.bus.call("watch", "t")


@case
async def the_end_of_a_task_that_is_waited_for(stage: Stage) -> Act:
    await busy(stage)
    await stage.bus.call("watch", "t", "n")
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn)


async def grouped(stage: Stage) -> None:
    """A node in a group inside another group, which ends with it."""
    create = ("create_node", "group")
    await stage.bus.call(*create, "outer", b"{}", "", "", 60, "")
    await stage.bus.call(*create, "inner", b"{}", "outer", "inner", 60, "", "n")
    await stage.bus.call("create_node", "node", "n", b"{}", "inner", "n", 60, "group/inner\ntask/t")


@case
async def create_a_node(stage: Stage) -> Act:
    await grouped(stage)
    return lambda: stage.bus.call("create_node", "node", "m", b"{}", "inner", "n", 60, "group/inner\ntask/t")


@case
async def create_a_group(stage: Stage) -> Act:
    await grouped(stage)
    await stage.bus.call("create_node", "node", "m", b"{}", "", "", 60, "task/t")
    await stage.bus.call("node", "move", "m", 60, "FAILED", "token", "")
    return lambda: stage.bus.call("create_node", "group", "g", b"{}", "outer", "g", 60, "", "m")


@case
async def a_node_that_ends_its_groups(stage: Stage) -> Act:
    await grouped(stage)
    return lambda: stage.bus.call("node", "move", "n", 60, "FAILED", "token", "why", "result", b"{}")


@case
async def save_a_result(stage: Stage) -> Act:
    await grouped(stage)
    return lambda: stage.bus.call("node", "save", "n", 60, "result", b"{}")


@case
async def a_sub_group_that_ends_its_groups(stage: Stage) -> Act:
    await grouped(stage)
    return lambda: stage.bus.call("node", "finish", "inner", 60, "n", "SUCCESS", "well")


@case
async def add_a_sub_group(stage: Stage) -> Act:
    await grouped(stage)
    return lambda: stage.bus.call("node", "sub", "inner", 60, "m")


@case
async def a_turn_that_withdraws_steps(stage: Stage) -> Act:
    broker, bus = stage.broker, stage.bus
    await broker.submit(bus, "t")
    asked = ask("1", "editor", stream="agent", key="e"), ask("2"), question("3", timeout_ms=60_000), nap("4", 1)
    await suspend(bus, await broker.take(bus), *asked)
    await suspend(bus, await broker.take(bus), nap("1", 60_000), ask("2", "desk", stream="agent"))
    await broker.pass_time(10)
    await bus.promote()
    await broker.take(bus)
    turn = await broker.take(bus)
    return lambda: suspend(bus, turn, *map(withdraw, "123"), nap("5", 60_000))


@case
async def drop_an_agent(stage: Stage) -> Act:
    await stage.bus.note_agent("writer")
    await stage.bus.subscribe(TopicSubscription("news", "writer"))
    return lambda: stage.bus.call("drop_agent", "writer", "actor.writer", "agent", 1000)


@case
async def free_an_instance(stage: Stage) -> Act:
    await busy(stage)
    await stage.broker.take(stage.bus)
    await stage.bus.cancel("t", "no more")
    return lambda: stage.bus.call("free_instance", "writer/k")


@case
async def keep_a_letter_that_needs_room(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    assert await bury(stage.bus, await stage.broker.take(stage.bus))
    await stage.broker.call("HSET", stage.broker.keys.meta, "dead_max", 1)
    return lambda: stage.bus.keep_letter(["reason", "rejected", "stream", "tasks"])


@case
async def trim_old_letters(stage: Stage) -> Act:
    for task, reason in (("t", "attempts"), ("parked", "diverged")):
        await stage.broker.submit(stage.bus, task)
        assert await bury(stage.bus, await stage.broker.take(stage.bus), reason)
    return lambda: stage.bus.trim_letters(10**9, -60_000)


@case
async def recount_letters(stage: Stage) -> Act:
    await stage.broker.call("XADD", stage.broker.keys.dead, "*", "reason", "rejected", "stream", "tasks")
    return lambda: stage.bus.recount_letters()
