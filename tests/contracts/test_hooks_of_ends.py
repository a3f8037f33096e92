"""A task that fails or is cancelled starts its end hooks, once per end, if it has any."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import DIGEST, Broker, ask, bury, complete, fail, nap, now, send, suspend

Json = Any  # JSON of many shapes
HOOKS = b'{"hooks":{"task_failed":["alert"]},"session_id":"s"}'
SELECTION = {"hooks": {"task_failed": [{"name": "alert", "guard": False}]}, "callbacks": []}
ENDER = "weft.task-ended.desk"


async def declare(broker: Broker, *, always: bool = False) -> None:
    """The app of the agents has hooks at the end of a task."""
    for agent in ("writer", "editor"):
        await broker.call("HSET", broker.keys.end_hooks, agent, ("!" if always else "?") + ENDER)


async def started(broker: Broker) -> list[dict[str, Json]]:
    """Return the inputs of the tasks that run end hooks, oldest first."""
    entries = await broker.entries("agent")
    own = [entry for entry in entries if entry["h"].split("\n")[4] == ENDER]
    for entry in own:
        task = await broker.task(entry["h"].split("\n")[2])
        assert (task["status"], task["cur"], task["d"]) == ("accepted", entry["id"], entry["d"])
    return [json.loads(entry["d"]) for entry in own]


async def cancelled(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await broker.take(bus), nap("1", 60_000))
    await bus.cancel("t", "no more")


async def cancelled_in_flight(broker: Broker, bus: EventBus) -> None:
    turn = await broker.take(bus)
    await bus.cancel("t", "no more")
    assert not await complete(bus, turn)


async def cancelled_before_it_began(broker: Broker, bus: EventBus) -> None:
    await bus.cancel("t", "no more")


async def out_of_time(broker: Broker, bus: EventBus) -> None:
    await broker.pass_time(100_000)
    await bus.promote()
    await bus.promote()


async def failed(broker: Broker, bus: EventBus) -> None:
    await fail(bus, await broker.take(bus))


async def dead_lettered(broker: Broker, bus: EventBus) -> None:
    turn = await broker.take(bus)
    await bury(bus, turn, "poison")
    await bury(bus, turn, "poison")


async def over_a_limit(broker: Broker, bus: EventBus) -> None:
    error = b'{"type":"LimitExceeded","message":"over"}'
    await bus.commit_turn(await broker.take(bus), "x", now(), b"[]", 1, error, b"", [], 0)


async def over_a_limit_in_a_call(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"tokens":2}')


async def over_a_limit_in_a_child(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    error = b'{"type":"LimitExceeded","message":"over"}'
    await bus.commit_turn(await broker.take(bus), "x", now(), b"[]", 1, error, b"", [], 0)


async def over_a_limit_elsewhere(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"))
    await bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b'{"tokens":2}')


async def lost(broker: Broker, bus: EventBus) -> None:
    task = await broker.task("t")
    await broker.call("XTRIM", broker.keys.stream("agent"), "MAXLEN", 0)
    error = b'{"type":"Lost","message":"lost"}'
    assert await bus.call("repair", "run", "t", "r", task["cur"], now(), error) == b"OK"


End = Callable[[Broker, EventBus], Awaitable[None]]
ENDS: list[End] = [
    cancelled,
    cancelled_in_flight,
    cancelled_before_it_began,
    out_of_time,
    failed,
    dead_lettered,
    over_a_limit,
    over_a_limit_in_a_call,
    over_a_limit_in_a_child,
    over_a_limit_elsewhere,
    lost,
]


async def begin(broker: Broker, bus: EventBus, context: bytes) -> None:
    await broker.submit(bus, "t", context=context, timeout_ms=90_000, limits=b'{"tokens":1}')


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_without_completion_starts_the_hooks_once(broker: Broker, bus: EventBus, end: End) -> None:
    await declare(broker)
    await begin(broker, bus, HOOKS)
    await end(broker, bus)
    [told] = await started(broker)
    final = await broker.final("t")
    assert final["status"] in ("failed", "cancelled")
    assert told == {
        "task_id": "t",
        "agent": "writer",
        "key": "",
        "status": final["status"],
        "error": final["error"],
        "attempt": 1,
        "selection": None,
    }
    own = await broker.take(bus)
    if own.task == "t":  # it ended before it began
        assert not await complete(bus, own)
        own = await broker.take(bus)
    assert (own.name, own.context) == (ENDER, HOOKS)
    await fail(bus, own)
    assert await started(broker) == [], "the end of this task has no hooks of its own"


@pytest.mark.parametrize("end", ENDS)
async def test_tasks_without_such_hooks_start_nothing(broker: Broker, bus: EventBus, end: End) -> None:
    await declare(broker)
    await begin(broker, bus, b'{"hooks":{"task_created":["log"]}}')
    await end(broker, bus)
    assert (await broker.final("t"))["status"] in ("failed", "cancelled")
    assert await started(broker) == []


@pytest.mark.parametrize(
    "context", [b"", b"no json at all: task_failed", b'{"hooks":"task_failed"}', b'["task_failed"]']
)
async def test_a_context_without_hooks_starts_none(broker: Broker, bus: EventBus, context: bytes) -> None:
    await declare(broker)
    await begin(broker, bus, context)
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert await started(broker) == []


async def test_hooks_that_always_run_also_run_for_a_task_that_never_began(broker: Broker, bus: EventBus) -> None:
    await declare(broker, always=True)
    await broker.submit(bus, "t", key="k")
    await bus.cancel("t", "no more")
    [told] = await started(broker)
    assert (told["task_id"], told["key"], told["selection"]) == ("t", "k", None)


@pytest.mark.parametrize(("selection", "count"), [(SELECTION, 1), ({"hooks": {}, "callbacks": ["search"]}, 0)])
async def test_the_hooks_at_the_start_of_a_run_decide(
    broker: Broker, bus: EventBus, selection: dict[str, Json], count: int
) -> None:
    """A deployment that adds a hook changes no running run, nor does one that renames a hook."""
    await declare(broker, always=not count)
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    value = f"{DIGEST}K{now()}{json.dumps(selection)}".encode()
    assert await bus.record(turn, "0", value) == value
    await bus.cancel("t", "no more")
    assert [told["selection"] for told in await started(broker)] == [selection] * count


async def test_a_completed_task_starts_nothing(broker: Broker, bus: EventBus) -> None:
    await declare(broker, always=True)
    await broker.submit(bus, "t", context=HOOKS)
    await complete(bus, await broker.take(bus))
    assert (await broker.final("t"))["status"] == "completed"
    assert await started(broker) == []


async def test_a_task_for_a_step_of_another_partition_runs_no_task_hooks(broker: Broker, bus: EventBus) -> None:
    await declare(broker, always=True)
    await broker.submit(bus, "t", context=HOOKS, replyto="@1|other|r|1|writer")
    await fail(bus, await broker.take(bus))
    assert await started(broker) == []


async def test_hooks_run_for_a_message_that_a_full_mailbox_refuses(broker: Broker, bus: EventBus) -> None:
    await declare(broker)
    await broker.call("HSET", broker.keys.meta, "mailbox_max", 1)
    for name in ("holds", "waits"):
        await broker.submit(bus, name, "editor", key="e")
    await broker.take(bus)
    await broker.submit(bus, "t")
    await complete(bus, await broker.take(bus), send("note", key="e", context=HOOKS))
    [told] = await started(broker)
    assert (told["task_id"], told["key"], told["error"]["type"]) == ("note", "e", "MailboxFull")


async def test_each_end_of_a_reopened_task_has_its_hooks(broker: Broker, bus: EventBus) -> None:
    await declare(broker)
    await broker.submit(bus, "t", context=HOOKS)
    ends, tasks = [], set()
    for attempt in (1, 2):
        turn = await broker.take(bus)
        assert turn.task == "t"
        error = json.dumps({"type": "Broken", "message": f"end {attempt}"}).encode()
        await bus.dead_letter(turn.stream, turn.entry, "attempts", b"[]", now() + attempt, error)
        own = await broker.take(bus)
        tasks.add(own.task)
        ends.append(json.loads(own.data)["error"]["message"])
        await complete(bus, own)
        if attempt == 1:
            [letter] = await broker.entries("dead")
            assert (await bus.redrive(letter["id"], reopen=True))[0] == "ok"
    assert ends == ["end 1", "end 2"]
    assert len(tasks) == 2


async def test_hooks_get_the_number_of_the_last_attempt(broker: Broker, bus: EventBus) -> None:
    await declare(broker)
    await broker.submit(bus, "t", context=HOOKS)
    await bus.retry(await broker.take(bus), 0, b"{}")
    await bus.promote()
    await bury(bus, await broker.take(bus))
    assert [told["attempt"] for told in await started(broker)] == [2]
