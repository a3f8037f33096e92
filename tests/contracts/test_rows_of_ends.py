"""A task that ends in the middle of a turn keeps the rows of the steps that the turn has finished."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, bury, complete, emit_pieces, now, suspend

VALUE = b"d1a2b3c4K1700000000000" + json.dumps("a secret").encode()
FAILED = b"d1a2b3c4E1700000000001" + json.dumps({"type": "ValueError", "message": "a secret"}).encode()
ERROR = b'{"type":"Broken","message":"broken"}'


async def rows_of(broker: Broker, task: str) -> list[dict[str, object]]:
    rows = []
    for entry in await broker.entries("record"):
        if entry["t"] == task and entry["d"]:
            rows += json.loads(entry["d"])
    return rows


async def cancelled(broker: Broker, bus: EventBus) -> None:
    assert await bus.cancel("t", "no more") == ["cancelled"]


async def out_of_time(broker: Broker, bus: EventBus) -> None:
    await broker.pass_time(60_000)
    await bus.promote()


@pytest.mark.parametrize("end", [cancelled, out_of_time])
async def test_steps_of_a_turn_that_never_commits_have_their_rows(
    broker: Broker, bus: EventBus, end: Callable[[Broker, EventBus], Awaitable[None]]
) -> None:
    await broker.submit(bus, "t", timeout_ms=60_000)
    turn = await broker.take(bus)
    assert await bus.record(turn, "1", VALUE, "step", "charge") == VALUE
    assert await bus.record(turn, "2", FAILED, "step", 'send "mail"\n') == FAILED
    assert await emit_pieces(bus, turn, b'"half"', first=3)
    await end(broker, bus)
    assert not await complete(bus, turn), "the turn comes too late"
    found = await rows_of(broker, "t")
    assert [(row["run"], row["step"], row["kind"], row["name"], row["status"]) for row in found] == [
        ("r", "1", "step", "charge", "completed"),
        ("r", "2", "step", 'send "mail"', "failed"),
        ("r", "3", "emit", "emit", "completed"),
    ]
    assert (found[0]["started"], found[0]["ended"]) == (1700000000000, 1700000000000)
    assert "secret" not in json.dumps(found), "values are redacted by the process that commits them, and it did not"
    assert (await broker.final("t"))["steps"] == 3
    await broker.idle()


async def test_steps_of_child_runs_have_their_rows_too(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", key="k")
    await suspend(bus, await broker.take(bus), child)
    turn = await broker.take(bus)
    await bus.record(turn, "1", VALUE, "model", "small")
    await bus.cancel("t", "no more")
    assert [(row["run"], row["kind"], row["name"]) for row in await rows_of(broker, "t")] == [("r/1", "model", "small")]
    assert (await broker.final("t"))["steps"] == 1


async def test_the_end_after_a_child_run_does_not_write_the_steps_again(broker: Broker, bus: EventBus) -> None:
    """The end also looks for child runs among the task's fields, which name these steps."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await complete(bus, await broker.take(bus), record=b"", steps=0)
    turn = await broker.take(bus)
    assert await bus.record(turn, "2", VALUE, "step", "charge") == VALUE
    row = json.dumps([{"run": "r", "step": "2", "kind": "step", "name": "charge"}]).encode()
    assert await complete(bus, turn, ["j", "2"], record=row, steps=1)
    assert [row["step"] for row in await rows_of(broker, "t")] == ["2"]
    assert (await broker.final("t"))["steps"] == 1
    await broker.idle()


async def test_a_commit_does_not_write_the_steps_again(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.record(turn, "1", VALUE, "step", "charge")
    assert await complete(bus, turn, steps=2)
    assert (await broker.final("t"))["steps"] == 2
    assert [entry["d"] for entry in await broker.entries("record")] == ["[]"]


async def test_a_run_that_ends_its_process_keeps_the_rows_of_its_steps(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The owner that dead-letters the delivery has never run it."""
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    await other.record(turn, "1", VALUE, "step", "charge")
    await broker.silence(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    assert await bury(bus, adopted, "poison")
    assert [row["step"] for row in await rows_of(broker, "t")] == ["1"]
    assert (await broker.final("t"))["steps"] == 1


async def test_a_dead_child_run_keeps_the_rows_of_its_steps(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    turn = await broker.take(bus)
    await bus.record(turn, "1", VALUE, "step", "charge")
    assert await bury(bus, turn, "poison")
    assert [(row["run"], row["step"]) for row in await rows_of(broker, "t")] == [("r/1", "1")]
    assert (await broker.task("t"))["steps"] == "1"


async def test_a_child_that_ends_its_task_has_its_rows_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    assert await bus.record(child, "1", VALUE, "step", "charge") == VALUE
    error = b'{"type":"LimitExceeded","message":"over"}'
    record = b'[{"run":"r/1","kind":"step","name":"charge","step":"1"}]'
    assert await bus.commit_turn(child, "x", now(), record, 1, error, b"", [], 0)
    assert [row["step"] for row in await rows_of(broker, "t") if row.get("name") == "charge"] == ["1"]


async def fails(bus: EventBus, turn: Delivery, record: bytes) -> bool:
    return await bus.commit_turn(turn, "f", now(), record, 2, ERROR, b"", [], 0)


async def is_given_up(bus: EventBus, turn: Delivery, record: bytes) -> bool:
    return await bus.dead_letter(turn.stream, turn.entry, "attempts", b"[]", now(), ERROR, record, 2)


@pytest.mark.parametrize("run", ["r", "r/1"])
@pytest.mark.parametrize("end", [fails, is_given_up])
async def test_a_failed_run_has_its_rows_once(
    broker: Broker, bus: EventBus, end: Callable[[EventBus, Delivery, bytes], Awaitable[bool]], run: str
) -> None:
    """The process that ran the turn writes them with its failure."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    if run != "r":
        await suspend(bus, turn, ask("1", "editor", stream="agent"))
        turn = await broker.take(bus)
    await bus.record(turn, "1", VALUE, "step", "charge")
    rows = [{"run": run, "kind": "run", "name": "writer"}, {"run": run, "kind": "step", "name": "charge", "step": "1"}]
    assert await end(bus, turn, json.dumps(rows).encode())
    assert await rows_of(broker, "t") == rows


async def test_rows_are_not_written_again_after_a_reopened_end(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    assert await bury(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    await bus.record(turn, "3", VALUE, "step", "charge")
    await bus.cancel("t", "no more")
    (letter,) = await broker.entries("dead")
    assert await bus.redrive(letter["id"], True) == ["ok", "t"]
    await bus.cancel("t", "no more")
    assert [row["step"] for row in await rows_of(broker, "t")] == ["3"]


async def test_a_run_that_a_repair_ends_keeps_the_rows_of_its_steps(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    turn = await broker.take(bus)
    await bus.record(turn, "1", VALUE, "step", "charge")
    await broker.call("XDEL", broker.keys.stream("agent"), turn.entry)
    assert await bus.call("repair", "run", "t", "r/1", turn.entry.decode(), now(), ERROR) == b"OK"
    assert [(row["run"], row["step"]) for row in await rows_of(broker, "t")] == [("r/1", "1")]
