"""The app for tests of stopping: work that lasts until a file exists, in each place where work can be."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from runtime_core.app.app import App
from runtime_core.declare.tool import ToolContext
from runtime_core.engines.function import EngineContext
from runtime_core.errors import ToolError
from runtime_core.runs.context import AgentContext
from tests.apps.fleet_app import note

app = App("stopping")


def begun(folder: str, what: str, attempt: int) -> None:
    note(f"{folder}/begun", f"{what} {attempt}")


def opened(folder: str) -> bool:
    return Path(folder, "gate").exists()


async def opening(folder: str) -> None:
    while not opened(folder):
        await asyncio.sleep(0.02)


@app.tool
async def waits(ctx: ToolContext, folder: str) -> str:
    begun(folder, "waits", ctx.attempt)
    await opening(folder)
    return "waited"


@app.tool
def holds_a_thread(ctx: ToolContext, folder: str) -> str:
    begun(folder, "holds_a_thread", ctx.attempt)
    while not opened(folder):
        time.sleep(0.02)
    return "held"


@app.tool
async def stubborn(ctx: ToolContext, folder: str) -> str:
    """Does not end when it is cancelled."""
    begun(folder, "stubborn", ctx.attempt)
    while not opened(folder):
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            continue
    return "stayed"


@app.tool(repeatable=False)
async def once(ctx: ToolContext, folder: str) -> str:
    begun(folder, "once", ctx.attempt)
    await opening(folder)
    return "never"


@app.engine_function
def computes(folder: str, ctx: EngineContext) -> str:
    begun(folder, "computes", ctx.attempt)
    while not opened(folder):
        time.sleep(0.02)
    return "computed"


@app.agent("calls")
async def calls(ctx: AgentContext, asked: dict[str, str]) -> object:
    """Calls one tool. The message of an error is an answer too."""
    try:
        return await ctx.tool(asked["tool"], folder=asked["folder"])
    except ToolError as error:
        return error.type


@app.agent("steps")
async def steps(ctx: AgentContext, folder: str) -> object:
    return await ctx.engine("local").call(computes, folder=folder)


@app.agent("streams")
async def streams(ctx: AgentContext, folder: str) -> str:
    """Emits one piece, and the next when the gate is open."""
    begun(folder, "streams", ctx.attempt)
    await ctx.emit("first")
    await ctx.step(opening, folder)
    await ctx.emit("last")
    return "streamed"


@app.agent("asks")
async def asks(ctx: AgentContext, folder: str) -> object:
    return await ctx.human("Go on?")


@app.agent("naps")
async def naps(ctx: AgentContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "rested"
