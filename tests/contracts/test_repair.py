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


async def test_a_run_whose_entry_exists_is_not_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    before = await broker.snapshot()
    assert not await repair(bus, "run", "t", "r", turn.entry.decode())
    assert await broker.snapshot() == before
    assert await complete(bus, turn)


async def test_a_run_that_went_on_is_not_ended(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await suspend(bus, turn, ask("1"))
    before = await broker.snapshot()
    assert not await repair(bus, "run", "t", "r", turn.entry.decode())
    assert await broker.snapshot() == before


async def test_a_run_whose_entry_was_cut_out_is_ended(broker: Broker, bus: EventBus) -> None:
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
