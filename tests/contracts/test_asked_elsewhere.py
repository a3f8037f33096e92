"""A step answered by another partition: the relay may repeat the answer."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, complete, send, suspend


async def asked(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    part = ask("1", "writer", stream="@1:there", key="k")
    assert await suspend(bus, await broker.take(bus), part)


async def test_a_request_is_written_to_the_stream_of_asks(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus)
    [entry] = await broker.entries("asks")
    assert (entry["place"], entry["agent"], entry["key"], entry["back"]) == ("@1:there", "writer", "k", "t|r|1")
    await broker.nothing(bus)


async def test_an_answer_that_is_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """One result, one row, one step counted, one resume."""
    await asked(broker, bus)
    assert await bus.answer_request("t", "r", "1", b"K", b'"yes"', "writer", "there")
    before = await broker.snapshot()
    assert not await bus.answer_request("t", "r", "1", b"K", b'"other"', "writer", "there")
    assert await broker.snapshot() == before
    turn = await broker.take(bus)
    assert (turn.kind, turn.step, turn.data[-5:]) == ("resume", "1", b'"yes"')
    await broker.nothing(bus)
    assert await complete(bus, turn)


async def test_an_answer_to_an_ended_task_is_dropped(broker: Broker, bus: EventBus) -> None:
    """The task there learns that this one has ended, and its later answers change nothing."""
    await asked(broker, bus)
    await bus.cancel("t", "enough")
    assert [entry.get("cancel") for entry in await broker.entries("asks")] == [None, "t"]
    before = await broker.snapshot()
    assert not await bus.answer_request("t", "r", "1", b"K", b'"late"', "writer", "there")
    assert await broker.snapshot() == before


async def test_a_message_is_written_to_the_stream_of_asks(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await complete(bus, await broker.take(bus), send("note", "@1:editor", key="e", data=b'"news"'))
    (entry,) = await broker.entries("asks")
    assert (entry["place"], entry["agent"], entry["key"], entry["d"], entry["back"]) == (
        "@1:note", "editor", "e", '"news"', "",
    )  # fmt: skip
    assert await broker.task("note") == {}
    await broker.nothing(bus)
