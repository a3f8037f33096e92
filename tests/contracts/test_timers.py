"""A due timer fires once, in any process, and not at all for an ended task."""

from __future__ import annotations

import asyncio
import json

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, complete, nap, suspend

RETRY_MS = 60_000


async def delayed(broker: Broker) -> dict[str, bytes]:
    """Return what the timers carry, as packed bytes."""
    flat = await broker.call("HGETALL", broker.keys.base + "delayed")
    assert isinstance(flat, list)
    found = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        assert isinstance(name, bytes)
        assert isinstance(value, bytes)
        found[name.decode()] = value
    return found


async def test_a_retry_waits_on_the_broker(broker: Broker, bus: EventBus) -> None:
    """Before its time nothing happens; then it is delivered with its next attempt and its errors."""
    await broker.submit(bus, "t")
    assert await bus.retry(await broker.take(bus), RETRY_MS, b'{"type":"A"}')
    done, wait = await bus.promote()
    assert done == 0
    assert RETRY_MS - 20_000 < wait <= RETRY_MS
    await broker.nothing(bus)
    await broker.pass_time(RETRY_MS)
    assert await bus.promote() == (1, -1)
    turn = await broker.take(bus)
    assert (turn.attempt, turn.errors, turn.deliveries) == (2, b'[{"type":"A"}]', 1)
    assert await complete(bus, turn)
    await broker.idle()


async def test_two_owners_promote_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Reading, removing and appending is one step, so any number of owners may do it."""
    for number in range(6):
        await broker.submit(bus, f"t{number}")
        assert await bus.retry(await broker.take(bus), RETRY_MS, b"")
    await broker.pass_time(RETRY_MS)
    done = await asyncio.gather(*(owner.promote(2) for owner in (bus, other) * 4))
    assert sum(count for count, _ in done) == 6
    assert len(await broker.entries("agent")) == 6
    assert await delayed(broker) == {}


async def test_a_timer_that_fires_twice_acts_once(broker: Broker, bus: EventBus) -> None:
    """A server that lost its last second has the timer again; the run is in flight by then."""
    await broker.submit(bus, "t", key="k")
    assert await bus.retry(await broker.take(bus), RETRY_MS, b"")
    kept = await delayed(broker)
    await broker.pass_time(RETRY_MS)
    assert (await bus.promote())[0] == 1
    for member, value in kept.items():
        await broker.call("HSET", broker.keys.base + "delayed", member, value)
        await broker.call("ZADD", broker.keys.timers, 0, member)
    assert (await bus.promote())[0] == 1
    assert len(await broker.entries("agent")) == 1


async def test_a_calls_timer_that_fires_twice_after_its_result_acts_once(broker: Broker, bus: EventBus) -> None:
    """The step is not missing any more, so its call is not appended."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bus.retry(await broker.take(bus, "tool"), RETRY_MS, b"")
    kept = await delayed(broker)
    await broker.pass_time(RETRY_MS)
    await bus.promote()
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", 1_700_000_000_000, b"1", b"[]", 1)
    for member, value in kept.items():
        await broker.call("HSET", broker.keys.base + "delayed", member, value)
        await broker.call("ZADD", broker.keys.timers, 0, member)
    await bus.promote()
    assert await broker.entries("tool") == []


async def test_a_sleep_answers_its_step_once(broker: Broker, bus: EventBus) -> None:
    """The run resumes once, even if two owners promote."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), nap("1", RETRY_MS))
    await broker.pass_time(RETRY_MS)
    await asyncio.gather(bus.promote(), bus.promote())
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "1")
    await broker.nothing(bus)
    assert await complete(bus, turn)
    await broker.idle()


async def test_the_end_of_a_task_takes_its_timers(broker: Broker, bus: EventBus) -> None:
    """A sleep of three days does not stay on the broker when its task has ended."""
    await broker.submit(bus, "t", timeout_ms=RETRY_MS)
    assert await suspend(bus, await broker.take(bus), nap("1", RETRY_MS), nap("2", 2 * RETRY_MS))
    assert await bus.cancel("t", "not wanted") == ["cancelled"]
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    assert await delayed(broker) == {}


async def test_the_end_of_a_task_takes_its_retries(broker: Broker, bus: EventBus) -> None:
    """Calls that wait for a retry are not retried when their task has ended."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    assert await bus.retry(await broker.take(bus), RETRY_MS, b"")
    await bus.cancel("t", "not wanted")
    await broker.pass_time(RETRY_MS)
    await bus.promote()
    turn = await broker.take(bus)
    assert turn.task == "next"
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_task_over_its_time_fails(broker: Broker, bus: EventBus) -> None:
    """Whoever finds it due ends it in the same step. The turn in flight is settled when it commits."""
    await broker.submit(bus, "t", key="k", timeout_ms=RETRY_MS)
    turn = await broker.take(bus)
    await broker.submit(bus, "next", key="k")
    await broker.pass_time(RETRY_MS)
    await bus.promote()
    final = await broker.final("t")
    assert final["status"] == "failed"
    assert final["error"] == {
        "type": "TimeLimit", "message": "the task was not done within its timeout_seconds"
    }  # fmt: skip
    await broker.nothing(bus)
    assert not await complete(bus, turn, output=b'"late"')
    assert await broker.final("t") == final
    assert (await broker.take(bus)).task == "next"


async def test_a_task_that_ended_in_time_is_not_failed_by_its_limit(broker: Broker, bus: EventBus) -> None:
    """A status never goes back."""
    await broker.submit(bus, "t", timeout_ms=RETRY_MS)
    assert await complete(bus, await broker.take(bus))
    await broker.call("ZADD", broker.keys.timers, 0, "d|t")
    before = await broker.task("t")
    await bus.promote()
    assert await broker.task("t") == before
    assert json.loads(before["out"])["status"] == "completed"
