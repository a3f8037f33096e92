"""Agents and tools that emit, report or return endlessly: each fails alone."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import pytest

from runtime_core.app.app import App
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.declare.tool import ToolContext
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.runs.context import AgentContext
from runtime_core.runs.model_step import ModelCall
from weft.testing import LocalApp

pytestmark = [pytest.mark.timeout(120)]

MIB = 1024 * 1024
LARGE = "x" * (MIB // 4)


async def failed(app: App, agent: str) -> tuple[str, str]:
    async with LocalApp(app) as client:
        result = await (await client.submit(agent)).result(timeout=60)
    assert result.status == "failed"
    assert result.error is not None
    return result.error["type"], result.error["message"]


async def test_an_endless_emit_ends_its_run_and_lets_others_work() -> None:
    app = App("emits")
    emitted = 0

    @app.agent("endless")
    async def endless(ctx: AgentContext) -> None:
        nonlocal emitted
        while True:
            await ctx.emit(LARGE)
            emitted += 1

    @app.agent("quick")
    async def quick(ctx: AgentContext) -> str:
        await ctx.emit("short")
        return "done"

    tracemalloc.start()
    try:
        async with LocalApp(app) as client:
            runaway = await client.submit("endless")
            assert (await (await client.submit("quick")).result(timeout=60)).output == "done"
            result = await runaway.result(timeout=60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.error is not None
    assert result.error["type"] == "LimitExceeded"
    assert "16,777,216 bytes (WEFT_OUTPUT_MAX_BYTES)" in result.error["message"]
    assert emitted <= 16 * 4 + 8, "it went on after the limit"
    assert peak < 256 * MIB


async def test_many_small_pieces_take_no_more_memory_than_few() -> None:
    app = App("streams")

    @app.agent("streams")
    async def streams(ctx: AgentContext, pieces: int) -> str:
        for _ in range(pieces):
            await ctx.emit("x", chunk=True)
        return "done"

    async def peak_of(pieces: int) -> int:
        async with LocalApp(app) as client:
            tracemalloc.start()
            try:
                assert (await (await client.submit("streams", pieces)).result(timeout=60)).output == "done"
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    few, many = await peak_of(20_000), await peak_of(60_000)
    assert many < few + 4 * MIB


async def test_an_endless_gather_of_emits_is_bounded_too() -> None:
    app = App("gathers")

    @app.agent("endless")
    async def endless(ctx: AgentContext) -> None:
        while True:
            await ctx.gather(*(ctx.emit(LARGE) for _ in range(4)))

    kind, message = await failed(app, "endless")
    assert kind == "LimitExceeded"
    assert "WEFT_OUTPUT_MAX_BYTES" in message


async def test_an_endless_answer_of_a_model_ends_its_run() -> None:
    app = App("streams")

    @app.agent("endless")
    async def endless(ctx: AgentContext) -> None:
        async def model(request: object, call: ModelCall) -> str:
            while True:
                call.stream(LARGE)
                await asyncio.sleep(0)

        await ctx.model("m", "hello", model)

    kind, message = await failed(app, "endless")
    assert kind == "LimitExceeded"
    assert "bytes" in message


async def test_endless_progress_costs_the_call_nothing() -> None:
    app = App("reports")

    @app.tool
    def chatty(ctx: ToolContext) -> str:
        for _ in range(400):
            ctx.progress(LARGE)
        return "done"

    @app.agent("calls")
    async def calls(ctx: AgentContext) -> str:
        answer: str = await ctx.tool("chatty")
        await ctx.emit("the output has room left")
        return answer

    async with LocalApp(app) as client:
        task = await client.submit("calls")
        deltas = [event async for event in task.stream() if event.type == "weft.output.delta"]
        assert (await task.result(timeout=60)).output == "done"
    progress = [delta for delta in deltas if delta.data.get("progress")]
    assert sum(len(json.dumps(delta.data)) for delta in progress) <= 8 * MIB
    assert deltas[-1].data["text"] == "the output has room left"


@pytest.mark.parametrize("where", ["tool", "step", "model", "agent", "output", "send", "state", "error"])
async def test_code_that_returns_64_mib_fails_alone(where: str) -> None:
    app = App("returns")
    huge = "x" * (64 * MIB)

    @app.tool(retry=RetryPolicy(attempts=1))
    async def tool() -> str:
        return huge

    @app.agent("agent")
    async def agent(ctx: AgentContext) -> str:
        return huge

    @app.agent("quick")
    async def quick(ctx: AgentContext) -> str:
        return "done"

    @app.agent("runaway", retry=RetryPolicy(attempts=1))
    async def runaway(ctx: AgentContext) -> object:
        match where:
            case "tool":
                await ctx.tool("tool")
            case "agent":
                await ctx.agent("agent")
            case "step":
                await ctx.step(lambda: huge)
            case "model":
                await ctx.model("m", "hello", lambda request: huge)
            case "send":
                await ctx.send("quick", huge)
            case "state":
                ctx.state["huge"] = huge
            case "error":
                raise ValueError(huge)
        return huge

    async with LocalApp(app) as client:
        task = await client.submit("runaway", key="k")
        result = await task.result(timeout=60)
        assert (await (await client.submit("quick")).result(timeout=60)).output == "done"
    assert result.error is not None
    if where == "error":
        assert result.error["type"] == "ValueError"
    else:
        assert "over the limit of 1,048,576" in result.error["message"]
    assert len(json.dumps(result.error)) < 100_000


async def test_a_large_output_is_kept_once_and_can_be_replayed() -> None:
    app = App("tells")

    @app.agent("tells")
    async def tells(ctx: AgentContext, pieces: int) -> str:
        for number in range(pieces):
            await ctx.emit(f"{number}{LARGE}")
            await ctx.emit(number)
        return "told"

    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("tells", 12, task_id="t-1")
        assert (await task.result(timeout=60)).output == "told"
        trajectory = await local.recorded("t-1")
    (row,) = [step for step in trajectory.steps if step.kind == "emit"]
    assert row.attributes["weft.pieces"] == 24
    assert row.attributes["weft.bytes"] > 3 * MIB
    outputs = json.loads(bytes(row.output))
    assert outputs[1::2] == list(range(len(outputs) // 2)), "the row has the first pieces"
    assert MIB // 2 < len(json.dumps(outputs)) < 2 * MIB
    replayed = await replay(trajectory, "t-1", app)
    assert replayed.run.same, (replayed.run.output, replayed.divergences)
