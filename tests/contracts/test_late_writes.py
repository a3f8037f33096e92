"""Writes after the end change nothing: no key is created again, and no status changes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import (
    DIGEST,
    Broker,
    Snapshot,
    answer,
    ask,
    bury,
    complete,
    emit_pieces,
    fail,
    nap,
    question,
    suspend,
)

VALUE = f"{DIGEST}K1700000000000true".encode()


@dataclass
class Late:
    """Deliveries of a task that has ended, held by owners that do not know it."""

    turn: Delivery
    """Of the task's first run."""
    call: Delivery
    """A tool call of the child run."""
    child: Delivery
    """A turn of a second child run."""


Write = Callable[[EventBus, Late], Awaitable[object]]
WRITES: dict[str, Write] = {
    "a turn that ends": lambda bus, late: complete(bus, late.turn),
    "a turn that fails": lambda bus, late: fail(bus, late.turn),
    "a turn that waits": lambda bus, late: suspend(bus, late.turn, ask("9"), question("8"), nap("7", 10)),
    "a child's turn that ends": lambda bus, late: complete(bus, late.child),
    "a child's turn that waits": lambda bus, late: suspend(bus, late.child, ask("9"), nap("7", 10)),
    "a result": lambda bus, late: answer(bus, late.call),
    "a step in mid-turn": lambda bus, late: bus.record(late.turn, "9", VALUE),
    "a child's step in mid-turn": lambda bus, late: bus.record(late.child, "9", VALUE),
    "a delta": lambda bus, late: emit_pieces(bus, late.turn, b'"x"', first=9),
    "a child's delta": lambda bus, late: emit_pieces(bus, late.child, b'"x"', first=9),
    "progress": lambda bus, late: bus.progress(late.call, b'{"done":1}'),
    "a retry of a turn": lambda bus, late: bus.retry(late.turn, 10, b""),
    "a retry of a child's turn": lambda bus, late: bus.retry(late.child, 10, b""),
    "a retry of a call": lambda bus, late: bus.retry(late.call, 10, b""),
    "a dead letter of a turn": lambda bus, late: bury(bus, late.turn),
    "a dead letter of a diverged turn": lambda bus, late: bury(bus, late.turn, "diverged"),
    "a dead letter of a child's turn": lambda bus, late: bury(bus, late.child),
    "a dead letter of a call": lambda bus, late: bury(bus, late.call),
    "an answer": lambda bus, late: bus.signal("t", "r/3:1", b"1"),
    "a watcher": lambda bus, late: bus.call("watch", "t"),
    "timers": lambda bus, late: bus.promote(),
}


async def a_task_in_many_hands(broker: Broker, bus: EventBus) -> Late:
    """A task with three child runs: one asked a tool, one is in flight, one asked a human and sleeps."""
    await broker.submit(bus, "t", timeout_ms=60_000)
    parts = [ask(step, "editor", stream="agent") for step in ("1", "2", "3")]
    assert await suspend(bus, await broker.take(bus), *parts, nap("4", 0))
    one, two, three = await broker.take(bus), await broker.take(bus), await broker.take(bus)
    assert await suspend(bus, one, ask("1"))
    assert await suspend(bus, three, question("1", timeout_ms=0), nap("2", 0))
    await bus.call("promote", 1)
    return Late(await broker.take(bus), await broker.take(bus, "tool"), two)


def of_the_task(snapshot: Snapshot) -> Snapshot:
    """The task's own hash, those of its runs, and its output."""
    return {key: value for key, value in snapshot.items() if "}:task:t" in key or "}:run:t/" in key or "}:out:t" in key}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("expired", [False, True])
async def test_an_ended_task_stays_unchanged(broker: Broker, bus: EventBus, what: str, expired: bool) -> None:
    """While its fields still exist, and after they have expired."""
    late = await a_task_in_many_hands(broker, bus)
    timers = await broker.call("ZRANGE", broker.keys.timers, 0, -1)
    delayed = await broker.hash("delayed")
    assert isinstance(timers, list)
    assert len(timers) == 3
    assert await bus.cancel("t", "not wanted") == ["cancelled"]
    if expired:
        await broker.call("DEL", broker.keys.task("t"), broker.keys.out("t"))
    if what == "timers":
        # As on a server that has lost the second in which the end took them away.
        for name, value in delayed.items():
            await broker.call("HSET", broker.keys.base + "delayed", name, value)
        for member in timers:
            assert isinstance(member, bytes)
            await broker.call("ZADD", broker.keys.timers, 0, member)
    before = of_the_task(await broker.snapshot())
    dead = await broker.entries("dead")
    await WRITES[what](bus, late)
    assert of_the_task(await broker.snapshot()) == before
    assert await broker.entries("dead") == dead


KEPT = [name for name in WRITES if "child" not in name]


@pytest.mark.parametrize("what", KEPT)
async def test_a_task_kept_for_its_letter_stays_unchanged(broker: Broker, bus: EventBus, what: str) -> None:
    """An ended task still has its journal, with everything that the run waited for."""
    await broker.submit(bus, "t")
    parts = (ask("1"), ask("2"), ask("3"), question("4", timeout_ms=60_000), nap("5", 60_000))
    assert await suspend(bus, await broker.take(bus), *parts)
    first, call, retried = [await broker.take(bus, "tool") for _ in range(3)]
    assert await bus.retry(retried, 60_000, b"")
    assert await answer(bus, first)
    turn = await broker.take(bus)
    timers = await broker.call("ZRANGE", broker.keys.timers, 0, -1)
    assert isinstance(timers, list)
    assert len(timers) == 3
    delayed = await broker.call("HGETALL", broker.keys.base + "delayed")
    assert isinstance(delayed, list)
    assert await bury(bus, turn)
    assert await broker.status("t") == "failed"
    for name, value in zip(delayed[::2], delayed[1::2], strict=True):
        assert isinstance(name, bytes)
        assert isinstance(value, bytes)
        await broker.call("HSET", broker.keys.base + "delayed", name, value)
    # A plain sleep keeps nothing but its timer.
    for name in timers:
        assert isinstance(name, bytes)
        await broker.call("ZADD", broker.keys.timers, 0, name)
    before, work = of_the_task(await broker.snapshot()), await broker.entries("agent")
    dead = await broker.entries("dead")
    if what == "an answer":
        assert (await bus.signal("t", "r:4", b"1"))[0] == "ended"
    else:
        await WRITES[what](bus, Late(turn, call, turn))
    after = of_the_task(await broker.snapshot())
    assert without_timers(after) == without_timers(before)
    left = await broker.call("ZRANGE", broker.keys.timers, 0, -1)
    assert isinstance(left, list)
    assert sorted(map(str, left)) == ([] if what == "timers" else sorted(map(str, timers)))
    assert await broker.entries("agent") == work == []
    assert await broker.entries("dead") == dead
    assert len(await broker.entries("tool")) <= 1


def without_timers(snapshot: Snapshot) -> str:
    """Return the task's own keys. A timer that is no longer listed with it counts as no change."""
    lines = []
    for key, value in snapshot.items():
        if isinstance(value, tuple) and isinstance(value[1], dict):
            value = sorted(item for item in value[1].items() if not item[0].startswith(b"z:"))
        lines.append(f"{key} {value}")
    return "\n".join(lines)


COPIES: dict[str, Callable[[EventBus, Delivery], Awaitable[object]]] = {
    "ends": lambda bus, copy: complete(bus, copy),
    "waits": lambda bus, copy: suspend(bus, copy, ask("9")),
    "records": lambda bus, copy: bus.record(copy, "9", VALUE),
    "emits": lambda bus, copy: emit_pieces(bus, copy, b'"x"', first=9),
    "is tried again": lambda bus, copy: bus.retry(copy, 10, b""),
    "is given up": lambda bus, copy: bury(bus, copy),
    "parks": lambda bus, copy: bury(bus, copy, "diverged"),
}


@pytest.mark.parametrize("what", COPIES)
async def test_a_turn_that_is_delivered_again_changes_nothing(broker: Broker, bus: EventBus, what: str) -> None:
    """A server that lost its last second has the entry again, though its turn was committed."""
    await broker.submit(bus, "t", key="k")
    kept = (await broker.entries("agent"))[0]
    assert await suspend(bus, await broker.take(bus), ask("1"))
    await broker.call("XADD", broker.keys.stream("agent"), "*", *flat(kept))
    copy = await broker.take(bus)
    before = of_the_task(await broker.snapshot())
    await COPIES[what](bus, copy)
    assert of_the_task(await broker.snapshot()) == before
    assert await broker.entries("dead") == []
    assert await broker.hash("inst:writer/k") == {"busy": "t|r"}
    assert await broker.call("ZCARD", broker.keys.timers) == 0


@pytest.mark.parametrize("what", ["is tried again", "is given up", "is answered", "progresses"])
async def test_a_call_that_is_delivered_again_changes_nothing(broker: Broker, bus: EventBus, what: str) -> None:
    """Its step has its result."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2", wait="g1"))
    kept = (await broker.entries("tool"))[0]
    assert await answer(bus, await broker.take(bus, "tool"))
    await broker.take(bus, "tool")
    await broker.call("XADD", broker.keys.stream("tool"), "*", *flat(kept))
    copy = await broker.take(bus, "tool")
    before = of_the_task(await broker.snapshot())
    if what == "is answered":
        assert not await answer(bus, copy, b'"other"')
    elif what == "progresses":
        assert not await bus.progress(copy, b'{"done":1}')
    else:
        await COPIES[what](bus, copy)
    assert of_the_task(await broker.snapshot()) == before
    assert await broker.entries("dead") == []
    assert await broker.call("ZCARD", broker.keys.timers) == 0


def flat(entry: dict[str, str]) -> list[str]:
    return [item for name, value in entry.items() if name != "id" for item in (name, value)]


@pytest.mark.parametrize("what", ["a turn that ends", "a result", "a retry of a turn", "a dead letter of a call"])
async def test_late_work_is_settled(broker: Broker, bus: EventBus, what: str) -> None:
    """A late entry is not refused but acknowledged and dropped; otherwise it would be delivered forever."""
    late = await a_task_in_many_hands(broker, bus)
    await bus.cancel("t", "not wanted")
    await WRITES[what](bus, late)
    delivery = late.turn if "turn" in what else late.call
    assert delivery.entry not in await bus.own_pending(delivery.stream)
    assert delivery.entry.decode() not in [entry["id"] for entry in await broker.entries(delivery.stream)]


async def test_an_end_is_final(broker: Broker, bus: EventBus) -> None:
    """A completed task stays completed, whatever requests another end."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await complete(bus, turn)
    before = await broker.snapshot()
    assert await bus.cancel("t", "too late") == ["ended", "completed"]
    assert not await fail(bus, turn)
    assert not await suspend(bus, turn, ask("1"))
    assert await broker.snapshot() == before


async def test_statuses_go_forward(broker: Broker, bus: EventBus) -> None:
    """The commit that ends a task writes its status."""
    await broker.submit(bus, "t")
    seen = [await broker.status("t")]
    assert await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    seen.append(await broker.status("t"))
    assert await answer(bus, await broker.take(bus, "tool"))
    seen.append(await broker.status("t"))
    turn = await broker.take(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, turn)
    seen.append(await broker.status("t"))
    assert seen == ["accepted", "waiting", "running", "completed"]


async def test_a_call_repeated_after_a_lost_reply_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """The client repeats a call whose reply it did not get. The answer is `done`, and nothing changes."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    turn = await broker.take(bus)
    assert await bus.retry(turn, 60_000, b'{"type":"A"}')
    before = await broker.snapshot()
    assert not await bus.retry(turn, 60_000, b'{"type":"A"}')
    assert await broker.snapshot() == before
    await broker.pass_time(60_000)
    await bus.promote()
    turn = await broker.take(bus)
    assert await bury(bus, turn)
    before = await broker.snapshot()
    assert not await bury(bus, turn)
    assert await broker.snapshot() == before
    assert len(await broker.entries("dead")) == 1
