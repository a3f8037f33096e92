"""A cancel ends the task at once; later work is settled, and held instances are released."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.consumer import WITHDRAWN
from runtime_core.errors import Rejected
from tests.contracts.broker import LEASE_MS, Broker, answer, ask, bury, complete, fail, nap, send, suspend


async def late_retry(bus: EventBus, turn: Delivery) -> bool:
    return await bus.retry(turn, 0, b"{}")


async def late_suspend(bus: EventBus, turn: Delivery) -> bool:
    return await suspend(bus, turn, ask("1"), send("note"))


async def late_complete(bus: EventBus, turn: Delivery) -> bool:
    return await complete(bus, turn, send("note"), state=b"1")


@pytest.mark.parametrize("late", [late_complete, late_suspend, late_retry, fail, bury])
async def test_work_in_flight_is_settled_when_it_arrives(
    broker: Broker, bus: EventBus, late: Callable[[EventBus, Delivery], Awaitable[bool]]
) -> None:
    """A refused commit would keep its delivery and a shared instance forever."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    turn = await broker.take(bus)
    assert await bus.cancel("t", "no more") == ["cancelled"]
    await broker.nothing(bus)
    assert not await late(bus, turn)
    following = await broker.take(bus)
    assert following.task == "next"
    assert (await broker.hash("inst:writer/k")) == {"busy": "next|r"}
    assert await broker.status("note") == ""
    await complete(bus, following)
    await broker.idle()
    assert (await broker.final("t"))["status"] == "cancelled"


async def test_a_run_that_ends_its_task_as_cancelled_frees_all_that_it_holds(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    await suspend(bus, await broker.take(bus), nap("1", 1), ask("2"), ask("3", "editor", stream="agent"))
    call = await broker.take(bus, "tool")
    since, _, _ = await bus.beat(LEASE_MS, False, "0")
    await broker.pass_time(10)
    await bus.promote()
    child, turn = await broker.take(bus), await broker.take(bus)
    assert await fail(bus, turn, "not needed", mode="k")
    final = await broker.final("t")
    assert final["status"] == "cancelled"
    assert final["error"] == {"type": "Broken", "message": "not needed"}
    assert (await bus.beat(LEASE_MS, False, since))[1] == ["t"]
    assert not await answer(bus, call)
    assert not await complete(bus, child)
    following = await broker.take(bus)
    assert following.task == "next"
    assert await complete(bus, following)
    await broker.idle()


async def test_a_child_run_that_ends_as_cancelled_only_fails_its_step(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await fail(bus, await broker.take(bus), "not needed", mode="k")
    turn = await broker.take(bus)
    assert (turn.run, await broker.status("t")) == ("r", "waiting")
    assert (await broker.task("t"))["j:1"][8] == "E"
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_cancelled_call_is_settled_when_it_arrives(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    await bus.cancel("t", "no more")
    assert not await answer(bus, call)
    await broker.idle()


async def test_a_suspended_run_is_freed_at_once(broker: Broker, bus: EventBus) -> None:
    """Child runs, their instances and timers end in the same step."""
    await broker.submit(bus, "t", key="k")
    child = ask("1", "editor", stream="agent", key="e")
    await suspend(bus, await broker.take(bus), child, nap("2", 60_000), ask("3", "desk", stream="agent"))
    for turn in (await broker.take(bus), await broker.take(bus)):
        await suspend(bus, turn, nap("1", 60_000))
    await broker.submit(bus, "next", key="k")
    await broker.submit(bus, "mail", agent="editor", key="e")
    assert await bus.cancel("t", "no more") == ["cancelled"]
    turns = {turn.task: turn for turn in (await broker.take(bus), await broker.take(bus))}
    assert set(turns) == {"next", "mail"}
    for turn in turns.values():
        await complete(bus, turn)
    await broker.idle()


async def test_a_child_in_flight_keeps_its_instance_until_it_arrives(broker: Broker, bus: EventBus) -> None:
    """An instance never has two turns at once, not even after a cancel."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key="e"))
    child = await broker.take(bus)
    await broker.submit(bus, "mail", agent="editor", key="e")
    await bus.cancel("t", "no more")
    await broker.nothing(bus)
    assert not await complete(bus, child, state=b"1")
    turn = await broker.take(bus)
    assert turn.task == "mail"
    await complete(bus, turn)
    await broker.idle()
    assert "state" not in await broker.hash("inst:editor/e")


async def test_calls_of_a_turn_that_commits_after_a_cancel_are_not_started(broker: Broker, bus: EventBus) -> None:
    """The commit checks the flag; the cancel does not walk over the tree of runs."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.cancel("t", "no more")
    assert not await suspend(
        bus, turn, ask("1"), ask("2", "editor", stream="agent"), send("note", step="3"), nap("4", 1)
    )
    await broker.idle()
    assert await broker.status("note") == ""


async def test_a_heartbeat_reports_a_cancelled_task(broker: Broker, bus: EventBus) -> None:
    """The cancel does not wait behind other work in a stream."""
    since, stopped, _ = await bus.beat(LEASE_MS, False, "0")
    assert stopped == []
    await broker.submit(bus, "t")
    await broker.take(bus)
    await bus.cancel("t", "no more")  # maybe in the very millisecond of that beat
    _, stopped, _ = await bus.beat(LEASE_MS, False, since)
    assert stopped == ["t"]


async def test_an_end_is_reported_whatever_the_clock_of_its_process_says(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    since, _, _ = await bus.beat(LEASE_MS, False, "0")
    minute_ago = int(since) - 60_000
    assert await bus.commit_turn(turn, "f", minute_ago, b"[]", 1, b'{"type":"Broken","message":""}', b"", [], 0)
    _, stopped, _ = await bus.beat(LEASE_MS, False, since)
    assert stopped == ["t"]


async def test_a_cancel_before_the_submit_is_remembered(broker: Broker, bus: EventBus) -> None:
    assert await bus.cancel("t", "no more") == ["unknown"]
    with pytest.raises(Rejected, match="task_id: the task t was cancelled"):
        await broker.submit(bus, "t")
    await broker.idle()
    await broker.submit(bus, "u")


async def test_cancels_of_unknown_tasks_are_bounded(broker: Broker, bus: EventBus) -> None:
    """Neither the broker's memory nor the heartbeats of handlers grow with them. The newest are remembered."""
    since, _, _ = await bus.beat(LEASE_MS, False, "0")
    tombs, stamp = broker.keys.base + "tombs:", since
    await broker.call("ZADD", tombs, *(word for number in range(10_000) for word in (stamp, f"old-{number}")))
    assert await bus.cancel("t", "no more") == ["unknown"]
    assert await broker.call("ZCARD", tombs) == 10_000
    assert 0 < cast(int, await broker.call("TTL", tombs)) <= 600
    with pytest.raises(Rejected, match="task_id: the task t was cancelled"):
        await broker.submit(bus, "t")
    _, reported, _ = await bus.beat(LEASE_MS, False, since)
    assert reported == []


async def test_a_tenants_cancels_do_not_push_out_those_of_another(broker: Broker, bus: EventBus) -> None:
    assert await bus.cancel("acme.t", "no more") == ["unknown"]
    for number in range(10_001):
        await bus.cancel(f"flood.{number}", "no more")
    with pytest.raises(Rejected, match=r"task_id: the task acme\.t was cancelled"):
        await broker.submit(bus, "acme.t")


async def test_a_cancel_of_an_ended_task_changes_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await complete(bus, await broker.take(bus))
    before = await broker.snapshot()
    assert await bus.cancel("t", "no more") == ["ended", "completed"]
    assert await broker.snapshot() == before


async def test_a_run_may_end_its_task_as_cancelled(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    assert await fail(bus, await broker.take(bus), "enough", mode="k")
    final = await broker.final("t")
    assert (final["status"], final["error"]) == ("cancelled", {"type": "Broken", "message": "enough"})
    assert await broker.entries("dead") == []
    turn = await broker.take(bus)
    assert turn.task == "next", "its instance is free"
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_child_that_ends_itself_as_cancelled_is_a_failed_step_of_its_parent(
    broker: Broker, bus: EventBus
) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    assert await fail(bus, child, "enough", mode="k")
    assert "enough" in (await broker.task("t"))["j:1"]
    assert await complete(bus, await broker.take(bus))
    assert await broker.status("t") == "completed"
    await broker.idle()


async def test_a_task_whose_answer_is_no_longer_wanted_continues_and_is_reported(broker: Broker, bus: EventBus) -> None:
    since, _, _ = await bus.beat(LEASE_MS, False, "")
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    fields = await bus.load(turn)
    assert fields is not None
    assert not fields.withdrawn
    assert await bus.withdraw_request("t")
    fields = await bus.load(turn)
    assert fields is not None
    assert fields.withdrawn  # one that begins later
    _, told, _ = await bus.beat(LEASE_MS, False, since)
    assert told == [f"{WITHDRAWN}t"]  # one that runs
    assert await complete(bus, turn, send("note"), state=b"1")
    assert (await broker.final("t"))["status"] == "completed"
    assert await broker.status("note") == "accepted"
    assert not await bus.withdraw_request("t")
    assert not await bus.withdraw_request("unknown")
    assert await broker.status("unknown") == ""
