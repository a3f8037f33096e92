"""The app of the tests of questions and hooks on the services."""

from __future__ import annotations

from weft import AgentContext, App
from weft.hooks import Ask, HookEvent

app = App("humans")


@app.tool
def publish(text: str) -> str:
    return f"published {text}"


@app.hook("before_tool_call", guard=True)
def ask_first(event: HookEvent) -> Ask:
    return Ask("Publish it?")


@app.hook("error")
def alert(event: HookEvent) -> None:
    """Only observes; its row in the trajectory shows that it ran."""


@app.agent("publisher")
async def publisher(ctx: AgentContext, text: str) -> str:
    published: str = await ctx.tool(publish, text=text)
    return published


@app.agent("approver")
async def approver(ctx: AgentContext, text: str) -> list[object]:
    approval = await ctx.approve("Publish it?", data=text)
    return [approval.verdict, approval.value, approval.reason]
