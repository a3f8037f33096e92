"""A finished step never runs again, whatever its entry's delivery count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import group_of
from runtime_core.consumer.consumer import Consumer
from runtime_core.errors import Fenced, ServerError
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer, ask, bury, suspend
from weft import AgentContext, App

WAIT_SECONDS = 60.0


class Shop:
    """An app whose agent charges a card in one step and stays in the next one. `charged` lists the charges."""

    def __init__(self, before: str = "nothing") -> None:
        self.app = App("shop")
        self.charged: list[str] = []
        self.stays = asyncio.Event()
        """Set once the long step has begun."""
        self.go_on = asyncio.Event()

        @self.app.tool
        def search() -> str:
            return "found"

        async def charge() -> int:
            self.charged.append("card")
            return len(self.charged)

        async def stay() -> None:
            self.stays.set()
            await self.go_on.wait()

        @self.app.agent("writer")
        async def writer(ctx: AgentContext, value: object) -> int:
            if before == "tool":
                await ctx.tool(search)
            if before == "emit":
                await ctx.emit("working")
            charged = await ctx.step(charge)
            await ctx.step(stay)
            return int(charged)

    def handler(self, bus: EventBus) -> TurnHandler:
        return TurnHandler(bus, self.app, Metrics(CollectorRegistry(), "agent-handler"))

    async def begin(self, bus: EventBus, turn: Delivery) -> asyncio.Task[None]:
        """Handle the turn until its agent is in the long step."""
        self.stays.clear()
        handling = asyncio.create_task(self.handler(bus).handle(turn))
        async with asyncio.timeout(WAIT_SECONDS):
            await self.stays.wait()
        return handling


async def cut(handling: asyncio.Task[None]) -> None:
    handling.cancel()
    await asyncio.wait((handling,))


async def graceful_stop(broker: Broker, bus: EventBus, other: EventBus, turn: Delivery) -> Delivery:
    """The first process hands the entry back without counting it; the second one adopts it as if it were fresh."""
    await other.leave([turn])
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    return adopted


async def uncounted_retry(broker: Broker, bus: EventBus, other: EventBus, turn: Delivery) -> Delivery:
    """The entry waits as a timer without counting, and returns as a new entry."""
    await other.retry(turn, 0, b"", counts=False)
    await bus.promote()
    return await broker.take(bus)


async def lost_group(broker: Broker, bus: EventBus, other: EventBus, turn: Delivery) -> Delivery:
    """The group is lost with its counts and created again from 0, and the first process dies."""
    await broker.silence(other)
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group_of("agent"))
    await bus.make_groups(["agent"])
    return await broker.take(bus)


@pytest.mark.parametrize("before", ["nothing", "emit", "tool"])
@pytest.mark.parametrize("handed_on", [graceful_stop, uncounted_retry, lost_group])
async def test_the_next_process_does_not_repeat_a_finished_step(
    broker: Broker,
    bus: EventBus,
    other: EventBus,
    before: str,
    handed_on: Callable[[Broker, EventBus, EventBus, Delivery], Awaitable[Delivery]],
) -> None:
    shop = Shop(before)
    await broker.submit(bus, "t")
    if before == "tool":
        await shop.handler(other).handle(await broker.take(other))
        assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(other)
    await cut(await shop.begin(other, turn))
    again = await handed_on(broker, bus, other, turn)
    assert (again.deliveries, again.attempt) == (1, 1), "by its counts it was never begun"
    shop.go_on.set()
    await shop.handler(bus).handle(again)
    assert (await broker.final("t"))["output"] == 1
    assert shop.charged == ["card"]


async def test_a_run_kept_in_memory_sees_the_steps_of_a_process_that_stopped(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The turn went to another process, which did a step and handed the turn back uncounted."""
    shop = Shop("tool")
    keeps = shop.handler(bus)
    await broker.submit(bus, "t")
    await keeps.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(other)
    await cut(await shop.begin(other, turn))
    again = await graceful_stop(broker, bus, other, turn)
    shop.go_on.set()
    await keeps.handle(again)
    assert (await broker.final("t"))["output"] == 1
    assert shop.charged == ["card"]


async def test_an_owner_declared_dead_begins_no_step(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A process is paused between two steps. It notices before the second one, which another has done by then."""
    app, done = App("paused"), []
    paused, go_on = asyncio.Event(), asyncio.Event()

    async def pay() -> None:
        done.append("paid")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(pay, name="first")
        if not go_on.is_set():
            paused.set()
            await go_on.wait()
        await ctx.step(pay, name="second")

    def handler(owner: EventBus) -> TurnHandler:
        return TurnHandler(owner, app, Metrics(CollectorRegistry(), "agent-handler"))

    await broker.submit(bus, "t")
    turn = await broker.take(other)
    handling = asyncio.create_task(handler(other).handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await paused.wait()
    await broker.silence(other)
    other.alive_until = 0.0  # a lease has passed since its last heartbeat
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    go_on.set()
    await handler(bus).handle(adopted)
    with pytest.raises(Fenced):
        await handling
    assert done == ["paid", "paid"]
    assert await broker.status("t") == "completed"


async def test_the_result_of_a_step_is_stored_though_its_process_is_stopping(
    broker: Broker, bus: EventBus, other: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while the result is on its way to the broker does not lose it."""
    app, done = App("stopping"), []
    sending, go_on, stored = asyncio.Event(), asyncio.Event(), asyncio.Event()
    record = other.record

    async def slow(delivery: Delivery, *args: Any, **named: Any) -> bytes | None:
        sending.set()
        await go_on.wait()
        reply = await record(delivery, *args, **named)
        stored.set()
        return reply

    monkeypatch.setattr(other, "record", slow)

    async def pay() -> int:
        done.append("paid")
        return len(done)

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> int:
        return int(await ctx.step(pay))

    def handler(owner: EventBus) -> TurnHandler:
        return TurnHandler(owner, app, Metrics(CollectorRegistry(), "agent-handler"))

    await broker.submit(bus, "t")
    turn = await broker.take(other)
    handling = asyncio.create_task(handler(other).handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await sending.wait()
        await cut(handling)
        go_on.set()
        await stored.wait()
    again = await graceful_stop(broker, bus, other, turn)
    await handler(bus).handle(again)
    assert (await broker.final("t"))["output"] == 1
    assert done == ["paid"]


class FullDisk:
    """Makes the broker answer the next call of a function as a server with a full disk does."""

    def __init__(self, bus: EventBus, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0
        call, name = bus.transport.call, bus._functions[function]

        async def refuse(*args: Argument) -> Reply:
            if args[:2] == (b"FCALL", name) and not self.refused:
                self.refused += 1
                raise ServerError("MISCONF Errors writing to the AOF file: No space left on device")
            return await call(*args)

        monkeypatch.setattr(bus.transport, "call", refuse)


@pytest.mark.parametrize("function", ["record", "commit_turn"])
async def test_the_outcome_of_a_turn_waits_for_a_broker_that_cannot_write(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """The step has had its effect: a disk that is full for a moment makes nothing run again."""
    app, begun, done = App("insisting"), [], []
    disk = FullDisk(bus, function, monkeypatch)

    async def pay() -> int:
        done.append("paid")
        return len(done)

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> int:
        begun.append("begun")
        return int(await ctx.step(pay))

    await broker.submit(bus, "t")
    await TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler")).handle(await broker.take(bus))
    assert (await broker.final("t"))["output"] == 1
    assert (begun, done, disk.refused) == (["begun"], ["paid"], 1)


async def test_the_result_of_a_call_waits_for_a_broker_that_cannot_write(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(bus, "commit_call", monkeypatch)
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert disk.refused == 1


async def test_a_lasting_error_is_raised_at_once(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Argument) -> Reply:
        raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")

    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    monkeypatch.setattr(bus.transport, "call", refuse)
    with pytest.raises(ServerError, match="WRONGTYPE"):
        await bus.record(turn, "1", b"d1a2b3c4K1700000000000null")


async def test_a_process_that_stops_finishes_its_step_and_begins_no_other(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The stop waits for the step under way, and not for the run: the next process continues from the journal."""
    app, done = App("draining"), []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        begun.set()
        await go_on.wait()
        done.append("first")

    async def second() -> None:
        done.append("second")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(first)
        await ctx.step(second)

    def handler(owner: EventBus) -> TurnHandler:
        return TurnHandler(owner, app, Metrics(CollectorRegistry(), "agent-handler"))

    class Draining(TurnHandler):
        def drain(self) -> None:
            super().drain()
            go_on.set()

    await broker.submit(bus, "t")
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    consumer = Consumer(other, ["agent"], Draining(other, app, metrics), metrics, service="agent", finish_seconds=0.1)
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(WAIT_SECONDS):
        await begun.wait()
        await consumer.stop()
        await running
    assert done == ["first"]
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    assert adopted.deliveries == 1, "a stop does not count"
    await handler(bus).handle(adopted)
    assert done == ["first", "second"]
    assert await broker.status("t") == "completed"


async def a_model_has_answered(bus: EventBus, turn: Delivery) -> object:
    await bus.begin_call(turn, "1")
    return await bus.settle_call(turn, "1", b"d1a2b3c4K1700000000000null", b'{"tokens":1}')


async def it_is_tried_again(bus: EventBus, turn: Delivery) -> object:
    return await bus.retry(turn, 0, b"{}")


async def it_is_given_up(bus: EventBus, turn: Delivery) -> object:
    return await bury(bus, turn)


@pytest.mark.parametrize(
    ("function", "outcome"),
    [("settle_call", a_model_has_answered), ("retry", it_is_tried_again), ("dead_letter", it_is_given_up)],
)
async def test_each_outcome_waits_for_a_broker_that_cannot_write(
    broker: Broker,
    bus: EventBus,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    outcome: Callable[[EventBus, Delivery], Awaitable[object]],
) -> None:
    disk = FullDisk(bus, function, monkeypatch)
    await broker.submit(bus, "t")
    assert await outcome(bus, await broker.take(bus))
    assert disk.refused == 1


async def test_two_living_processes_are_never_in_one_turn(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A group that was created again delivers what another process is still working on."""
    shop = Shop()
    await broker.submit(bus, "t")
    first = await shop.begin(other, await broker.take(other))
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), group_of("agent"))
    await bus.make_groups(["agent"])
    again = await broker.take(bus)
    with pytest.raises(asyncio.CancelledError):
        await shop.handler(bus).handle(again)
    assert shop.charged == ["card"]
    shop.go_on.set()
    await first
    assert (await broker.final("t"))["output"] == 1
    assert shop.charged == ["card"]


async def test_another_process_may_continue_a_turn_that_was_handed_back(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The entry is a new one: that its first owner lives blocks nobody."""
    shop = Shop()
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    await cut(await shop.begin(other, turn))
    again = await uncounted_retry(broker, bus, other, turn)
    shop.go_on.set()
    await shop.handler(bus).handle(again)
    assert (await broker.final("t"))["output"] == 1


async def test_a_turn_that_its_owner_begins_again_is_seen_by_others(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """It is a new entry: the mark of the earlier one keeps nobody out."""
    shop = Shop()
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    await cut(await shop.begin(other, turn))
    assert await other.retry(turn, 0, b"", counts=False)
    await bus.promote()
    second = await shop.begin(other, await broker.take(other))
    await broker.lose_group()
    with pytest.raises(asyncio.CancelledError):
        await shop.handler(bus).handle(await broker.take(bus))
    await cut(second)
