"""The app for tests of publishers: an agent that asks before it acts, and the agent that acts."""

from __future__ import annotations

from weft import AgentContext, App

app = App("publishers")


@app.agent("executor", internal=True)
async def executor(ctx: AgentContext, text: str) -> list[str]:
    return [ctx.tenant, text]


@app.agent("approver")
async def approver(ctx: AgentContext, text: str) -> object:
    approval = await ctx.approve("Do it?", data=text)
    return await ctx.agent(executor, text) if approval.verdict == "approve" else "denied"


@app.agent("echo")
async def echo(ctx: AgentContext, value: object) -> object:
    return value
