"""How a call of a tool ends: with its result, with its error, later, or not at all where it is not allowed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from runtime_core.calls import tool_handler
from runtime_core.errors import NotReady
from weft import AgentContext, App, RetryPolicy, ToolContext
from weft.errors import ToolError
from weft.testing import LocalApp

app = App("calls")
made: Counter[str] = Counter()


@app.tool
async def search(ctx: ToolContext, query: str) -> str:
    return f"{query} {ctx.idempotency_key.rpartition('/')[2]} {ctx.attempt}"


@app.tool(retry=RetryPolicy(attempts=1))
async def not_ready(ctx: ToolContext) -> int:
    made["not_ready"] += 1
    if made["not_ready"] < 3:
        raise NotReady("its model is loading")
    return ctx.attempt


@app.tool(repeatable=False)
async def not_ready_once(ctx: ToolContext) -> int:
    made["not_ready_once"] += 1
    if made["not_ready_once"] == 1:
        raise NotReady("nothing was done")
    return ctx.attempt


@app.tool(retry=RetryPolicy(attempts=2, base_seconds=0.01))
async def flaky() -> str:
    made["flaky"] += 1
    if made["flaky"] == 1:
        raise OSError("the first time")
    return "the second time"


@app.tool(repeatable=False)
async def pays() -> None:
    made["pays"] += 1
    raise OSError("nobody knows whether it took effect")


@app.tool(retry=RetryPolicy(attempts=1))
async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@app.agent("calls")
async def calls(ctx: AgentContext, tool: str) -> object:
    arguments = {"query": "x"} if tool == "search" else {}
    try:
        return await ctx.tool(tool, **arguments)
    except ToolError as error:
        return [error.type, error.message]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(tool_handler, "NOT_READY_SECONDS", 0.01)


async def output(tool: str) -> object:
    async with LocalApp(app) as client:
        return (await (await client.submit(calls, tool)).result(timeout=60)).value()


async def test_a_tool_knows_its_call() -> None:
    assert await output("search") == "x 1 1"


@pytest.mark.parametrize(("tool", "times"), [("not_ready", 3), ("not_ready_once", 2)])
async def test_a_tool_that_was_not_ready_is_called_again_without_counting(tool: str, times: int) -> None:
    """Even one that may not be repeated: nothing was done."""
    assert await output(tool) == 1
    assert made[tool] == times


async def test_a_failed_tool_is_called_again_as_often_as_it_may() -> None:
    assert await output("flaky") == "the second time"


async def test_a_tool_that_may_not_be_repeated_is_called_once() -> None:
    assert await output("pays") == ["OSError", "nobody knows whether it took effect"]
    assert made["pays"] == 1


async def test_a_tool_that_cancels_itself_fails() -> None:
    assert await output("cancels_itself") == [
        "RuntimeError",
        "tool 'cancels_itself' cancelled its own task, asyncio.current_task()",
    ]


async def test_a_name_that_no_app_has_is_an_error() -> None:
    found = await output("sarch")
    assert isinstance(found, list)
    assert "no tool is named sarch" in found[1]
