"""A run withdraws steps that it no longer wants: what they have started stops, and the run itself continues."""

from __future__ import annotations

import json
from typing import cast

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import (
    LEASE_MS,
    Broker,
    again,
    answer,
    ask,
    bury,
    complete,
    fail,
    nap,
    question,
    suspend,
    withdraw,
)
from tests.contracts.test_queued_work import consuming, drained


async def test_owners_learn_of_a_withdrawn_call_with_their_heartbeat(broker: Broker, bus: EventBus) -> None:
    """Its late result only settles its entry."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    unwanted, wanted = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert await answer(bus, wanted)
    since, _, _ = await bus.beat(LEASE_MS, False, "0")
    assert await suspend(bus, await broker.take(bus), withdraw("1"), ask("3"))
    _, stopped, _ = await bus.beat(LEASE_MS, False, since)
    assert stopped == ["t|r/1"]
    assert not await answer(bus, unwanted)
    assert "j:1" not in await broker.task("t")
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_withdrawn_child_run_ends_with_all_below_it(broker: Broker, bus: EventBus) -> None:
    """Its instance takes the next event, its timers and questions go, and a retry of its call does not start.

    Timers of other branches stay.
    """
    await broker.submit(bus, "t")
    child_run = ask("1", "editor", stream="agent", key="e")
    await suspend(bus, await broker.take(bus), child_run, nap("2", 1), nap("6", 3_600_000))
    child = await broker.take(bus)
    parts = ask("1"), ask("2", "desk", stream="agent", key="d"), nap("3", 60_000), question("4", timeout_ms=60_000)
    await suspend(bus, child, *parts)
    assert await bus.retry(await broker.take(bus, "tool"), 1000, b"{}")
    await suspend(bus, await broker.take(bus), nap("1", 60_000))
    await broker.submit(bus, "mail", agent="editor", key="e")
    await broker.pass_time(10)
    await bus.promote()
    turn = await broker.take(bus)
    assert turn.task == "t"
    assert await suspend(bus, turn, withdraw("1"), again("6"), nap("5", 1))
    timers = cast(list[bytes], await broker.call("ZRANGE", broker.keys.timers, 0, -1))
    assert [timer.decode() for timer in timers if timer.startswith(b"s|")] == ["s|t|r|5", "s|t|r|6"]
    mail = await broker.take(bus)
    assert mail.task == "mail"
    assert await complete(bus, mail)
    await broker.pass_time(70_000)
    await bus.promote()
    assert await complete(bus, await broker.take(bus))
    await broker.nothing(bus)
    await broker.idle()


async def test_a_withdrawn_child_in_flight_keeps_its_instance_until_it_arrives(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key="e"), ask("2"))
    child = await broker.take(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    await broker.submit(bus, "mail", agent="editor", key="e")
    assert await complete(bus, await broker.take(bus), withdraw("1"))
    await broker.nothing(bus)
    assert not await complete(bus, child, state=b"1")
    mail = await broker.take(bus)
    assert mail.task == "mail"
    assert await complete(bus, mail)
    await broker.idle()
    assert "state" not in await broker.hash("inst:editor/e")


async def test_a_withdrawn_reentrant_call_never_enters_its_instance(broker: Broker, bus: EventBus) -> None:
    """It waited for the turn that withdraws it."""
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    editor = await broker.take(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await suspend(bus, editor, ask("1", "writer", stream="agent", key="k"))
    assert await suspend(bus, turn, withdraw("1"), nap("3", 1))
    await broker.nothing(bus)
    await broker.pass_time(10)
    await bus.promote()
    assert await complete(bus, await broker.take(bus), state=b'{"n":2}')
    await broker.idle()
    assert (await broker.hash("inst:writer/k")) == {"state": '{"n":2}'}


async def test_the_rows_of_a_withdrawn_run_are_recorded(broker: Broker, bus: EventBus) -> None:
    """It had finished a step in the middle of its turn."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    child = await broker.take(bus)
    assert await bus.record(child, "1", b"d1a2b3c4K1700000000000" + b'"done"', "step", "finished")
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), withdraw("1"), nap("3", 1))
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"] or "[]")]
    assert [row["run"] for row in rows if row["name"] == "finished"] == ["r/1"]
    before = int((await broker.task("t"))["steps"])
    assert not await complete(bus, child)
    assert int((await broker.task("t"))["steps"]) == before == 2


async def test_a_withdrawn_step_that_has_its_result_keeps_it(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    first, second = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert await answer(bus, first)
    turn = await broker.take(bus)
    assert await answer(bus, second)
    assert await suspend(bus, turn, withdraw("2"), again("1"))
    assert {"j:1", "j:2"} <= set(await broker.task("t"))


async def test_a_withdrawn_call_that_was_not_taken_does_not_start(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), nap("1", 1), ask("2"), ask("3"))
    await broker.pass_time(10)
    await bus.promote()
    assert await suspend(bus, await broker.take(bus), withdraw("2"), again("3"))
    async with consuming(broker, "tool") as (handler, _):
        assert await handler.begins() == "t r/3"
        handler.go_on.set()
        await drained(broker, "tool")
        assert handler.began.empty()
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_withdrawn_request_to_another_partition_is_cancelled_there(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    asked = ask("1", "editor", stream="@1:there"), ask("2")
    await suspend(bus, await broker.take(bus), *asked)
    assert await broker.call("ZRANGE", broker.keys.base + "requests", 0, -1) == [b"t|r|1"]
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), withdraw("1"), nap("3", 60_000))
    assert await broker.call("ZRANGE", broker.keys.base + "requests", 0, -1) == [b"@1:there|t"], "it tells the cancel"
    assert [(entry.get("place"), entry.get("cancel")) for entry in await broker.entries("asks")][1:] == [
        ("@1:there", "t")
    ]
    assert not await bus.answer_request("t", "r", "1", b"K", b'"late"', "editor", "there")


async def test_a_withdrawn_run_releases_the_reservations_of_its_calls(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    child = await broker.take(bus)
    call = await bus.begin_call(child, "1", b'{"tokens":[10,10]}')
    assert call is not None
    assert "rs" in await broker.task("t")
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), withdraw("1"), nap("3", 60_000))
    assert "rs" not in await broker.task("t")


async def test_watchers_see_the_end_of_a_withdrawn_run(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    assert (await broker.take(bus)).run == "r/1"
    await bus.call("watch", "t", "n")
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), withdraw("1"), nap("3", 60_000))
    assert [(entry["i"], entry["s"]) for entry in await broker.entries("states")] == [("run/t/r/1", "cancelled")]


async def test_a_run_withdraws_its_open_steps_when_it_ends(broker: Broker, bus: EventBus) -> None:
    """Its task goes on, and so does the instance that the withdrawn run held."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    await suspend(bus, await broker.take(bus), ask("1", "desk", stream="agent", key="d"), ask("2"))
    await suspend(bus, await broker.take(bus), nap("1", 60_000))
    await broker.submit(bus, "mail", agent="desk", key="d")
    calls = {call.run: call for call in [await broker.take(bus, "tool") for _ in range(2)]}
    assert await answer(bus, calls["r/1/2"])
    assert await complete(bus, await broker.take(bus), withdraw("1"))
    turn, mail = await broker.take(bus), await broker.take(bus)
    assert {(turn.task, turn.run), (mail.task, mail.run)} == {("t", "r"), ("mail", "r")}
    assert await broker.hash("run:t/r/1/1") == {}


async def test_a_run_that_ends_cancels_a_withdrawn_request_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    parts = ask("1", "editor", stream="@1:there", wait="0"), ask("2")
    assert await suspend(bus, await broker.take(bus), *parts)
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus), withdraw("1"))
    cancelled = [entry["cancel"] for entry in await broker.entries("asks") if "cancel" in entry]
    assert cancelled == ["t"]


async def test_the_journal_of_a_failed_run_is_deleted_with_its_withdrawal(broker: Broker, bus: EventBus) -> None:
    """It was kept for the redrive of its call, below a run that is withdrawn."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    await suspend(bus, await broker.take(bus), ask("1", "desk", stream="agent"))
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    calls = {call.run: call for call in [await broker.take(bus, "tool") for _ in range(3)]}
    assert await answer(bus, calls["r/1/1/1"])
    desk = await broker.take(bus)
    assert await bury(bus, calls["r/1/1/2"])
    assert await fail(bus, desk)
    assert "c:r/1/1" in await broker.task("t")
    assert (await broker.take(bus)).run == "r/1"
    assert await answer(bus, calls["r/2"])
    assert await suspend(bus, await broker.take(bus), withdraw("1"), nap("3", 60_000))
    assert "c:r/1/1" not in await broker.task("t")
    assert await broker.hash("run:t/r/1/1") == {}
