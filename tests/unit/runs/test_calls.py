"""The calls that a run requests: by name, pool and arguments."""

from __future__ import annotations

from runtime_core.app.app import App
from runtime_core.consumer.effects import Suspended
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import Program, World, calls_of


async def test_a_registered_tool_is_called_by_its_name_and_pool() -> None:
    app = App("test")

    @app.tool(name="find", pool="gpu")
    async def search(query: str) -> str:
        return query

    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.gather(ctx.tool(search, query="x"), ctx.tool("find", query="y"), ctx.tool("others"))

    world = World(functions=app.functions)
    result = await world.turn(Program(code))
    assert isinstance(result, Suspended)
    assert [(call.name, call.pool) for call in calls_of(result)] == [
        ("find", "gpu"),
        ("find", "gpu"),
        ("others", ""),
    ]
    assert world.run is not None
    await world.run.aclose()
