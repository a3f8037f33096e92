"""A repair checks again before it releases or ends anything: it changes nothing that is still making progress."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, complete, now, suspend

ERROR = b'{"type":"Lost","message":"lost"}'


async def repair(bus: EventBus, what: str, task: str, run: str, detail: str) -> bool:
    return await bus.call("repair", what, task, run, detail, now(), ERROR) == b"OK"


@pytest.mark.parametrize("waits", [False, True])
async def test_an_instance_whose_run_exists_is_not_freed(broker: Broker, bus: EventBus, waits: bool) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    turn = await broker.take(bus)
    if waits:
        await suspend(bus, turn, ask("1"))
    before = await broker.snapshot()
    assert not await repair(bus, "instance", "t", "r", "writer/k")
    assert await broker.snapshot() == before


async def test_an_instance_whose_run_is_gone_is_freed(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    await broker.take(bus)
    await broker.call("DEL", broker.keys.task("t"))
    assert await repair(bus, "instance", "t", "r", "writer/k")
    assert (await broker.take(bus)).task == "next"


@pytest.mark.parametrize("run", ["r/1", "r/2"])
async def test_an_instance_that_another_run_holds_is_not_freed(broker: Broker, bus: EventBus, run: str) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    before = await broker.snapshot()
    assert not await repair(bus, "instance", "t", run, "writer/k")
    assert not await repair(bus, "instance", "t", run, "writer/never")
    assert await broker.snapshot() == before


async def test_a_mailbox_without_a_holder_continues(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    await complete(bus, await broker.take(bus))
    await broker.call("XTRIM", broker.keys.stream("agent"), "MAXLEN", 0)
    await broker.submit(bus, "last", key="k")
    await broker.call("HDEL", broker.keys.base + "inst:writer/k", "busy")
    assert await repair(bus, "mailbox", "", "", "writer/k")
    await bus.promote()
    turn = await broker.take(bus)
    assert turn.task == "last"
    await complete(bus, turn)
    assert await broker.status("last") == "completed"
    assert "busy" not in await broker.hash("inst:writer/k")


async def test_a_mailbox_with_a_holder_or_without_events_is_not_repaired(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    assert not await repair(bus, "mailbox", "", "", "writer/k")
    await broker.submit(bus, "next", key="k")
    before = await broker.snapshot()
    assert not await repair(bus, "mailbox", "", "", "writer/k")
    assert not await repair(bus, "mailbox", "", "", "writer/never")
    assert await broker.snapshot() == before


async def test_a_run_whose_entry_exists_is_not_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    before = await broker.snapshot()
    assert not await repair(bus, "run", "t", "r", turn.entry.decode())
    assert await broker.snapshot() == before
    assert await complete(bus, turn)


async def test_a_run_that_continued_is_not_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await suspend(bus, turn, ask("1"))
    before = await broker.snapshot()
    assert not await repair(bus, "run", "t", "r", turn.entry.decode())
    assert await broker.snapshot() == before


async def test_a_run_whose_entry_was_deleted_is_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await broker.call("XDEL", broker.keys.stream("agent"), turn.entry)
    assert await repair(bus, "run", "t", "r", turn.entry.decode())
    assert await broker.status("t") == "failed"
    assert "busy" not in await broker.hash("inst:writer/k")


async def test_a_call_that_was_answered_is_not_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    before = await broker.snapshot()
    assert not await repair(bus, "call", "t", "r/1", "")
    assert await broker.snapshot() == before


async def test_ended_tasks_are_not_repaired(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await suspend(bus, turn, ask("1"))
    await bus.cancel("t", "enough")
    # As a task that a loss of the newest writes has left half ended.
    await broker.call("HSET", broker.keys.task("t"), "cur", turn.entry, "m:1", "0a1b2c3dt!")
    before = await broker.snapshot()
    assert not await repair(bus, "run", "t", "r", turn.entry.decode())
    assert not await repair(bus, "call", "t", "r/1", "")
    assert not await repair(bus, "call", "never", "r/1", "")
    assert await broker.snapshot() == before


async def test_a_child_run_whose_entry_was_deleted_fails_its_step(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    part = ask("1", "editor", stream="agent", key="e", context=b'{"session_id":"s"}')
    await suspend(bus, await broker.take(bus), part)
    child = await broker.take(bus)
    await broker.call("XDEL", broker.keys.stream("agent"), child.entry)
    assert await repair(bus, "run", "t", "r/1", child.entry.decode())
    assert "busy" not in await broker.hash("inst:editor/e")
    await its_step_has_failed(broker, bus, name="editor", x='{"session_id":"s"}')


async def test_a_call_whose_entry_was_deleted_fails_its_step(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    await broker.call("XTRIM", broker.keys.stream("tool"), "MAXLEN", 0)
    assert await repair(bus, "call", "t", "r/1", "")
    await its_step_has_failed(broker, bus, name="1")


async def its_step_has_failed(broker: Broker, bus: EventBus, **letter: str) -> None:
    """Its task goes on with the error, and is kept for a redrive of the dead letter."""
    (found,) = await broker.entries("dead")
    assert (found["runid"], found["reason"]) == ("r/1", "lost")
    assert letter.items() <= found.items()
    resumed = await broker.take(bus)
    assert (resumed.run, resumed.step, resumed.data[8:9]) == ("r", "1", b"E")
    assert await complete(bus, resumed)
    assert await broker.call("TTL", broker.keys.task("t")) == -1
    assert await broker.call("ZRANGE", broker.keys.base + "letters", 0, -1) == [f"t|{found['id']}".encode()]
