"""Messages to a running task: each is received once, in order, however the run and the sender are interrupted."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, again, ask, complete, nap, receive, suspend, withdraw

DEADLINE_MS = 60_000


async def waiting(broker: Broker, bus: EventBus, *parts: list[bytes | str | int | float]) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), *parts)


async def fields(broker: Broker) -> dict[str, str]:
    """The task's fields, without the packed ones."""
    flat = await broker.call("HGETALL", broker.keys.task("t"))
    assert isinstance(flat, list)
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    return {
        name.decode(): value.decode()
        for name, value in found.items()
        if isinstance(name, bytes) and isinstance(value, bytes) and name[:2] not in (b"i:", b"v:")
    }


async def results(broker: Broker) -> dict[str, str]:
    """The journal's results by step, without digest and time."""
    return {name[2:]: value[8] + value[22:] for name, value in (await fields(broker)).items() if name[:2] == "j:"}


async def inbox(broker: Broker) -> str:
    """The number and bytes of the kept messages."""
    return (await fields(broker)).get("ib", "")


async def test_a_message_wakes_the_step_that_waits(broker: Broker, bus: EventBus) -> None:
    await waiting(broker, bus, receive("1"))
    assert await bus.send_message("t", "news", b'"first"', "shop\n1") == ["ok"]
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "1")
    assert await results(broker) == {"1": 'K"first"'}
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_received_message_is_on_the_record(broker: Broker, bus: EventBus) -> None:
    await waiting(broker, bus, receive("1"))
    await bus.send_message("t", "news", b'"first"', "shop\n1")
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"] or "[]")]
    (row,) = [row for row in rows if row["run"] == "r" and row["step"] == "1"]
    assert (row["kind"], row["name"], row["output"], row["status"]) == ("receive", "news", "first", "completed")
    assert (await broker.task("t"))["steps"] == "1"
    assert await complete(bus, await broker.take(bus))
    assert (await broker.final("t"))["steps"] == 2


async def test_messages_are_kept_and_received_in_order(broker: Broker, bus: EventBus) -> None:
    """Before the task begins, while its turn runs, and under another name."""
    await broker.submit(bus, "t")
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    turn = await broker.take(bus)
    assert await bus.send_message("t", "news", b"2", "shop\n2") == ["ok"]
    assert await bus.send_message("t", "other", b"3", "shop\n3") == ["ok"]
    assert await inbox(broker) == "3 3"
    for step, value in (("1", "K1"), ("2", "K2")):
        assert await suspend(bus, turn, receive(step))
        assert (await results(broker))[step] == value
        turn = await broker.take(bus)
    assert await inbox(broker) == "1 1"
    assert await suspend(bus, turn, receive("3"))
    await broker.nothing(bus)


async def test_a_message_is_received_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Its sender repeats it, before it is received, after, and when the task has ended."""
    await broker.submit(bus, "t")
    repeats = await asyncio.gather(*(each.send_message("t", "news", b"1", "shop\n1") for each in (bus, other, bus)))
    assert repeats == [["ok"]] * 3
    assert await inbox(broker) == "1 1"
    assert await suspend(bus, await broker.take(bus), receive("1"), receive("2"))
    before = await broker.snapshot()
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    assert await bus.send_message("t", "news", b"2", "shop\n1") == ["reused"]
    assert await broker.snapshot() == before
    await bus.cancel("t", "no more")
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    assert await bus.send_message("t", "news", b"1", "shop\n2") == ["ended", "cancelled"]
    assert await bus.send_message("nobody", "news", b"1", "shop\n3") == ["unknown"]


async def test_two_steps_get_one_message_each(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await waiting(broker, bus, receive("1", wait="g0"), receive("2", wait="g0"))
    await asyncio.gather(
        bus.send_message("t", "news", b"1", "shop\n1"), other.send_message("t", "news", b"2", "shop\n2")
    )
    assert sorted((await results(broker)).values()) == ["K1", "K2"]
    await broker.take(bus)
    await broker.nothing(bus)


async def test_a_turn_that_is_repeated_takes_no_second_message(broker: Broker, bus: EventBus) -> None:
    """Its owner died before the commit, or the reply to the commit was lost."""
    await broker.submit(bus, "t")
    await bus.send_message("t", "news", b"1", "shop\n1")
    await bus.send_message("t", "news", b"2", "shop\n2")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, receive("1"))
    before = await broker.snapshot()
    assert not await suspend(bus, turn, receive("1"))
    assert await broker.snapshot() == before
    assert await results(broker) == {"1": "K1"}
    assert await inbox(broker) == "1 1"


async def test_a_message_during_the_turn_is_not_missed(broker: Broker, bus: EventBus) -> None:
    await waiting(broker, bus, receive("1"), ask("2"))
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", 1_700_000_000_000, b"1", b"[]", 1)
    turn = await broker.take(bus)
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    await broker.nothing(bus)
    assert await suspend(bus, turn, again("1"))
    assert (await broker.take(bus)).step == "1"


@pytest.mark.parametrize(("default", "result"), [(b'"no"', 'K"no"'), (b"", "E")])
async def test_a_message_after_the_deadline_is_kept(broker: Broker, bus: EventBus, default: bytes, result: str) -> None:
    await waiting(broker, bus, receive("1", timeout_ms=DEADLINE_MS, default=default))
    await broker.pass_time(DEADLINE_MS)
    await bus.promote()
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    assert (await results(broker))["1"].startswith(result)
    if not default:
        assert json.loads((await results(broker))["1"][1:])["type"] == "ReceiveTimeout"
    assert await suspend(bus, await broker.take(bus), receive("2"))
    assert (await results(broker))["2"] == "K1"


async def test_a_message_removes_the_timer_of_its_step(broker: Broker, bus: EventBus) -> None:
    await waiting(broker, bus, receive("1", timeout_ms=DEADLINE_MS))
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    assert await broker.hash("delayed") == {}
    await broker.take(bus)


async def test_steps_whose_deadline_has_passed_do_not_pile_up(broker: Broker, bus: EventBus) -> None:
    await waiting(broker, bus, receive("1", timeout_ms=DEADLINE_MS))
    for step in range(2, 6):
        await broker.pass_time(DEADLINE_MS)
        await bus.promote()
        assert await suspend(bus, await broker.take(bus), receive(str(step), timeout_ms=DEADLINE_MS))
    waits = await broker.call("HGET", broker.keys.task("t"), "v:news")
    assert isinstance(waits, bytes)
    assert len(waits) < 10


async def test_the_kept_messages_are_bounded(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    large = b'"' + 200_000 * b"x" + b'"'
    assert await bus.send_message("t", "large", large, "shop\nlarge") == ["ok"]
    before = await broker.snapshot()
    full = await bus.send_message("t", "more", large, "shop\nmore")
    assert full == ["full", "would keep more than 262144 bytes of messages that it has not received"]
    assert await broker.snapshot() == before
    for number in range(99):
        assert await bus.send_message("t", f"n{number % 7}", b"1", f"shop\n{number}") == ["ok"]
    full = await bus.send_message("t", "news", b"1", "shop\nlast")
    assert full == ["full", "already keeps 100 messages that it has not received"]


async def test_thousands_of_steps_may_wait_for_one_name(broker: Broker, bus: EventBus) -> None:
    """One turn must not occupy the broker for longer than its steps take: the list is packed once for all of them."""
    seconds = []
    for task, steps in (("few", 250), ("many", 4_000)):
        await broker.submit(bus, task)
        turn = await broker.take(bus)
        began = time.perf_counter()
        assert await suspend(bus, turn, *(receive(str(step), wait="g1") for step in range(steps)))
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < 0.1 + 60 * seconds[0]
    for number in range(3):
        assert await bus.send_message("many", "news", str(number).encode(), f"shop\n{number}") == ["ok"]
    found = await broker.call("HMGET", broker.keys.task("many"), "j:0", "j:1", "j:2", "j:3")
    assert isinstance(found, list)
    assert [isinstance(one, bytes) and one[22:] for one in found] == [b"0", b"1", b"2", False]


async def test_thousands_of_ended_receivers_are_skipped_at_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    steps = [str(step) for step in range(4_000)]
    assert await suspend(bus, await broker.take(bus), *(receive(step, wait="g1") for step in steps), nap("n", 1))
    await broker.pass_time(DEADLINE_MS)
    await bus.promote()
    turn = await broker.take(bus)
    assert await suspend(bus, turn, *(withdraw(step) for step in steps), receive("last"))
    assert await bus.send_message("t", "news", b"1", "shop\n1") == ["ok"]
    assert (await results(broker))["last"] == "K1"
