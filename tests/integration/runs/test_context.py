"""Wrong arguments of the context's methods and of submits: one clear error that names the argument, and no retry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.host.local import LocalApp
from weft import AgentContext, App

Wrong = Any  # the point: arguments of wrong types

CALLS: dict[str, tuple[Callable[[Wrong], Wrong], str]] = {
    "name of a step": (lambda ctx: ctx.step(lambda: 1, name=3), "name of ctx.step: 3 is not a string"),
    "name of a note": (lambda ctx: ctx.note(3, 1), "name of ctx.note: 3 is not a string"),
    "part of gather": (lambda ctx: ctx.gather(3), "part of ctx.gather: 3 is neither a step nor a coroutine"),
    "list for gather": (lambda ctx: ctx.gather([]), r"part of ctx.gather: [] is neither a step nor a coroutine"),
    "background": (lambda ctx: ctx.background(3), "part of ctx.background: 3 is neither a step nor a coroutine"),
    "wait_for": (lambda ctx: ctx.wait_for(3, 1), "part of ctx.wait_for: 3 is neither a step nor a coroutine"),
    "settings of tools": (lambda ctx: ctx.set_tools_conf(3), "conf of ctx.set_tools_conf: 3 is not an object"),
    "prompt": (lambda ctx: ctx.human(3), "prompt of ctx.human: 3 is not a string: pass other values as data="),
    "long key": (lambda ctx: ctx.send("wrong", key="x" * 5000), f"key of ctx.send: {'x' * 60!r} is not a key"),
    "delay": (lambda ctx: ctx.sleep(math.nan), "delay of ctx.sleep: nan is not a number of seconds"),
}


async def test_a_wrong_argument_of_the_context_ends_the_run_at_once() -> None:
    app, ran = App("wrong"), Counter[str]()

    @app.agent("wrong")
    async def wrong(ctx: AgentContext, which: str) -> None:
        ran[which] += 1
        made = CALLS[which][0](ctx)
        if made is not None:
            await made

    async with LocalApp(app) as client:
        for which, (_, message) in CALLS.items():
            error = (await (await client.submit(wrong, which)).result(timeout=30)).error
            assert error is not None, which
            assert (error["type"], error["message"][: len(message)]) == ("InvalidInput", message)
            assert ran[which] == 1, which


async def test_a_past_delay_is_not_an_error() -> None:
    """As in asyncio: `due - ctx.now()` may be negative after a long wait."""
    app = App("late")

    @app.agent("late")
    async def late(ctx: AgentContext) -> str:
        await ctx.sleep(-1)
        return "done"

    async with LocalApp(app) as client:
        assert (await (await client.submit(late)).result(timeout=30)).output == "done"


@pytest.mark.parametrize("timeout", ["3", -1, math.nan, True])
async def test_a_wrong_time_limit_of_a_submit_is_refused(timeout: Wrong) -> None:
    app = App("limits")

    @app.agent("quick")
    async def quick(ctx: AgentContext) -> None: ...

    async with LocalApp(app) as client:
        with pytest.raises(InvalidInput, match=r"timeout: .* is not a number of seconds of 0 or more, or None"):
            await client.submit(quick, timeout=timeout)
