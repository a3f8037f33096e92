"""Queued work of an ended task is settled without being started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.deliveries import Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer import consumer as consumers
from runtime_core.consumer.consumer import Consumer
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer, ask, complete, fail, group, suspend

LEASE_SECONDS = 0.6
SECONDS = 60.0


class Handler:
    """Answers calls and completes turns, each when the test releases it."""

    def __init__(self, bus: EventBus) -> None:
        self.bus = bus
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.stopped: asyncio.Queue[str] = asyncio.Queue()
        self.go_on = asyncio.Event()

    async def handle(self, delivery: Delivery) -> None:
        self.began.put_nowait(f"{delivery.task} {delivery.step or delivery.run}")
        await self.go_on.wait()
        await (answer(self.bus, delivery) if delivery.kind == "call" else complete(self.bus, delivery))

    def forget(self) -> None:
        """Nothing is kept."""

    def drain(self) -> None:
        """A call is one step: it has begun."""

    def stop_task(self, task: str) -> None:
        self.stopped.put_nowait(task)

    async def begins(self) -> str:
        return await asyncio.wait_for(self.began.get(), SECONDS)


@asynccontextmanager
async def consuming(broker: Broker, stream: str, in_flight: int = 1) -> AsyncIterator[tuple[Handler, Consumer]]:
    transport = await broker.connect()
    broker.transports.append(transport)
    bus = EventBus(transport, broker.keys)
    handler = Handler(bus)
    metrics = Metrics(CollectorRegistry(), "test")
    consumer = Consumer(
        bus, [stream], handler, metrics, service="test", lease_seconds=LEASE_SECONDS, in_flight=in_flight
    )
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    try:
        yield handler, consumer
    finally:
        await consumer.stop()
        await running


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():
            await asyncio.sleep(0.01)


async def drained(broker: Broker, stream: str) -> None:
    """Wait until the stream holds nothing, read or unread."""

    async def empty() -> bool:
        return not await broker.entries(stream)

    await until(empty)


async def backlog(broker: Broker, bus: EventBus, task: str = "t", calls: int = 5) -> None:
    """A task that waits for calls of a tool."""
    await broker.submit(bus, task)
    turn = await broker.take(bus)
    assert turn.task == task
    assert await suspend(bus, turn, *(ask(str(number), wait="g1") for number in range(calls)))


async def test_calls_of_a_cancelled_task_do_not_start(broker: Broker, bus: EventBus) -> None:
    await backlog(broker, bus)
    await backlog(broker, bus, "other", 1)
    async with consuming(broker, "tool") as (handler, _):
        assert await handler.begins() == "t r/0"
        await bus.cancel("t", "no more")
        assert await asyncio.wait_for(handler.stopped.get(), SECONDS) == "t"
        assert await handler.begins() == "other r/0", "the four between them were settled"
        handler.go_on.set()
        await drained(broker, "tool")
        assert handler.began.empty()


async def test_a_repeated_call_that_has_its_result_does_not_start(broker: Broker, bus: EventBus) -> None:
    """A server that has lost its last writes promotes a call twice, and the process still answers the first copy."""
    await backlog(broker, bus, calls=2)
    assert await bus.retry(await broker.take(bus, "tool"), 0, b"{}")
    await bus.promote(10)
    other, call = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert (other.attempt, call.attempt) == (1, 2)
    stored = cast(
        list[list[list[bytes]]], await broker.call("XRANGE", broker.keys.stream("tool"), call.entry, call.entry)
    )
    assert await answer(bus, call)
    await broker.call("XADD", broker.keys.stream("tool"), "*", *stored[0][1])
    async with consuming(broker, "tool") as (handler, _):
        await until(lambda: settled(broker, other))
        assert handler.began.empty()


async def test_a_call_found_among_pending_entries_does_not_start_if_it_has_its_result(
    broker: Broker, bus: EventBus
) -> None:
    """A server that has lost its last writes lists it again after a copy of it was answered."""
    await backlog(broker, bus, calls=2)
    stream = broker.keys.stream("tool")
    first, second = pairs(await broker.call("XRANGE", stream, "-", "+"))
    copy = cast(bytes, await broker.call("XADD", stream, "*", *first[1]))
    assert await answer(bus, Delivery(0, "tool", copy, first[1]))
    # So that no read takes them.
    await broker.call("XGROUP", "SETID", stream, "tool-handler", "9999999999999-0")
    async with consuming(broker, "tool") as (handler, _):
        for entry, _ in (first, second):
            await broker.call("XCLAIM", stream, "tool-handler", handler.bus.owner, 0, entry, "FORCE")
        assert await handler.begins() == "t r/1"
        handler.go_on.set()
        await drained(broker, "tool")
        assert handler.began.empty()


async def settled(broker: Broker, but: Delivery) -> bool:
    """Whether the stream of calls holds this delivery alone."""
    return [entry["id"] for entry in await broker.entries("tool")] == [but.entry.decode()]


async def test_turns_of_cancelled_tasks_do_not_start(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "first")
    for number in range(4):
        await broker.submit(bus, f"t{number}", key=f"k{number}")
    await broker.submit(bus, "last")
    async with consuming(broker, "agent") as (handler, _):
        assert await handler.begins() == "first r"
        for number in range(4):
            await bus.cancel(f"t{number}", "no more")
        for number in range(4):
            assert await asyncio.wait_for(handler.stopped.get(), SECONDS) == f"t{number}"
        handler.go_on.set()
        assert await handler.begins() == "last r"
        await drained(broker, "agent")
    await broker.idle()


async def test_a_process_that_starts_later_knows_of_cancelled_tasks(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker reports them in pages."""
    monkeypatch.setattr(consumers, "RECALL_PAGE", 3)
    for number in range(7):
        await backlog(broker, bus, f"t{number}", 2)
    for number in range(7):
        await bus.cancel(f"t{number}", "no more")
    await bus.cancel("not submitted yet", "no more")
    await backlog(broker, bus, "live", 1)
    async with consuming(broker, "tool") as (handler, _):
        assert await handler.begins() == "live r/0"
        handler.go_on.set()
        await drained(broker, "tool")
        assert handler.began.empty()


@pytest.mark.parametrize("known", [0, 2], ids=["none is remembered", "two are remembered"])
async def test_the_broker_is_asked_about_old_entries(
    broker: Broker, bus: EventBus, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tasks may have ended before anything was reported to this process."""
    monkeypatch.setattr(consumers, "MAX_ENDED_TASKS", known or 10)
    monkeypatch.setattr(consumers, "RECALL_PAGE", 1)
    for task in ("a", "b", "c", "live"):
        await backlog(broker, bus, task, 1)
    for task in ("a", "b", "c"):
        await bus.cancel(task, "no more")
    if not known:
        # As if an hour had passed since then.
        await broker.call("DEL", broker.keys.stopped)
        key = broker.keys.stream("tool")
        entries = await broker.entries("tool")
        await broker.call("DEL", key)
        for number, entry in enumerate(entries):
            await broker.call("XADD", key, f"{number + 1}-0", "h", entry["h"], "d", entry["d"])
        await broker.call("XGROUP", "CREATE", key, group("tool"), "0")
    async with consuming(broker, "tool") as (handler, _):
        assert await handler.begins() == "live r/0"
        handler.go_on.set()
        await drained(broker, "tool")
        assert handler.began.empty()


async def test_a_reopened_task_continues(broker: Broker, bus: EventBus) -> None:
    """Its id is remembered as ended, and must not suppress later work."""
    await backlog(broker, bus, calls=1)
    assert await fail_call(broker, bus)
    assert await fail(bus, await broker.take(bus))
    async with consuming(broker, "tool") as (handler, consumer):
        assert "t" in consumer._in_flight.ended.ended_ms
        (letter,) = await broker.entries("dead")
        assert await bus.redrive(letter["id"], True) == ["ok", "t"]
        assert await handler.begins() == "t r/0"
        assert "t" not in consumer._in_flight.ended.ended_ms
        handler.go_on.set()
        await drained(broker, "tool")
        assert await broker.status("t") == "running"
        assert handler.began.empty()


async def fail_call(broker: Broker, bus: EventBus) -> bool:
    """Give up the task's call: its letter may be redriven, with or without its task."""
    call = await broker.take(bus, "tool")
    return await bus.dead_letter(
        call.stream, call.entry, "not_retryable", b"[]", 1700000000000, b'{"type":"Broken","message":"broken"}'
    )


async def test_a_withdrawn_task_continues(broker: Broker, bus: EventBus) -> None:
    """Nobody wants its answer, and yet it has not ended: its handler decides."""
    await backlog(broker, bus, calls=2)
    async with consuming(broker, "tool") as (handler, _):
        assert await handler.begins() == "t r/0"
        assert await bus.call("withdraw_request", "t") == b"OK"
        assert await asyncio.wait_for(handler.stopped.get(), SECONDS) == "t"
        handler.go_on.set()
        assert await handler.begins() == "t r/1"
        await drained(broker, "tool")
    assert await broker.status("t") == "running"


async def test_a_delivery_that_is_stopped_before_its_first_step_leaves_no_trace(broker: Broker, bus: EventBus) -> None:
    """Its read and the cancelling heartbeat arrive together: asyncio runs nothing of a task cancelled so early."""
    await broker.submit(bus, "t")
    delivery = await broker.take(bus)
    async with consuming(broker, "agent") as (handler, consumer):
        consumer._in_flight.take([delivery])
        consumer._in_flight.stop_task("t")
        async with asyncio.timeout(SECONDS):
            while consumer.held:
                await asyncio.sleep(0.01)
        await broker.submit(bus, "next")
        assert await handler.begins() == "next r", "its place is free"
        handler.go_on.set()
