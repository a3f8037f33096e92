"""An app for the tests of the testing kit."""

from __future__ import annotations

import itertools
from datetime import timedelta

from weft import AgentContext, App, LLMAgent, ToolContext

app = App("kit")


sent: list[str] = []


@app.tool
async def send(ctx: ToolContext, text: str) -> str:
    sent.append(text)
    return f"sent {text}"


@app.agent("reminder")
async def reminder(ctx: AgentContext, text: str) -> str:
    await ctx.sleep(timedelta(days=1))
    await ctx.tool(send, text=f"first {text}")
    await ctx.sleep(timedelta(days=2))
    answer: str = await ctx.human("again?", timeout=3600, default="no")
    await ctx.emit(answer)
    return await ctx.tool(send, text=f"last {text}")


@app.agent("two_steps")
async def two_steps(ctx: AgentContext, text: str) -> list[str]:
    await ctx.emit("begin")
    first = await ctx.tool(send, text=text)
    noted = await ctx.step(lambda: "noted")
    return [first, noted, await ctx.agent("inner", text)]


@app.agent("inner")
async def inner(ctx: AgentContext, text: str) -> str:
    return text.upper()


@app.agent("asks")
async def asks(ctx: AgentContext) -> str:
    await ctx.sleep(timedelta(days=3))
    tone: str = await ctx.human("which tone?")
    approval = await ctx.approve("send?", data=tone, timeout=3600)
    return await ctx.tool(send, text=tone) if approval.approved else "denied"


@app.agent("naps")
async def naps(ctx: AgentContext) -> str:
    await ctx.sleep(0.01)
    return await ctx.tool(send, text="rested")


@app.agent("listens")
async def listens(ctx: AgentContext) -> str:
    heard: str = await ctx.receive("news")
    return heard


@app.agent("broken")
async def broken(ctx: AgentContext, text: str) -> str:
    raise ZeroDivisionError("by zero")


flips = itertools.cycle(["a", "b"])


@app.agent("moody")
async def moody(ctx: AgentContext, text: str) -> str:
    return await ctx.tool(send, text=next(flips))


app.add_agent("assistant", LLMAgent("openai-chat:none", tools=[send]))
