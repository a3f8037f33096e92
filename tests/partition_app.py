"""An app whose agents ask instances by key, wherever they live."""

from __future__ import annotations

from runtime_core.agents.agent import Agent, handles
from runtime_core.agents.context import AgentContext
from runtime_core.app import App
from runtime_core.errors import Reject

app = App("partitions")


class Counter(Agent):
    """Counts what it is asked; fails where it is told to."""

    @handles(int)
    async def on_number(self, number: int, ctx: AgentContext) -> int:
        if number < 0:
            raise Reject(f"{number} is below zero")
        count: int = ctx.state.get("count", 0) + number
        ctx.state["count"] = count
        return count


app.add_agent("counter", Counter)


@app.agent("asker")
async def asker(ctx: AgentContext, keys: list[str]) -> list[int]:
    return await ctx.gather(*(ctx.agent("counter", 1, key=key) for key in keys))


@app.agent("fails")
async def fails(ctx: AgentContext, key: str) -> int:
    answer: int = await ctx.agent("counter", -1, key=key)
    return answer


@app.agent("sender")
async def sender(ctx: AgentContext, keys: list[str]) -> None:
    for key in keys:
        await ctx.send("counter", 10, key=key)


@app.agent("patient")
async def patient(ctx: AgentContext, key: str) -> object:
    return await ctx.agent("waiter", "x", key=key)


@app.agent("waiter")
async def waiter(ctx: AgentContext, value: str) -> object:
    return await ctx.human("go on?")
