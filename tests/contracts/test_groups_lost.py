"""A lost group is created again from 0 and delivers entries again; each takes effect once."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, bury, complete, emit_pieces, fail, group, suspend


async def test_handled_entries_are_deleted(broker: Broker, bus: EventBus) -> None:
    """A work stream holds only work that is not done."""
    for task in ("a", "b", "c"):
        await broker.submit(bus, task)
    await complete(bus, await broker.take(bus))
    await suspend(bus, await broker.take(bus), ask("1"))
    await answer(bus, await broker.take(bus, "tool"))
    await bus.retry(await broker.take(bus), 60_000, b"{}")
    assert (await broker.take(bus)).task == "b"
    await broker.lose_group("agent")
    await broker.lose_group("tool")
    assert [(await broker.take(bus)).task] == ["b"]
    await broker.nothing(bus)
    await broker.nothing(bus, "tool")


async def test_an_entry_delivered_twice_takes_effect_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    for act in (complete, fail, bury):
        task = act.__name__
        await broker.submit(bus, task, key="k")
        first = await broker.take(bus)
        await broker.lose_group()
        second = await broker.take(other)
        assert first.entry == second.entry
        assert await act(bus, first)
        before = await broker.snapshot()
        for late in (complete, fail, bury):
            assert not await late(other, second)
        assert not await other.retry(second, 0, b"{}")
        assert await other.record(second, "1", b"d1a2b3c4K1700000000000null") is None
        assert not await emit_pieces(other, second, b'"x"', first=1)
        assert await broker.snapshot() == before
    await broker.idle()


async def test_after_a_retry_one_copy_is_in_flight(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    first = await broker.take(bus)
    await broker.lose_group()
    second = await broker.take(other)
    assert await bus.retry(first, 100, b"{}")
    assert not await other.retry(second, 100, b"{}")
    await broker.pass_time(101)
    await bus.promote()
    turn = await broker.take(bus)
    await broker.nothing(bus)
    assert not await complete(other, second)
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_result_delivered_twice_is_applied_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2", wait="g1"))
    first = await broker.take(bus, "tool")
    await broker.lose_group("tool")
    second = await broker.take(other, "tool")
    assert await answer(bus, first, b'"one"')
    assert not await answer(other, second, b'"two"')
    assert not await bury(other, second)
    assert not await other.retry(second, 0, b"{}")
    await broker.nothing(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.journal["1"].endswith(b'"one"')
    await complete(bus, turn)
    await broker.idle()


async def test_a_reader_recreates_a_lost_group_from_the_start(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group("agent"))
    assert await bus.read(["agent"], 1, 5) == ([], [])
    assert (await broker.take(bus)).task == "t"


async def test_work_continues_where_everything_was_flushed(broker: Broker, bus: EventBus) -> None:
    """The stream itself may be gone: a read creates stream and group, and a commit of lost work changes nothing."""
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    for key in await broker.snapshot():
        if not key.endswith((":alive", ":meta", ":agents")):
            await broker.call("DEL", key)
    await bus.read(["agent"], 1, 5)
    assert not await complete(bus, turn, state=b"1")
    assert await broker.status("t") == ""
    assert await broker.hash("inst:writer/k") == {}
    await broker.submit(bus, "u", key="k")
    assert await complete(bus, await broker.take(bus))


async def test_a_lost_group_stops_no_commit(broker: Broker, bus: EventBus) -> None:
    """Held deliveries can be settled even before the group is created again."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group("agent"))
    assert await complete(bus, turn)
    assert await broker.entries("agent") == []
