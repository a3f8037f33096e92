"""Agents whose steps write to an outside ledger and then wait long: what a rollout, a kill or a redrive meets midway.

The ledger is a file. `run` says that a step's function was called, `kept` that its result is in the journal: the code
goes on only after that. So a `run` after a `kept` is a finished step that ran again.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from runtime_core.declare.declaration import RetryPolicy
from tests.apps.fleet_app import note
from weft import AgentContext, App, ToolContext
from weft.errors import ToolError

app = App("seams")

QUICK = RetryPolicy(attempts=2, base_seconds=0.05, max_seconds=0.1)
Wanted = dict[str, Any]  # Any: JSON


async def charge(path: str, step: str) -> str:
    """An external effect that nobody can undo."""
    note(path, f"run {step} {os.getpid()}")
    return step


async def paid(ctx: AgentContext, path: str, number: int) -> None:
    """Charge once, and log when the journal has the result."""
    step = f"{ctx.task_id}/{ctx.run_id}/{number}"
    await ctx.step(charge, path, step, name=f"charge {number}")
    note(path, f"kept {step} {os.getpid()}")


@app.tool(repeatable=False)
async def once(ctx: ToolContext, path: str, seconds: float) -> str:
    note(path, f"once {ctx.idempotency_key} {os.getpid()}")
    await asyncio.sleep(seconds)
    return "done"


@app.agent("teller")
async def teller(ctx: AgentContext, wanted: Wanted) -> int:
    """Charges several times, and waits after each charge: with the turn in hand, or suspended."""
    waits: list[float] = wanted["waits"]
    for number, seconds in enumerate(waits):
        await paid(ctx, wanted["path"], number)
        if (number + wanted["first"]) % 2:
            await ctx.sleep(seconds)
        else:
            await ctx.step(asyncio.sleep, seconds)
    return len(waits)


@app.agent("clerk")
async def clerk(ctx: AgentContext, wanted: Wanted) -> str:
    """Uses a tool that may not be repeated. If its outcome is unknown, that is the answer."""
    await paid(ctx, wanted["path"], 0)
    try:
        answer = str(await ctx.tool(once, path=wanted["path"], seconds=wanted["waits"][0]))
    except ToolError as error:
        if error.type != "UnknownOutcome":
            raise
        answer = "unknown"
    await paid(ctx, wanted["path"], 1)
    return answer


@app.agent("flaky", retry=QUICK)
async def flaky(ctx: AgentContext, wanted: Wanted) -> str:
    """Fails after it has charged, until somebody fixes the cause: then its letters are redriven."""
    await paid(ctx, wanted["path"], 0)
    await ctx.sleep(0.05)
    if not Path(wanted["mended"]).exists():
        raise ValueError("not mended yet")
    await ctx.step(asyncio.sleep, wanted["waits"][0])
    await paid(ctx, wanted["path"], 1)
    return "mended"


@app.agent("spreads")
async def spreads(ctx: AgentContext, wanted: Wanted) -> None:
    """Charges several times at once, in this run and in another one, and stays in its turn."""
    if wanted["below"]:
        await paid(ctx, wanted["path"], 0)
        await ctx.agent("spreads", {**wanted, "below": False})
    await ctx.gather(*(paid(ctx, wanted["path"], number) for number in range(1, 4)))
    await ctx.step(asyncio.sleep, 600)


@app.agent("asks")
async def asks(ctx: AgentContext, wanted: Wanted) -> int:
    """Has a key and calls the next agent of its chain, which may be an instance that calls this one."""
    await paid(ctx, wanted["path"], 0)
    chain: list[str] = wanted["chain"]
    total = 1
    if chain:
        await ctx.step(asyncio.sleep, wanted["seconds"])
        total += int(await ctx.agent("asks", {**wanted, "chain": chain[1:]}, key=chain[0]))
    await paid(ctx, wanted["path"], 1)
    return total
