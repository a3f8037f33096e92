"""`ctx.patched`: a run that passed a place before the code changed keeps to its old path in every process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusUnavailable
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer
from tests.contracts.test_kept_turns import drop_at, reclaim, reconnect
from weft import AgentContext, App

done: list[str] = []
MARK = "j:1.patched:twice"


class Gate:
    """A step in which a process stays until the test kills it."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def stay(self) -> None:
        self.reached.set()
        await self.open.wait()


def old_app(gate: Gate | None = None, *, calls: bool = False) -> App:
    app = App("changing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        await ctx.step(done.append, "first", name="first")
        if calls:
            await ctx.tool("search", query="x")
        await ctx.step(done.append, "second", name="second")
        if gate is not None:
            await ctx.step(gate.stay, name="stay")
        return "old"

    return app


def new_app(gate: Gate | None = None, *, calls: bool = False) -> App:
    app = App("changing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        await ctx.step(done.append, "first", name="first")
        if ctx.patched("twice"):
            await ctx.step(done.append, "again", name="again")
        if calls:
            await ctx.tool("search", query="x")
        await ctx.step(done.append, "second", name="second")
        if gate is not None:
            await ctx.step(gate.stay, name="stay")
        return "new" if ctx.patched("twice") else "old"

    return app


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def output_of(broker: Broker) -> object:
    return (await broker.final("t"))["output"]


async def test_a_run_that_waits_at_the_change_keeps_to_its_path(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await handler(bus, old_app(calls=True)).handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, new_app(calls=True)).handle(await broker.take(other))
    assert done == ["first", "second"]
    assert await output_of(broker) == "old"


async def test_a_task_keeps_the_version_that_began_it(broker: Broker, bus: EventBus, other: EventBus) -> None:
    def release(version: str) -> App:
        app = App("changing", version=version)

        @app.agent("writer")
        async def writer(ctx: AgentContext, value: object) -> None:
            await ctx.tool("search", query="x")
            await ctx.tool("search", query="y")

        return app

    await broker.submit(bus, "t")
    await handler(bus, release("1")).handle(await broker.take(bus))
    assert (await broker.task("t"))["av"] == "1"
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, release("2")).handle(await broker.take(other))
    assert (await broker.task("t"))["av"] == "1"


async def test_an_app_without_a_version_writes_none(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await handler(bus, old_app(calls=True)).handle(await broker.take(bus))
    assert "av" not in await broker.task("t")


async def test_a_new_run_takes_the_change_in_every_process(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await handler(bus, new_app(calls=True)).handle(await broker.take(bus))
    assert MARK in await broker.task("t")
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, new_app(calls=True)).handle(await broker.take(other))
    assert done == ["first", "again", "second"]
    assert await output_of(broker) == "new"


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_run_that_died_with_the_old_code_in_its_first_turn_continues_with_it(
    broker: Broker, bus: EventBus, other: EventBus, key: str
) -> None:
    """The other process begins the turn without reading the journal, so it must not write its mark unasked."""
    gate = Gate()
    await broker.submit(bus, "t", key=key)
    turn = await broker.take(bus)
    await drop_at(handler(bus, old_app(gate)), turn, gate.reached)
    adopted = await reclaim(other, bus, turn)
    gate.open.set()
    await handler(other, new_app(gate)).handle(adopted)
    assert done == ["first", "second"]
    assert await output_of(broker) == "old"


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_run_that_died_with_the_new_code_continues_with_it(
    broker: Broker, bus: EventBus, other: EventBus, key: str
) -> None:
    gate = Gate()
    await broker.submit(bus, "t", key=key)
    turn = await broker.take(bus)
    await drop_at(handler(bus, new_app(gate)), turn, gate.reached)
    adopted = await reclaim(other, bus, turn)
    gate.open.set()
    await handler(other, new_app(gate)).handle(adopted)
    assert done == ["first", "again", "second"]
    assert await output_of(broker) == "new"


def patched_first(*, then: Callable[[AgentContext], Awaitable[object]]) -> App:
    """Asks before its first step; what follows differs with the answer."""
    app = App("changing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> bool:
        taken = ctx.patched("begin")
        await then(ctx)
        await ctx.tool("search" if taken else "rank", query="x")
        return taken

    return app


def unpatched_first() -> App:
    app = App("changing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> bool:
        await ctx.note("old", 1)
        await ctx.step(gates[-1].stay, name="stay")
        await ctx.tool("rank", query="x")
        return False

    return app


gates: list[Gate] = []


async def note(ctx: AgentContext) -> None:
    await ctx.note("old", 1)
    await ctx.step(gates[-1].stay, name="stay")


async def test_a_note_after_the_question_does_not_hide_the_journal_of_another_process(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    gates.append(Gate())
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await drop_at(handler(bus, unpatched_first()), turn, gates[-1].reached)
    adopted = await reclaim(other, bus, turn)
    gates[-1].open.set()
    await handler(other, patched_first(then=note)).handle(adopted)
    assert (await broker.take(other, "tool")).name == "rank"
    assert "j:0.patched:begin" not in await broker.task("t")


def notes_after(*, patched: bool) -> App:
    app = App("changing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> bool:
        taken = patched and ctx.patched("begin")
        if taken:
            await ctx.note("new", 1)
        await ctx.tool("search", query="x")
        return taken

    return app


@pytest.mark.parametrize("app", [new_app(), notes_after(patched=True)], ids=["step", "note"])
async def test_no_step_is_journaled_without_the_mark_before_it(
    broker: Broker, bus: EventBus, other: EventBus, monkeypatch: pytest.MonkeyPatch, app: App
) -> None:
    """A replay without the mark would take another path, and find these steps there."""
    record = bus.record

    async def broken(delivery: object, step: str, *more: object, **named: object) -> bytes | None:
        if "patched" in step:
            raise BusUnavailable("the connection is lost")
        return await record(delivery, step, *more, **named)  # type: ignore[arg-type]  # passed on

    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    monkeypatch.setattr(bus, "record", broken)
    with pytest.raises(BusUnavailable):
        await handler(bus, app).handle(turn)
    assert [field for field in await broker.task("t") if field.startswith("j:")] == ["j:1"] * len(done)
    adopted = await reclaim(other, bus, turn)
    await handler(other, app).handle(adopted)
    assert not await broker.entries("dead")


async def test_a_mark_that_the_server_lost_is_stored_again(broker: Broker, bus: EventBus, other: EventBus) -> None:
    gate = Gate()
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    handling = asyncio.create_task(handler(bus, new_app(gate)).handle(turn))
    await gate.reached.wait()
    await broker.call("HDEL", broker.keys.task("t"), MARK, "j:2", "w")
    await reconnect(broker, bus)
    gate.open.set()
    await handling
    assert done == ["first", "again", "second"]
    assert await output_of(broker) == "new"


async def test_a_turn_that_waits_is_not_committed_without_its_mark(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    app = App("waits")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        return str(await ctx.tool("search" if ctx.patched("first") else "rank"))

    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    assert "j:0.patched:first" in await broker.task("t")
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, app).handle(await broker.take(other))
    assert await output_of(broker) == "found"


async def test_a_run_that_ends_at_once_costs_no_command(broker: Broker, bus: EventBus) -> None:
    app = App("short")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> bool:
        return ctx.patched("x")

    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    calls: list[str] = []
    record, begin = bus.record, bus.begin_turn

    async def counted(*given: object, **named: object) -> object:
        calls.append("record")
        return await record(*given, **named)  # type: ignore[arg-type]  # passed on

    async def begun(*given: object, **named: object) -> object:
        calls.append("begin")
        return await begin(*given, **named)  # type: ignore[arg-type]  # passed on

    bus.record, bus.begin_turn = counted, begun  # type: ignore[method-assign, assignment]  # this owner only
    await handler(bus, app).handle(turn)
    assert calls == []
    assert await output_of(broker) is True
