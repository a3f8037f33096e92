"""An app whose code changes under running tasks: the file `CHANGING_APP_RELEASE` holds the number of the release."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from runtime_core.app.app import App
from runtime_core.runs.context import AgentContext

app = App("changing")
RELEASE = int(Path(os.environ["CHANGING_APP_RELEASE"]).read_text())


async def pause(name: str) -> str:
    await asyncio.sleep(0.03)
    return name


@app.tool
async def lookup(name: str) -> str:
    return await pause(name)


@app.agent("report")
async def report(ctx: AgentContext, rounds: int) -> list[str]:
    """Each release adds a step in the middle; steps in mid-turn and waits take turns."""
    seen = [await ctx.step(pause, "begin", name="begin")]
    if RELEASE >= 2 and ctx.patched("outline"):
        seen.append(await ctx.step(pause, "outline", name="outline"))
    for number in range(rounds):
        seen.append(await ctx.step(pause, f"draft {number}", name="draft"))
        seen.append(await ctx.tool(lookup, f"fact {number}"))
    if RELEASE >= 3 and ctx.patched("check"):
        seen.append(await ctx.tool(lookup, "check"))
        seen.append(await ctx.step(pause, "checked", name="checked"))
    seen.append(await ctx.step(pause, "end", name="end"))
    return seen


@app.tool
async def lookup_all(names: list[str]) -> list[str]:
    return names


@app.agent("careless")
async def careless(ctx: AgentContext, name: str) -> object:
    """Its second release calls another tool, without asking whether the task has called the first."""
    if RELEASE == 1:
        found: object = await ctx.tool(lookup, name=name)
    else:
        found = await ctx.tool(lookup_all, names=[name])
    if RELEASE == 1:
        await ctx.sleep(3600)
    return found


@app.agent("att" if RELEASE < 4 else "attorney")
async def att(ctx: AgentContext, _: object) -> object:
    """Its fourth release has another name."""
    return await ctx.human("Go on?")
