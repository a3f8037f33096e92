"""A run that a process still holds in memory goes on with what others have journaled of it meanwhile."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from runtime_core import AgentContext, App
from runtime_core.agents.turn_handler import TurnHandler
from runtime_core.bus.event_bus import EventBus
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer

WAIT_SECONDS = 60.0


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def test_a_step_of_a_dead_owner_is_not_done_again_by_who_had_the_turn_before(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """One process has the first turn and keeps the run; the next turn's owner dies behind a step that is journaled."""
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
