"""A run that a process holds in memory continues with the steps that others have journaled since."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer
from weft import AgentContext, App

WAIT_SECONDS = 60.0


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def test_a_step_of_a_dead_owner_is_not_repeated_by_the_previous_owner(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """One process has the first turn and keeps the run. The next turn's owner dies after it has journaled a step."""
    app = App("warm")
    done: list[str] = []
    reached, dead = asyncio.Event(), asyncio.Event()

    @app.tool
    def look() -> str:
        return "found"

    def pay() -> int:
        done.append("paid")
        return len(done)

    async def stay() -> None:
        if not dead.is_set():
            reached.set()
            await asyncio.Event().wait()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> int:
        await ctx.tool(look)
        paid = await ctx.step(pay)
        await ctx.step(stay)
        return int(paid)

    holds = handler(bus, app)
    await broker.submit(bus, "t")
    await holds.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))

    dies = asyncio.create_task(handler(other, app).handle(await broker.take(other)))
    async with asyncio.timeout(WAIT_SECONDS):
        await reached.wait()
    dead.set()
    dies.cancel()
    await asyncio.wait((dies,))
    await broker.silence(other)

    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    await holds.handle(adopted)
    assert await broker.status("t") == "completed"
    assert (await broker.final("t"))["output"] == 1
    assert done == ["paid"]


async def test_a_run_in_memory_sees_the_change_of_a_reentrant_call(broker: Broker, bus: EventBus) -> None:
    """The nested run ends last, and only its end lets the outer run continue: its change of the state is not lost."""
    app = App("nested")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        if value == "nested":
            ctx.state["n"] = 1
            return
        await ctx.agent("writer", "nested", key="k")
        ctx.state["n"] += 1

    handles = handler(bus, app)
    await broker.submit(bus, "t", key="k")
    for run in ("r", "r/1", "r"):
        turn = await broker.take(bus)
        assert turn.run == run
        await handles.handle(turn)
    assert await broker.status("t") == "completed"
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":2}'


async def test_a_run_in_memory_sees_the_change_of_a_reentrant_call_through_another_agent(
    broker: Broker, bus: EventBus
) -> None:
    """The other agent's answer lets the run continue, long after the nested run has ended."""
    app = App("nested")

    @app.agent("editor")
    async def editor(ctx: AgentContext, value: object) -> None:
        await ctx.agent("writer", "nested", key="k")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        if value == "nested":
            ctx.state["n"] = 1
            return
        await ctx.agent("editor", None)
        ctx.state["n"] += 1

    handles = handler(bus, app)
    await broker.submit(bus, "t", key="k")
    for run in ("r", "r/1", "r/1/1", "r/1", "r"):
        turn = await broker.take(bus)
        assert turn.run == run
        await handles.handle(turn)
    assert await broker.status("t") == "completed"
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":2}'


async def test_a_reentrant_call_in_a_gather_that_ends_first_is_also_seen(broker: Broker, bus: EventBus) -> None:
    """Its end wakes nobody. The tool's result wakes the run, which must not continue with its old state."""
    app = App("gathered")

    @app.tool
    def look() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        if value == "nested":
            ctx.state["n"] = 1
            return
        await ctx.gather(ctx.agent("writer", "nested", key="k"), ctx.tool(look))
        ctx.state["n"] = ctx.state.get("n", 0) + 1

    handles = handler(bus, app)
    await broker.submit(bus, "t", key="k")
    await handles.handle(await broker.take(bus))
    await handles.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    await handles.handle(await broker.take(bus))
    assert await broker.status("t") == "completed"
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":2}'
