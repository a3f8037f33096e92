"""An app whose tasks change every metric: all ends, retries, letters, models, MCP, timers, engines, hooks."""

from __future__ import annotations

import os
import sys

from runtime_core.app.app import App
from runtime_core.declare.declaration import Agent, RetryPolicy
from runtime_core.declare.tool import ToolContext
from runtime_core.engines.function import EngineContext
from runtime_core.errors import EngineError, Reject
from runtime_core.llm.agent import LLMAgent
from runtime_core.llm.tokens import Price
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import handles
from runtime_core.runs.hooks.declared import HookEvent
from tests.mcp_servers.ledger import VARIABLE

app = App("busy")

QUICK = RetryPolicy(attempts=2, base_seconds=0.05, factor=1.0, max_seconds=0.1)

app.add_mcp(
    "desk",
    command=[sys.executable, "-m", "tests.mcp_servers.desk"],
    env={VARIABLE: os.environ.get(VARIABLE, "")},
)


@app.tool
async def say(text: str) -> str:
    return text


@app.tool(retry=QUICK)
async def stumbles(ctx: ToolContext) -> int:
    """Succeeds at its second attempt."""
    if ctx.attempt == 1:
        raise ValueError("the first attempt goes wrong")
    return ctx.attempt


@app.tool(retry=QUICK)
async def breaks() -> None:
    raise ValueError("each attempt goes wrong")


@app.engine_function
def double(number: int) -> int:
    return 2 * number


@app.engine_function
def refuses(ctx: EngineContext) -> None:
    raise Reject("not this one", type="Unfit")


@app.hook("agent_started")
def fails_itself(event: HookEvent) -> None:
    raise ValueError("a hook of the app goes wrong")


@app.agent("well")
async def well(ctx: AgentContext, engine: str) -> list[object]:
    """Everything that succeeds, in one task."""
    told = await ctx.gather(ctx.tool("say", text="a"), ctx.tool("stumbles"), ctx.tool("desk.say", text="b"))
    steps = await ctx.gather(
        ctx.engine(engine).call(double, number=2), ctx.engine(engine).call(refuses), return_exceptions=True
    )
    await ctx.sleep(0.05)
    return [*told, *(f"{type(step).__name__}" if isinstance(step, EngineError) else step for step in steps)]


@app.agent("idle")
async def idle(ctx: AgentContext, text: str) -> str:
    return text


app.add_agent("asks", LLMAgent("openai-chat:gpt-test", retry=QUICK, prices={"gpt-test": Price(1.0, 4.0)}))


@app.agent("badly")
async def badly(ctx: AgentContext, value: object) -> object:
    return await ctx.tool("breaks")


@app.agent("naps")
async def naps(ctx: AgentContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "rested"


class Desk(Agent):
    """Has instances, and so mailboxes."""

    @handles(str)
    async def on_text(self, message: str, ctx: AgentContext) -> str:
        return str(await ctx.tool("say", text=message))


app.add_agent("desk", Desk)
