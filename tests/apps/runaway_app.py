"""An app whose agents and tools block the event loop, fork, or start processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import time
from itertools import chain
from pathlib import Path

from runtime_core.app.app import App
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.runs.context import AgentContext

app = App("runaway")

ONCE = RetryPolicy(attempts=1)


async def spin() -> None:
    while True:
        pass


async def catches_all() -> None:
    while True:
        try:
            time.sleep(600)
        except Exception:  # the point: code that goes on whatever happens
            continue


async def waits_for_itself() -> None:
    loop = asyncio.get_running_loop()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()


HOLDS = {"spins": spin, "catches": catches_all, "waits": waits_for_itself}


@app.agent("holds", retry=ONCE)
async def holds(ctx: AgentContext, how: str) -> None:
    await HOLDS[how]()


@app.agent("holds_in_step", retry=ONCE)
async def holds_in_step(ctx: AgentContext, how: str) -> None:
    await ctx.step(HOLDS[how])


@app.tool(retry=ONCE)
async def holding(how: str) -> None:
    await HOLDS[how]()


@app.agent("calls", retry=ONCE)
async def calls(ctx: AgentContext, wanted: dict[str, str]) -> object:
    return await ctx.tool(wanted.pop("tool"), **wanted)


@app.agent("naps")
async def naps(ctx: AgentContext, seconds: float) -> str:
    """Runs this long without a step, so that whoever adopts it would run it again."""
    await asyncio.sleep(seconds)
    return str(ctx.attempt)


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()


async def cancel_all() -> None:
    begun = asyncio.create_task(asyncio.sleep(60))
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.wait([begun])


async def cancel_others() -> None:
    begun = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    for task in asyncio.tasks.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.wait([begun])
    raise LookupError(f"went on, cancelled: {begun.cancelled()}")


ENDS_LOOP = {each.__name__: each for each in (stop_loop, cancel_all, cancel_others)}


@app.agent("ends_loop", retry=ONCE)
async def ends_loop(ctx: AgentContext, how: str) -> None:
    await ENDS_LOOP[how]()


@app.tool(retry=ONCE)
async def ending_loop(how: str) -> None:
    await ENDS_LOOP[how]()


@app.tool(retry=ONCE)
async def napping(seconds: float) -> str:
    """Waits in a separate task."""
    return await asyncio.create_task(asyncio.sleep(seconds, "slept"))


@app.agent("cancels_handling")
async def cancels_handling(ctx: AgentContext) -> int:
    if ctx.attempt == 1:
        for task in asyncio.tasks.all_tasks():
            if "InFlight._handle" in repr(task.get_coro()):
                task.cancel()
        await asyncio.sleep(0)
    return ctx.attempt


def note(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{line}\n")


@app.tool(retry=ONCE)
def forks(path: str) -> str:
    """Returns twice: in its process and in a forked child."""
    child = os.fork()
    if child:
        note(path, str(child))
    return "parent" if child else "child"


@app.tool(retry=ONCE)
async def forks_on_the_loop(path: str) -> str:
    child = os.fork()
    if child:
        note(path, str(child))
    await asyncio.sleep(0)
    return "parent" if child else "child"


@app.tool(retry=ONCE)
def starts(path: str) -> None:
    """Starts processes that outlast the call."""
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    other = subprocess.Popen(["sleep", "600"])
    note(path, str(child))
    note(path, str(other.pid))


@app.agent("pauses", retry=ONCE)
async def pauses(ctx: AgentContext, seconds: float) -> str:
    time.sleep(seconds)  # the point: a synchronous library in an async function
    return str(ctx.attempt)


def keep_lock(seconds: float) -> int:
    """Keep Python's global lock in one call of C for about so long.

    It computes for a third of that, since a process that computes nothing counts as paused, and then sleeps.
    """
    began = time.process_time()
    sum(range(2_000_000))
    numbers = range(int(2_000_000 * seconds / 3 / (time.process_time() - began)))
    return sum(chain(numbers, map(ctypes.PyDLL(None).usleep, (int(seconds * 2 / 3 * 1e6),))))


@app.agent("keeps_lock")
async def keeps_lock(ctx: AgentContext, seconds: float) -> int:
    await ctx.step(str)
    return keep_lock(seconds)


@app.agent("keeps_lock_in_step", retry=ONCE)
async def keeps_lock_in_step(ctx: AgentContext, seconds: float) -> int:
    return await ctx.step(keep_lock, seconds)


@app.tool
async def keeping_lock(seconds: float) -> int:
    return keep_lock(seconds)


@app.tool
def keeping_lock_in_thread(seconds: float) -> int:
    return keep_lock(seconds)


@app.agent("calls_keeping", retry=ONCE)
async def calls_keeping(ctx: AgentContext, tool: str) -> object:
    return await ctx.tool(tool, seconds=3.0)


@app.agent("emits", retry=ONCE)
async def emits(ctx: AgentContext) -> None:
    """Emits large values endlessly."""
    while True:
        await ctx.emit("x" * 1_000_000)


@app.agent("returns", retry=ONCE)
async def returns(ctx: AgentContext, size: int) -> str:
    return "x" * size
