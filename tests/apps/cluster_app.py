"""The app of the tests on a Cluster: two other apps of tests, and an agent that sleeps, emits and calls a tool."""

from __future__ import annotations

from runtime_core.declare.tool import ToolContext
from tests.apps import partition_app, publishers_app
from weft import AgentContext, App, RetryPolicy

app = App("cluster")
app.include(partition_app.app)
app.include(publishers_app.app)


@app.tool(retry=RetryPolicy(attempts=3, base_seconds=0.05))
async def third_time(ctx: ToolContext, word: str) -> str:
    if ctx.attempt < 3:
        raise ValueError("not yet")
    return word


@app.agent("errand")
async def errand(ctx: AgentContext, word: str) -> object:
    await ctx.sleep(0.05)
    await ctx.emit("on my way")
    return await ctx.tool("third_time", word=word)
