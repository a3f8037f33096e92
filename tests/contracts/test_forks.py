"""A fork starts with another task's results: the task and its journal are stored together or not at all."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Submitted
from runtime_core.errors import Rejected
from runtime_core.wire.commands import ForkJournal
from tests.contracts.broker import Broker, ask, complete, suspend

VALUE = b"*1234567K1700000000000" + b'"found"'


def begun(**journal: bytes) -> ForkJournal:
    return ForkJournal("origin", "3", {"1": VALUE, **journal})


async def test_a_fork_has_its_journal_and_is_read_with_it(broker: Broker, bus: EventBus) -> None:
    assert await broker.submit(bus, "f", begun=begun()) == Submitted("f", "accepted", True)
    turn = await broker.take(bus)
    # No start event: its reader would take the run for one without a past.
    assert (turn.kind, turn.task, turn.run, turn.name) == ("resume", "f", "r", "writer")
    fields = await bus.load(turn)
    assert fields is not None
    assert fields.cur == turn.entry.decode()
    assert fields.journal == {"1": VALUE}
    assert fields.data == b'"hi"'
    assert len(await broker.entries("agent")) == 1
    assert await complete(bus, turn)
    assert (await broker.final("f"))["status"] == "completed"
    await broker.idle()


async def test_a_fork_may_take_the_start_time_of_its_origin(broker: Broker, bus: EventBus) -> None:
    for key in ("", "k"):
        task = f"f{key}"
        await broker.submit(bus, task, key=key, begun=ForkJournal("origin", "", {"1": VALUE}, started_ms=1700000000000))
        turn = await broker.take(bus)
        fields = await bus.load(turn)
        assert fields is not None
        assert fields.started_ms == 1700000000000
        assert await complete(bus, turn)
        assert (await broker.final(task))["status"] == "completed"


async def test_a_fork_names_its_origin_on_the_record(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "f", begun=begun())
    (entry,) = await broker.entries("record")
    (row,) = json.loads(entry["d"])
    assert (row["kind"], row["name"], row["input"]) == ("fork", "origin", {"task": "origin", "step": "3"})
    task = await broker.task("f")
    assert json.loads(task["from"]) == {"task": "origin", "step": "3"}
    assert task["steps"] == "1"


async def test_a_repeated_fork_starts_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "f", begun=begun())
    before = await broker.snapshot()
    assert await broker.submit(bus, "f", begun=begun()) == Submitted("f", "accepted", False)
    with pytest.raises(Rejected, match="different content"):
        await broker.submit(bus, "f", begun=begun(), digest="other")
    assert await broker.snapshot() == before


async def test_a_fork_with_a_key_waits_for_its_turn_on_the_instance(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first", key="k")
    await broker.submit(bus, "f", key="k", begun=begun())
    assert await broker.mailbox("writer/k") == ["f|r"]
    assert await complete(bus, await broker.take(bus))
    turn = await broker.take(bus)
    assert turn.task == "f"
    fields = await bus.load(turn)
    assert fields is not None
    assert fields.journal == {"1": VALUE}


CHILD = {"1": VALUE, "2/": b"editor", "2/1": VALUE, "2/2/": b"", "2/2/1": VALUE}
"""The child run of step 2 has a result, and so has the run that its step 2 started."""


@pytest.mark.parametrize("name", ["editor", "desk"])
async def test_a_fork_continues_the_runs_of_the_agents_that_its_origin_called(
    broker: Broker, bus: EventBus, name: str
) -> None:
    """If it requests the same agent; another one starts from its beginning."""
    await broker.submit(bus, "f", begun=ForkJournal("origin", "3", CHILD))
    turn = await broker.take(bus)
    fields = await bus.load(turn)
    assert fields is not None
    assert fields.journal == {"1": VALUE}
    await suspend(bus, turn, ask("2", name, stream="agent"))
    child = await broker.take(bus)
    fields = await bus.load(child)
    assert child.run == "r/2"
    assert fields is not None
    assert fields.journal == ({"1": VALUE} if name == "editor" else {})
    if name == "editor":
        await suspend(bus, child, ask("2", "desk", stream="agent", key="d"))
        below = await broker.take(bus)
        fields = await bus.load(below)
        assert fields is not None
        assert (below.run, fields.journal) == ("r/2/2", {"1": VALUE})
        assert await complete(bus, below)
        child = await broker.take(bus)
    else:
        await suspend(bus, child, ask("2", stream="agent", name="editor"))
        below = await broker.take(bus)
        fields = await bus.load(below)
        assert fields is not None
        assert fields.journal == {}
        assert await complete(bus, below)
        child = await broker.take(bus)
    assert await complete(bus, child)
    assert await complete(bus, await broker.take(bus))
    assert (await broker.final("f"))["status"] == "completed"
    await broker.idle()


@pytest.mark.parametrize("end", ["cancelled", "completed"])
async def test_the_runs_that_a_fork_never_requests_go_with_it(broker: Broker, bus: EventBus, end: str) -> None:
    await broker.submit(bus, "f", begun=ForkJournal("origin", "3", CHILD))
    turn = await broker.take(bus)
    if end == "cancelled":
        await bus.cancel("f", "no more")
    assert await complete(bus, turn) is (end == "completed")
    await broker.idle()


async def test_a_long_journal_is_copied_completely(broker: Broker, bus: EventBus) -> None:
    many = {str(step): VALUE for step in range(1, 6001)}
    await broker.submit(bus, "f", begun=ForkJournal("origin", "6001", many))
    fields = await bus.load(await broker.take(bus))
    assert fields is not None
    assert fields.journal == many
