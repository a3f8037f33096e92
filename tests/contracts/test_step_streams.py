"""A task streams its recorded steps if its client wants them, and its stream always ends."""

from __future__ import annotations

import json
from typing import Any

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, bury, complete, nap, now, question, suspend


async def shown(broker: Broker, task: str) -> list[tuple[str, Any]]:  # Any: JSON
    """Return the stream's events: the last word of the type, and the rows of steps."""
    found = []
    for entry in await broker.entries(f"out:{task}"):
        data = json.loads(entry["data"])
        found.append((entry["type"].rpartition(".")[2], data.get("steps")))
    return found


async def test_steps_of_turns_calls_and_waits_are_shown_in_order(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", streamed=2)
    row = [{"kind": "step"}]
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1", "editor", stream="agent"), record=b'[{"kind":"step"}]', steps=1)
    assert await complete(bus, await broker.take(bus), record=b'[{"kind":"agent"}]')
    assert await suspend(bus, await broker.take(bus), ask("2"))
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", now(), b"1", b'[{"kind":"tool"}]', 1)
    assert await suspend(bus, await broker.take(bus), nap("3", 1000))
    await broker.pass_time(2000)
    await bus.promote()
    assert await suspend(bus, await broker.take(bus), question("4"))
    assert await bus.signal("t", "r:4", b"true") == ["ok"]
    assert await complete(bus, await broker.take(bus), record=b'[{"kind":"agent"}]')
    events = await shown(broker, "t")
    kinds = [rows[0]["kind"] for kind, rows in events if kind == "recorded"]
    assert events[0] == ("recorded", row)
    assert kinds == ["step", "agent", "tool", "timer", "human", "agent"]
    assert events[-1][0] == "completed"
    recorded = [json.loads(entry["d"]) for entry in await broker.entries("record")]
    assert [rows for kind, rows in events if kind == "recorded"] == recorded, "the same rows as in the record"


async def test_without_being_asked_for_no_steps_are_shown(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", streamed=1)
    assert await suspend(bus, await broker.take(bus), ask("1"), record=b'[{"kind":"step"}]', steps=1)
    assert [kind for kind, _ in await shown(broker, "t")] == []
    await bus.call("watch", "t", "1")
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", now(), b"1", b'[{"kind":"tool"}]', 1)
    assert await complete(bus, await broker.take(bus), record=b'[{"kind":"agent"}]')
    assert [kind for kind, _ in await shown(broker, "t")] == ["recorded", "recorded", "completed"]


async def test_every_end_is_on_the_stream(broker: Broker, bus: EventBus) -> None:
    """Whether a time limit, a cancel or a dead letter ended it."""
    await broker.submit(bus, "late", streamed=2, timeout_ms=1000)
    await broker.pass_time(2000)
    await bus.promote()
    await broker.submit(bus, "unwanted", streamed=2)
    await bus.cancel("unwanted", "no longer needed")
    await broker.submit(bus, "poison", streamed=2)
    turns = {turn.task: turn for turn in [await broker.take(bus) for _ in range(3)]}
    assert await bury(bus, turns["poison"])
    ends = {task: (await shown(broker, task))[-1][0] for task in turns}
    assert ends == {"late": "failed", "unwanted": "cancelled", "poison": "failed"}
