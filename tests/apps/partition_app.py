"""An app whose agents call instances by key in any partition."""

from __future__ import annotations

from runtime_core.app.app import App
from runtime_core.declare.declaration import Agent
from runtime_core.errors import Reject
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import handles

app = App("partitions")


class Counter(Agent):
    """Counts its requests. Fails on request."""

    @handles(int)
    async def on_number(self, number: int, ctx: AgentContext) -> int:
        if number < 0:
            raise Reject(f"{number} is below zero")
        count: int = ctx.state.get("count", 0) + number
        ctx.state["count"] = count
        await ctx.spend(tokens=number, model="abacus")
        return count


app.add_agent("counter", Counter, topics=["count", "late*"])


class Mirror(Agent):
    """Calls its caller back, in whichever partition that lives."""

    @handles(list)
    async def on_names(self, names: list[str], ctx: AgentContext) -> int:
        if not names:
            return int(ctx.state.get("asked", 0))
        ctx.state["asked"] = ctx.state.get("asked", 0) + 1
        deepest: int = await ctx.agent("mirror", names[1:], key=names[0])
        return deepest


app.add_agent("mirror", Mirror)


@app.agent("publisher")
async def publisher(ctx: AgentContext, keys: list[str]) -> None:
    for key in keys:
        await ctx.publish("count", 100, source=key)


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
