"""An app whose agents share a context, for tests of `ctx.context` and `ctx.session`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from weft import AgentContext, App

app = App("contexts")
app.add_sessions()


def seen(ctx: AgentContext) -> dict[str, Any]:  # Any: values of all kinds
    context = ctx.context
    return {
        "log": context.get("log"),
        "tokens": context.token_usage.get("input_tokens", 0),
        "steps": context.count("steps"),
        "title": context.get("title"),
        "conflicts": [conflict.key for conflict in context.conflicts],
    }


def one() -> int:
    return 1


@app.tool
async def slow(number: int) -> int:
    """Answers the later parts of a gather first."""
    await asyncio.sleep(0.05 - 0.01 * number)
    return number


@app.agent("leaf")
async def leaf(ctx: AgentContext, name: str) -> int:
    found = len(ctx.context.get("log", []))
    ctx.context.put("log", [*ctx.context.get("log", []), name])
    ctx.context.increment("steps")
    ctx.context.add_token({"input_tokens": await ctx.step(one)})
    return found


@app.agent("quiet")
async def quiet(ctx: AgentContext, name: str) -> int:
    """Does not use the context itself."""
    found: int = await ctx.agent(leaf, name)
    return found


@app.agent("root")
async def root(ctx: AgentContext, _: object = None) -> dict[str, Any]:
    ctx.context.put("log", ["root"])
    ctx.context.put("title", "draft")
    first = await ctx.agent(leaf, "1")
    await ctx.sleep(0.01)
    ctx.context.get("log").append("between")
    through = await ctx.agent(quiet, "2")

    async def part(number: int) -> None:
        await ctx.tool(slow, number=number)
        mine = ctx.context
        mine.get("log").append(f"part {number}")
        mine.put("title", f"by {number}")
        await ctx.agent(leaf, f"leaf of {number}")

    await ctx.gather(*(part(number) for number in range(3)))
    both = await ctx.gather(ctx.agent(leaf, "a"), ctx.agent(leaf, "b"))
    return {**seen(ctx), "found": [first, through, *both]}


ROOT_RESULT = {
    "log": [
        "root", "1", "between", "2",
        "part 0", "leaf of 0", "part 1", "leaf of 1", "part 2", "leaf of 2",
        "a", "b",
    ],
    "tokens": 7,
    "steps": 7,
    "title": "by 2",
    "conflicts": ["title", "title"],
    "found": [1, 3, 10, 10],
}  # fmt: skip
"""What `root` gives, whoever died meanwhile."""


@app.agent("unaware")
async def unaware(ctx: AgentContext, _: object = None) -> dict[str, Any]:
    """Uses the context only after the agents that it called have used it."""
    await ctx.agent(leaf, "1")
    await ctx.agent(quiet, "2")
    return seen(ctx)


@app.agent("delegating")
async def delegating(ctx: AgentContext, _: object = None) -> dict[str, Any]:
    """Leaves the context to the agents that its coroutines call."""

    async def part(name: str) -> int:
        found: int = await ctx.agent(leaf, name)
        return found

    ctx.context.put("log", ["begun"])
    found = await ctx.gather(part("1"), part("2"))
    return {**seen(ctx), "found": found}


@app.agent("visitor")
async def visitor(ctx: AgentContext, name: str) -> list[str]:
    """Changes the session's context while other tasks change it too."""
    async with ctx.session() as session:
        before: list[str] = list(session.get("visitors", []))
        session.put("visitors", [*before, name])
        session.increment("visits")
        session.add_token({"input_tokens": 1})
        await ctx.tool(slow, number=len(name))
    return before


@app.agent("reader")
async def reader(ctx: AgentContext, _: object = None) -> dict[str, Any]:
    async with ctx.session() as session:
        return {
            "visitors": session.get("visitors"),
            "visits": session.count("visits"),
            "tokens": session.token_usage,
        }


@app.agent("clashing")
async def clashing(ctx: AgentContext, title: str) -> list[str]:
    block = ctx.session()
    async with block as session:
        session.put("title", title)
        await ctx.human("go on?")
    return [conflict.key for conflict in block.conflicts]


@app.agent("stumbling")
async def stumbling(ctx: AgentContext, _: object = None) -> str:
    try:
        async with ctx.session() as session:
            session.put("visitors", ["nobody"])
            raise ValueError("no")
    except ValueError:
        return "stumbled"


@app.agent("dying")
async def dying(ctx: AgentContext, folder: str) -> dict[str, Any]:
    """Like `root`, in a process that dies at its first attempt at each place."""
    ctx.context.put("log", ["root"])
    for number in range(3):
        await ctx.agent(leaf, str(number))
        await ctx.step(die_once, folder, number)
        ctx.context.get("log").append(f"after {number}")
    return seen(ctx)


def die_once(folder: str, number: int) -> None:
    mark = Path(folder) / f"died-{number}"
    if not mark.exists():
        mark.touch()
        os._exit(9)
