"""A task that waits for a tool shows which tool it is, and whether a handler has the call."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from runtime_core.client.task_view import Row, describe_wait, read_task
from tests.contracts.broker import Broker, ask, suspend


async def waits(bus: EventBus, task: str = "t") -> dict[str, Row]:
    view = await read_task(bus, task)
    assert view is not None
    return {wait["step"]: wait for wait in view["waits_for"]}


async def test_a_call_shows_its_tool_and_its_handler(broker: Broker, bus: EventBus) -> None:
    for task in ("other", "t"):
        await broker.submit(bus, task)
        turn = await broker.take(bus)
        assert await suspend(
            bus, turn, ask("1", "search"), ask("2", "crawl", stream="tool:gpu" if task == "t" else "tool")
        )
    await broker.call("HSET", broker.keys.tools, "crawl", "tool:gpu")
    queued = await waits(bus)
    assert (queued["1"]["name"], queued["1"]["handler"]) == ("search", "")
    assert (queued["2"]["name"], queued["2"]["handler"]) == ("crawl", "")
    for _ in range(3):
        call = await broker.take(bus, "tool")
    assert (call.task, call.name) == ("t", "search")
    shown = await waits(bus)
    assert (shown["1"]["name"], shown["1"]["handler"]) == ("search", bus.owner)
    assert shown["1"]["since"] == int(call.entry.partition(b"-")[0])
    assert "attempt" not in shown["1"]
    assert shown["2"]["handler"] == ""
    later = shown["1"]["since"] + 2_000
    assert describe_wait({**shown["1"], "handler": "tool-handler@a.b.77.1a2.b3"}, later) == (
        "tool search, for 2.00 s on tool-handler@a.b, process 77"
    )
    assert "in the queue" in describe_wait(shown["2"], later)
    assert {wait["name"] for wait in (await waits(bus, "other")).values()} == {"search", "crawl"}
