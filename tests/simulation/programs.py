"""The app that is simulated: one small interpreter as several agents, and what a task may ask of it.

A program is a list of operations, JSON, such as `[["charge"], ["ask", "beta", "k", [["count"]]]]`.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import StepError
from runtime_core.runs.context import AgentContext
from runtime_core.tools.tool import ToolContext
from tests.simulation.chooser import Chooser, pick, weighted
from tests.simulation.ledger import Ledger
from weft import App

Op = list[Any]  # Any: JSON
Program = list[Op]

KEYED = ("alpha", "beta")
KEYS = ("k", "l")
RETRY = RetryPolicy(attempts=3, base_seconds=0.1, factor=2.0)


LEDGER: ContextVar[Ledger] = ContextVar("LEDGER")
"""The ledger of the history that runs."""


@cache
def simulated_app() -> App:
    """The app of all histories: it takes longer to declare than a short history to run."""
    app = App("simulated")

    async def play(ctx: AgentContext, program: list[Any]) -> int:
        ledger = LEDGER.get()
        for op in program:
            await perform(ctx, op, ledger)
        return len(program)

    app.agent("free", retry=RETRY)(_named(play))
    for name in KEYED:
        app.agent(name, retry=RETRY)(_named(play))

    @app.tool(retry=RETRY)
    async def work(ctx: ToolContext, seconds: float, fails: int) -> int:
        attempt = LEDGER.get().call_begins(ctx.task_id, ctx.run_id)
        if seconds:
            await asyncio.sleep(seconds)
        if attempt <= fails:
            raise RuntimeError(f"attempt {attempt} fails")
        return attempt

    @app.tool(repeatable=False)
    async def once(ctx: ToolContext, seconds: float) -> int:
        LEDGER.get().once_begins(ctx.task_id, ctx.run_id)
        if seconds:
            await asyncio.sleep(seconds)
        return 1

    app.check()
    return app


def _named(play: Any) -> Any:  # Any: an agent's function
    async def played(ctx: AgentContext, program: list[Any]) -> int:
        return int(await play(ctx, program))

    return played


async def perform(ctx: AgentContext, op: Op, ledger: Ledger) -> None:
    """Do one operation of a program."""
    match op:
        case ["charge", seconds]:
            holder: list[str] = []
            step = ctx.step(functools.partial(_charge, ctx, ledger, seconds, holder), name="charge")
            holder.append(step.id)
            await step
            ledger.step_is_stored(ctx.task_id, ctx.run_id, step.id)
        case ["tool", seconds, fails]:
            await ctx.tool("work", seconds=seconds, fails=fails)
        case ["try", seconds, fails]:
            with suppress(StepError):
                await ctx.tool("work", seconds=seconds, fails=fails)
        case ["once", seconds]:
            with suppress(StepError):
                await ctx.tool("once", seconds=seconds)
        case ["ask", agent, key, program]:
            await ctx.agent(agent, program, key=key)
        case ["gather", programs]:
            await ctx.gather(*(_branch(ctx, program, ledger) for program in programs))
        case ["send", agent, key, program]:
            await ctx.send(agent, program, key=key)
        case ["emit"]:
            await ctx.emit("said")
        case ["sleep", seconds]:
            await ctx.sleep(seconds)
        case ["human", seconds]:
            await ctx.human("well?", timeout=seconds, default="nobody")
        case ["count"]:
            ctx.state.setdefault("log", []).append(f"{ctx.task_id}/{ctx.run_id}")
        case ["flaky", attempts]:
            if ctx.attempt <= attempts:
                raise RuntimeError("an attempt of the agent fails")
        case _:
            raise AssertionError(op)


async def _branch(ctx: AgentContext, program: Program, ledger: Ledger) -> None:
    for op in program:
        await perform(ctx, op, ledger)


async def _charge(ctx: AgentContext, ledger: Ledger, seconds: float, holder: list[str]) -> int:
    ledger.step_begins(ctx.task_id, ctx.run_id, holder[0])
    if seconds:
        await asyncio.sleep(seconds)
    ledger.step_ends(ctx.task_id, ctx.run_id, holder[0])
    return 1


def draw_program(chooser: Chooser, *, agent: str, depth: int = 0) -> Program:
    """A program for an agent, by the chooser."""
    program: Program = [_draw_op(chooser, depth) for _ in range(1 + chooser.choose(3 if depth else 4))]
    if agent in KEYED:
        program.insert(chooser.choose(len(program) + 1), ["count"])
    return program


def _draw_op(chooser: Chooser, depth: int) -> Op:
    kind = weighted(
        chooser,
        [
            (8, "charge"), (4, "tool"), (4, "long"), (6, "ask" if depth < 2 else "emit"), (2, "once"), (2, "emit"),
            (1, "sleep"), (2, "gather" if depth < 2 else "charge"), (1, "send" if depth < 2 else "emit"), (1, "human"),
            (1, "flaky"), (1, "try"), (1, "broken"),
        ],
    )  # fmt: skip
    match kind:
        case "charge":
            return ["charge", 0]
        case "long":
            return ["charge", pick(chooser, (0.3, 1.0, 1.0, 4.0))]
        case "tool":
            return ["tool", pick(chooser, (0, 0.2, 1.0)), pick(chooser, (0, 0, 0, 1))]
        case "try":
            return ["try", 0, pick(chooser, (3, 1))]
        case "broken":
            return ["tool", 0, 3]
        case "once":
            return ["once", pick(chooser, (0, 0.5, 2.0))]
        case "ask" | "send":
            agent = pick(chooser, ("beta", "alpha", "free"))
            key = pick(chooser, KEYS) if agent in KEYED else ""
            return [kind, agent, key, draw_program(chooser, agent=agent, depth=depth + 1)]
        case "gather":
            branches = [[_draw_op(chooser, 2)] for _ in range(2 + chooser.choose(2))]
            return ["gather", branches]
        case "sleep":
            return ["sleep", pick(chooser, (0.1, 1.0))]
        case "human":
            return ["human", pick(chooser, (1.0, 3.0))]
        case "flaky":
            return ["flaky", pick(chooser, (1, 2))]
        case _:
            return [kind]
