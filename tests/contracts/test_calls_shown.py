"""A task that waits shows for what, and since when: the tool and its handler, the message, the task ahead of it."""

from __future__ import annotations

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.client.task_view import Row, describe_wait, read_task
from tests.contracts.broker import Broker, ask, nap, receive, suspend


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
        "tool search, for 2 s on tool-handler@a.b, process 77"
    )
    assert "in the queue" in describe_wait(shown["2"], later)
    assert {wait["name"] for wait in (await waits(bus, "other")).values()} == {"search", "crawl"}


async def test_a_later_attempt_shows_why_the_earlier_ones_failed(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "search"))
    error = {"type": "TimeoutError", "message": "took over 60 s", "started": 1.0, "at": 2.0}
    assert await bus.retry(await broker.take(bus, "tool"), 0, msgspec.json.encode(error))
    await bus.promote()
    for handler in ("", bus.owner):
        if handler:
            await broker.take(bus, "tool")
        shown = (await waits(bus))["1"]
        assert (shown["handler"], shown["attempt"], shown["errors"]) == (handler, 2, [error])


async def test_a_message_shows_its_name_and_since_when_it_is_awaited(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, receive("1", "paid"), nap("2", 3_600_000))
    shown = await waits(bus)
    assert shown["1"]["name"] == "paid"
    assert abs(shown["1"]["since"] - shown["2"]["since"]) < 1_000
    assert describe_wait(shown["1"], 0) == "message paid"
    assert describe_wait(shown["2"], shown["2"]["due"] - 7_200_000) == "sleep, ends in 2 h 00 min"


async def test_a_run_in_a_mailbox_shows_the_task_that_holds_its_key(broker: Broker, bus: EventBus) -> None:
    """A task of another tenant is not named."""
    for task, tenant in (("first", "acme"), ("second", "acme"), ("stranger", "globex")):
        await broker.submit(bus, task, key="k", tenant=tenant, in_turn=True)
    wait = (await waits(bus, "second"))[""]
    view = await read_task(bus, "second")
    assert view is not None
    assert (wait["holder"], wait["since"]) == ("first", view["created"])
    assert describe_wait(wait, 0) == "for its turn in the mailbox of writer/k, which task first holds"
    assert "holder" not in (await waits(bus, "stranger"))[""]
