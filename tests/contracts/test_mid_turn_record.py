"""A step that is journaled in mid-turn: put if absent, only for the running turn, and recorded at the end."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from runtime_core.app.app import App
from runtime_core.bus import commits
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced, LimitExceeded
from runtime_core.runs.commit import TurnPort
from runtime_core.runs.output import Piece
from runtime_core.telemetry.redaction import Redactor, use
from runtime_core.wire.step import ENCODER, STEPS, Step
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, emit_pieces, suspend


class Reconnecting(Redactor):
    """Loses the connection while it redacts its first row. Another commit follows before it goes on."""

    def __init__(self, bus: EventBus, admin: Broker, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._bus = bus
        self._admin = admin
        self._meanwhile: Callable[[], Awaitable[object]] | None = meanwhile

    async def rows(self, data: bytes) -> bytes:
        if (meanwhile := self._meanwhile) is not None:
            self._meanwhile = None
            transport, before = self._bus.transport, self._bus.transport.reconnects
            await self._admin.call("CLIENT", "KILL", "ID", str(await transport.call("CLIENT", "ID")))
            while transport.reconnects == before:
                await transport.call("PING")
            await meanwhile()
        return await super().rows(data)


def row_with_messages(name: str, count: int) -> bytes:
    messages = [{"role": "user", "content": f"{name} {number} {'x' * 1000}"} for number in range(count)]
    input = msgspec.Raw(ENCODER.encode({"messages": messages}))
    return ENCODER.encode([Step("r", "model", "m", "completed", 1.0, 2.0, input=input)])


FIRST = f'{DIGEST}K1700000000000"first"'.encode()
SECOND = f'{DIGEST}K1700000000001"second"'.encode()


async def test_a_step_is_put_if_absent(broker: Broker, bus: EventBus) -> None:
    """The second owner continues with the steps that the first one stored."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await bus.record(turn, "1", FIRST) == FIRST
    assert await bus.record(turn, "1", SECOND) == FIRST
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.journal == {"1": FIRST}
    assert loaded.unrecorded == {"1": b""}


async def test_the_new_owner_continues_with_the_steps_of_the_dead_one(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A model call that was paid for is not paid for again, and the dead one cannot overwrite it."""
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    assert await other.record(turn, "1", FIRST) == FIRST
    await broker.silence(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    loaded = await bus.load(adopted)
    assert loaded is not None
    assert loaded.journal == {"1": FIRST}
    with pytest.raises(Fenced):
        await other.record(turn, "2", SECOND)
    assert await bus.record(adopted, "2", FIRST) == FIRST


async def test_recording_acknowledges_and_extends_nothing(broker: Broker, bus: EventBus) -> None:
    """The delivery stays this owner's, to be committed or adopted."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.record(turn, "1", FIRST)
    assert await bus.own_pending("agent") == {turn.entry: 1}
    assert [entry["id"] for entry in await broker.entries("agent")] == [turn.entry.decode()]


async def test_an_ended_turn_records_nothing(broker: Broker, bus: EventBus) -> None:
    """The turn was committed, by this owner or another; its late step would be the next turn's."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1"))
    before = await broker.snapshot()
    assert await bus.record(turn, "2", FIRST) is None
    assert not await emit_pieces(bus, turn, b'"x"', first=2)
    assert await broker.snapshot() == before


async def test_an_ended_task_records_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.cancel("t", "not wanted")
    before = await broker.snapshot()
    assert await bus.record(turn, "1", FIRST) is None
    assert not await emit_pieces(bus, turn, b'"x"', first=1)
    assert await broker.snapshot() == before


async def test_a_run_of_an_ended_task_records_nothing(broker: Broker, bus: EventBus) -> None:
    """The journal of a child run is another key, and is deleted with the task too."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    await bus.cancel("t", "not wanted")
    before = await broker.snapshot()
    assert await bus.record(child, "1", FIRST) is None
    assert not await emit_pieces(bus, child, b'"x"', first=1)
    assert await broker.snapshot() == before


async def test_a_journal_has_a_limit(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a journal at each turn must not grow without bound; the error names the run's limit."""
    monkeypatch.setattr(commits, "JOURNAL_LIMIT", 12)
    await broker.submit(bus, "t")
    turn = await broker.take(bus)

    async def fill() -> None:
        for step in range(20):
            await bus.record(turn, str(step), FIRST)

    with pytest.raises(LimitExceeded, match="limit of 12 steps"):
        await fill()
    before = await broker.snapshot()
    with pytest.raises(LimitExceeded):
        await bus.record(turn, "30", FIRST)
    assert await broker.snapshot() == before
    assert await bus.record(turn, "0", SECOND) == FIRST
    assert len(await broker.task("t")) <= 12


async def test_steps_that_were_journaled_in_mid_turn_are_unrecorded_until_the_commit(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Their rows are written with the turn's commit, by any owner."""
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    await other.record(turn, "1", FIRST)
    await other.record(turn, "2", FIRST)
    await broker.silence(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    loaded = await bus.load(adopted)
    assert loaded is not None
    assert loaded.unrecorded == {"1": b"", "2": b""}
    assert await suspend(bus, adopted, ask("3"), record=b'[["1"],["2"]]', steps=2)
    assert await answer(bus, await broker.take(bus, "tool"))
    resumed = await bus.load(await broker.take(bus))
    assert resumed is not None
    assert resumed.unrecorded == {}
    assert sorted(resumed.journal) == ["1", "2", "3"]


async def test_the_record_holds_as_many_steps_as_the_final_event_counts(broker: Broker, bus: EventBus) -> None:
    """Turns with their local steps, calls, a child run and a dead letter, each once, in one stream."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    parts = (ask("1", wait="g1"), ask("2", wait="g1"), ask("3", "editor", stream="agent", wait="g1"))
    assert await suspend(bus, turn, *parts, record=b'["model", "local"]', steps=2)
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", 1, b"1", b'["call"]', 1)
    dead = await broker.take(bus, "tool")
    error = b'{"type":"Broken","message":"at last"}'
    assert await bus.dead_letter("tool", dead.entry, "attempts", b"[]", 1, error, b'["dead"]', 1)
    assert await complete(bus, await broker.take(bus), record=b'["child"]', steps=1)
    assert await complete(bus, await broker.take(bus), record=b'["run"]', steps=1)
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"])]
    assert rows == ["model", "local", "call", "dead", "child", "run"]
    final = await broker.final("t")
    assert final["steps"] == len(rows)
    assert final["status"] == "completed"
    last = (await broker.entries("record"))[-1]
    assert last["e"].split("\n")[:3] == ["completed", "writer", "6"]


async def test_a_late_commit_records_nothing(broker: Broker, bus: EventBus) -> None:
    """Effects that did not happen have no rows."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1"), record=b'["a"]', steps=1)
    call = await broker.take(bus, "tool")
    assert await answer(bus, call)
    before = await broker.entries("record")
    assert not await answer(bus, call)
    assert not await suspend(bus, turn, ask("1"), record=b'["a"]', steps=1)
    assert not await bury(bus, call)
    assert await broker.entries("record") == before


async def test_a_write_of_a_lost_turn_is_not_a_separate_error(broker: Broker, bus: EventBus) -> None:
    """The turn is dropped without waiting: its owner was declared dead."""
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["message"]))
    await broker.owner()
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.silence(bus)
    port = TurnPort(bus, turn, App("lost"))
    port.emit(Piece("", 1, 1, 0, "1", b'"a"', chunk=False), {})
    port.stream("2", 1, b'"b"')
    port.note("3", DIGEST)
    writes = list(port._writes)
    await asyncio.wait(writes)
    del port, writes
    gc.collect()
    assert unheard == []


async def test_no_row_names_a_list_that_a_reconnect_has_forgotten(broker: Broker, bus: EventBus) -> None:
    """The server behind the new connection may lack the rows with the list."""
    for task in ("t", "u"):
        await broker.submit(bus, task)
    first, other = await broker.take(bus), await broker.take(bus)
    assert await suspend(bus, first, ask("1"), record=row_with_messages("a", 10), steps=1)
    assert await answer(bus, await broker.take(bus, "tool"))
    second = await broker.take(bus)

    async def meanwhile() -> None:
        assert await complete(bus, other, record=row_with_messages("b", 10), steps=1)

    with use(Reconnecting(bus, broker, meanwhile)):
        assert await complete(bus, second, record=row_with_messages("a", 11), steps=1)
    rows = [row for entry in await broker.entries("record") for row in STEPS.decode(entry["d"].encode())]
    sent = [(len(json.loads(bytes(row.input))["messages"]), row.input_after) for row in rows if row.name == "m"]
    assert sent == [(10, ""), (10, ""), (11, "")]
