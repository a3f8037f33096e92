"""An app with one agent for each feature, for a fleet in which every service has its own broker user."""

from __future__ import annotations

import asyncio

from tests.apps import every_call_app, llm_app, mcp_app
from weft import AgentContext, App, RetryPolicy

app = App("features")
app.include(every_call_app.app)
app.include(mcp_app.app)
app.include(llm_app.app)


@app.engine_function
def treble(number: int) -> int:
    return 3 * number


@app.agent("engineer")
async def engineer(ctx: AgentContext, number: int) -> int:
    return int(await ctx.engine("ray").call(treble, number=number))


@app.tool(retry=RetryPolicy(attempts=2, base_seconds=0.05))
async def poor() -> str:
    """Fails for good."""
    raise ValueError("it is broken")


@app.agent("breaks")
async def breaks(ctx: AgentContext, word: str) -> str:
    return str(await ctx.tool(poor))


@app.agent("endless")
async def endless(ctx: AgentContext, text: str) -> None:
    await ctx.step(asyncio.sleep, 600)


@app.agent("overheard", topics=["news.*"])
async def overheard(ctx: AgentContext, text: str) -> str:
    ctx.state["heard"] = text
    return text


@app.agent("echo")
async def echo(ctx: AgentContext, text: object) -> object:
    return text
