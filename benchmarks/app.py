"""The benchmarked app."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from benchmarks.question import found
from runtime_core.app.app import App
from runtime_core.runs.context import AgentContext

RELEASE = "release"
"""The file that releases all held deliveries."""
POLL_SECONDS = 0.02

app = App("benchmarks")


@app.tool
async def look_up(text: str) -> str:
    return found(text)


@app.agent("asker")
async def asker(ctx: AgentContext, text: str) -> str:
    """The benchmarked task: a caller asks an agent, it calls a tool, the tool answers, the agent answers."""
    return str(await ctx.tool(look_up, text=text))


@app.agent("replier")
async def replier(ctx: AgentContext, text: str) -> str:
    """Answers at once."""
    return text


@app.agent("sleeper")
async def sleeper(ctx: AgentContext, text: str) -> str:
    await ctx.sleep(24 * 3600)
    return text


@app.agent("speaker")
async def speaker(ctx: AgentContext, text: list[float]) -> None:
    """Emits the time (epoch ns). The input is the number of pieces, and the seconds between them."""
    pieces, seconds = text
    for _ in range(int(pieces)):
        await ctx.emit(time.time_ns(), chunk=True)
        if seconds:
            await asyncio.sleep(seconds)


@app.agent("doubter")
async def doubter(ctx: AgentContext, text: str) -> str:
    return str(await ctx.human(text))


@app.agent("waker")
async def waker(ctx: AgentContext, text: str) -> int:
    """Returns when it went on after the answer (epoch ns)."""
    await ctx.human(text)
    return time.time_ns()


@app.agent("spreader")
async def spreader(ctx: AgentContext, text: int) -> int:
    """Calls a tool so many times at once."""
    return len(await ctx.gather(*(ctx.tool(look_up, text=str(number)) for number in range(text))))


@app.agent("stepper")
async def stepper(ctx: AgentContext, text: int) -> int:
    """Takes so many steps, one after the other, and then asks a person."""
    done = [await ctx.step(found, str(number)) for number in range(text)]
    await ctx.human("Did it take all steps?")
    return len(done)


@app.tool
async def hold(folder: str, name: str) -> bool:
    """Hold the delivery until the release file exists; return True immediately for the second attempt.

    The first one leaves a file `<name>.<process id>`, which names the process that held the delivery.
    """
    place = Path(folder)
    if any(place.glob(f"{name}.*")):
        return True
    (place / f"{name}.{os.getpid()}").touch()
    while not (place / RELEASE).exists():  # the one who releases is another process
        await asyncio.sleep(POLL_SECONDS)
    return False


@app.agent("tool_holder")
async def tool_holder(ctx: AgentContext, text: list[str]) -> bool:
    """A tool-handler holds a delivery. The input is folder and name."""
    return bool(await ctx.tool(hold, folder=text[0], name=text[1]))


@app.agent("agent_holder")
async def agent_holder(ctx: AgentContext, text: list[str]) -> bool:
    """An agent-handler holds a delivery. The input is folder and name."""
    return bool(await ctx.step(hold, text[0], text[1]))
