"""A run carries the row of the call that wakes it until its next commit, and no end of the run or its task loses it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, bury, complete, fail, now, suspend
from tests.contracts.test_rows_of_ends import ERROR, rows_of


async def found(bus: EventBus, call: Delivery, *, padding: int = 0) -> None:
    """Commit a call with its row, which names the call's run."""
    row = json.dumps([{"run": call.run, "kind": "tool", "input": "x" * padding}]).encode()
    assert await bus.commit_call(call, b"K", now(), b'"found"', row, 1)


async def calls_of(broker: Broker) -> list[object]:
    return [row["run"] for row in await rows_of(broker, "t") if row["kind"] == "tool"]


async def woken(broker: Broker, bus: EventBus, *, streamed: int = 0, padding: int = 0) -> Delivery:
    """Return the turn of a run that a call has woken."""
    await broker.submit(bus, "t", timeout_ms=60_000, streamed=streamed)
    await suspend(bus, await broker.take(bus), ask("1"))
    await found(bus, await broker.take(bus, "tool"), padding=padding)
    return await broker.take(bus)


async def woken_child(broker: Broker, bus: EventBus) -> Delivery:
    await broker.submit(bus, "t", timeout_ms=60_000)
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    await suspend(bus, await broker.take(bus), ask("1"))
    await found(bus, await broker.take(bus, "tool"))
    return await broker.take(bus)


@pytest.mark.parametrize("wake", [woken, woken_child])
async def test_the_next_commit_records_it_once(
    broker: Broker, bus: EventBus, wake: Callable[[Broker, EventBus], Awaitable[Delivery]]
) -> None:
    turn = await wake(broker, bus)
    assert await calls_of(broker) == []
    await suspend(bus, turn, ask("2"))
    first = f"{turn.run}/1"
    assert await calls_of(broker) == [first]
    await found(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus), record=b'[{"run":"own","kind":"agent"}]')
    rows = await rows_of(broker, "t")
    assert [row["run"] for row in rows] == [first, f"{turn.run}/2", "own"]
    if turn.run == "r":
        assert (await broker.final("t"))["steps"] == len(rows)


async def cancelled(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    assert await bus.cancel("t", "no more") == ["cancelled"]


async def out_of_time(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    await broker.pass_time(60_000)
    await bus.promote()


async def failed(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    assert await fail(bus, turn)


async def over_a_limit(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    assert await fail(bus, turn, mode="x")


async def poisoned(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    assert await bury(bus, turn, "poison")


async def lost(broker: Broker, bus: EventBus, turn: Delivery) -> None:
    await broker.call("XDEL", broker.keys.stream("agent"), turn.entry)
    assert await bus.call("repair", "run", "t", turn.run, turn.entry.decode(), now(), ERROR) == b"OK"


@pytest.mark.parametrize("wake", [woken, woken_child])
@pytest.mark.parametrize("end", [cancelled, out_of_time, failed, over_a_limit, poisoned, lost])
async def test_every_end_records_it_once(
    broker: Broker,
    bus: EventBus,
    wake: Callable[[Broker, EventBus], Awaitable[Delivery]],
    end: Callable[[Broker, EventBus, Delivery], Awaitable[None]],
) -> None:
    turn = await wake(broker, bus)
    await end(broker, bus, turn)
    assert await calls_of(broker) == [f"{turn.run}/1"]


@pytest.mark.parametrize("run", ["r", "r/1"])
async def test_a_reopened_run_does_not_record_it_again(broker: Broker, bus: EventBus, run: str) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    if run == "r":
        await suspend(bus, turn, ask("1"), ask("2"))
    else:
        await suspend(bus, turn, ask("1", "editor", stream="agent"))
        await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    calls = [await broker.take(bus, "tool") for _ in range(2)]
    await found(bus, calls[0])
    await broker.take(bus)
    assert await bury(bus, calls[1])
    await bus.cancel("t", "no more")
    (letter,) = await broker.entries("dead")
    assert await bus.redrive(letter["id"], True) == ["ok", "t"]
    turn = await broker.take(bus)
    if run != "r":
        await suspend(bus, turn, ask("1", "editor", stream="agent"))
        turn = await broker.take(bus)
    assert await complete(bus, turn)
    assert await calls_of(broker) == [f"{run}/1"]


async def test_a_run_carries_the_rows_of_one_call(broker: Broker, bus: EventBus) -> None:
    """A parked run that a redriven call wakes has not committed since the call before."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    calls = [await broker.take(bus, "tool") for _ in range(2)]
    await found(bus, calls[0])
    assert await bury(bus, calls[1])
    (letter,) = await broker.entries("dead")
    assert await bury(bus, await broker.take(bus), "diverged")
    assert await bus.redrive(letter["id"], False) == ["ok", "t"]
    await found(bus, await broker.take(bus, "tool"))
    assert await calls_of(broker) == ["r/2"]
    assert await complete(bus, await broker.take(bus))
    assert await calls_of(broker) == ["r/2", "r/1"]


async def test_a_client_that_wants_steps_gets_it_at_once(broker: Broker, bus: EventBus) -> None:
    await woken(broker, bus, streamed=2)
    assert await calls_of(broker) == ["r/1"]
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.step.recorded"]


async def test_a_large_one_is_recorded_at_once(broker: Broker, bus: EventBus) -> None:
    """The next commit would have to read it."""
    await woken(broker, bus, padding=20_000)
    assert await calls_of(broker) == ["r/1"]
