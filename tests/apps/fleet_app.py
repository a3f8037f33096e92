"""The app that the services' tests run: work that succeeds, and work that fails in every way."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from datetime import date
from typing import Literal

from runtime_core.app.app import App
from runtime_core.declare.declaration import Agent, RetryPolicy
from runtime_core.declare.tool import ToolContext
from runtime_core.errors import ToolError
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import handles

app = App("fleet")

QUICK = RetryPolicy(attempts=3, base_seconds=0.05, factor=2.0, max_seconds=0.2)
PATIENT = RetryPolicy(attempts=3, base_seconds=0.3, factor=2.0, max_seconds=2.0, jitter=0.0)


def note(path: str, line: str) -> None:
    """Append a line in one write: an external effect that a kill may repeat but cannot undo."""
    with open(path, "ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


@app.tool
async def effect(ctx: ToolContext, path: str, name: str, seconds: float = 0.0) -> str:
    """An external effect, identified by its idempotency key. A kill before it returns repeats it."""
    note(path, f"{name} {ctx.idempotency_key}")
    await asyncio.sleep(seconds)
    return name


@app.tool(retry=QUICK)
async def slow(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.tool(retry=PATIENT)
def raises(ctx: ToolContext, path: str) -> None:
    note(path, f"{ctx.attempt} {time.time():.3f}")
    raise ValueError(f"attempt {ctx.attempt} went wrong")


@app.tool(retry=QUICK, timeout_seconds=0.3)
async def hangs() -> None:
    await asyncio.sleep(600)


@app.tool(retry=QUICK)
def unspeakable() -> object:
    """Returns a value that JSON cannot hold."""
    return object()


@app.tool
def dies(path: str) -> None:
    """Ends its process at every attempt."""
    note(path, str(os.getpid()))
    os._exit(3)


@app.agent("errand")
async def errand(ctx: AgentContext, wanted: dict[str, object]) -> object:
    """One effect that takes some time."""
    return await ctx.tool("effect", path=wanted["path"], name="errand", seconds=wanted["seconds"])


@app.agent("murmurs")
async def murmurs(ctx: AgentContext, wanted: dict[str, float]) -> int:
    """Emits this many pieces, one after the other, as a model streams its answer."""
    pieces = int(wanted["pieces"])
    for number in range(pieces):
        await ctx.emit(f"piece {number}")
        await ctx.step(asyncio.sleep, wanted["seconds"] / pieces)
    return pieces


@app.agent("echo")
async def echo(ctx: AgentContext, value: object) -> object:
    return value


@app.agent("polls")
async def polls(ctx: AgentContext, count: int) -> object:
    return await ctx.gather(*(ctx.human(f"question {number}") for number in range(count)))


@app.agent("inner", internal=True)
async def inner(ctx: AgentContext, value: object) -> object:
    return value


@app.agent("wide")
async def wide(ctx: AgentContext, wanted: dict[str, object]) -> int:
    """Call a tool, or else the agent `echo`, very often in one turn."""
    numbers = range(int(str(wanted["count"])))
    if "tool" in wanted:
        return len(await ctx.gather(*(ctx.tool(str(wanted["tool"]), seconds=0.0) for _ in numbers)))
    return len(await ctx.gather(*(ctx.agent("echo", number) for number in numbers)))


@app.agent("steps")
async def steps(ctx: AgentContext, value: object) -> object:
    """A tool, a child run and a tool, one after the other."""
    await ctx.tool("slow", seconds=0.0)
    found = await ctx.agent("echo", value)
    await ctx.tool("slow", seconds=0.0)
    return found


@app.agent("spends")
async def spends(ctx: AgentContext, tokens: float) -> None:
    await ctx.spend(tokens=tokens)


@app.agent("strict")
async def strict(ctx: AgentContext, number: int) -> int:
    return number


@app.agent("use", retry=QUICK)
async def use(ctx: AgentContext, wanted: dict[str, object]) -> object:
    """Call one tool with the given arguments."""
    arguments = wanted.get("arguments", {})
    assert isinstance(arguments, dict)
    return await ctx.tool(str(wanted["tool"]), **arguments)


@app.agent("copes")
async def copes(ctx: AgentContext, wanted: dict[str, object]) -> str:
    """Like `use`, but continues if the tool fails permanently."""
    arguments = wanted.get("arguments", {})
    assert isinstance(arguments, dict)
    try:
        await ctx.tool(str(wanted["tool"]), **arguments)
    except ToolError as error:
        return f"{error.type}: {error.message}"
    return "no error"


@app.agent("agent-raises", retry=QUICK)
async def agent_raises(ctx: AgentContext, value: object) -> object:
    raise ValueError(f"attempt {ctx.attempt} went wrong")


@app.agent("agent-hangs", retry=QUICK, timeout_seconds=0.3)
async def agent_hangs(ctx: AgentContext, value: object) -> object:
    await asyncio.Event().wait()
    return value


@app.agent("agent-unspeakable", retry=QUICK)
async def agent_unspeakable(ctx: AgentContext, value: object) -> object:
    return object()


@app.agent("agent-dies")
async def agent_dies(ctx: AgentContext, path: str) -> None:
    note(path, str(os.getpid()))
    os._exit(3)


@app.agent("asks")
async def asks(ctx: AgentContext, prompt: str) -> object:
    return {"answer": await ctx.human(prompt, data={"n": 1})}


@dataclass
class Visit:
    """When somebody comes."""

    day: date
    seats: Literal[1, 2]
    note: str | None = None


@app.agent("books")
async def books(ctx: AgentContext, prompt: str) -> list[object]:
    visit = await ctx.human(prompt, type=Visit)
    return [type(visit.day).__name__, visit.seats, visit.note]


@app.agent("naps")
async def naps(ctx: AgentContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "rested"


@app.agent("dawdles")
async def dawdles(ctx: AgentContext, seconds: float) -> str:
    """A turn that takes some time."""
    await ctx.step(asyncio.sleep, seconds)
    return "done"


@app.agent("writes")
async def writes(ctx: AgentContext, path: str) -> str:
    return str(await ctx.tool("effect", path=path, name="sub", seconds=0.05))


@app.agent("journey")
async def journey(ctx: AgentContext, path: str) -> list[str]:
    """Calls three tools at once, then another agent that uses a tool, then answers."""
    found = await ctx.gather(
        *(ctx.tool("effect", path=path, name=f"part{number}", seconds=0.05) for number in range(3))
    )
    last = await ctx.agent("writes", path)
    return [*(str(each) for each in found), str(last)]


@dataclass
class Add:
    """One message of a sender, numbered from 0."""

    sender: str
    number: int
    path: str


class Ledger(Agent):
    """Keeps its messages in order, and logs when it begins and ends each of them."""

    @handles(Add)
    async def on_add(self, message: Add, ctx: AgentContext) -> int:
        await ctx.step(note, message.path, f"begin {message.sender} {message.number}", name="begin")
        seen: list[list[object]] = ctx.state.setdefault("seen", [])
        seen.append([message.sender, message.number])
        await ctx.tool("slow", seconds=0)
        await ctx.step(note, message.path, f"end {message.sender} {message.number}", name="end")
        return len(seen)

    @handles(str)
    async def on_text(self, message: str, ctx: AgentContext) -> object:
        return ctx.state.get("seen", [])


app.add_agent("ledger", Ledger, topics=["ledger.*"])
