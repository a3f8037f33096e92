"""`engine_wait_seconds` of a submit reaches the step, and steps of called agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from weft import AgentContext, App, SubmitOptions
from weft.aworld import Runners, Task
from weft.errors import EngineError

app = App("waits")


@app.engine_function
def rank(top: int) -> int:
    return top


@app.agent("ranks")
async def ranks(ctx: AgentContext, engine: str) -> Any:  # Any: JSON
    try:
        return await ctx.engine(engine).call(rank, top=1)
    except EngineError as error:
        return [error.type, error.message]


@app.agent("asks")
async def asks(ctx: AgentContext, engine: str) -> Any:  # Any: JSON
    return await ctx.agent("ranks", engine)


@pytest.mark.parametrize("agent", ["ranks", "asks"])
async def test_with_0_a_step_does_not_wait(agent: str) -> None:
    async with LocalApp(app) as client:
        task = await client.submit(agent, "spark", stream=True, options=SubmitOptions(engine_wait_seconds=0))
        kinds = [event.type async for event in task.stream()]
        kind, message = (await task.result(timeout=60)).output
    assert (kind, message[:17]) == ("EngineUnavailable", "no spark-gateway ")
    assert "weft.output.delta" not in kinds, "it would say that it waits"


async def test_in_one_process_no_wait_is_long() -> None:
    async with LocalApp(app) as client:
        task = await client.submit("ranks", "ray", stream=True)
        told = [event.data for event in [event async for event in task.stream()] if event.type == "weft.output.delta"]
        kind, _ = (await task.result(timeout=60)).output
    assert kind == "EngineUnavailable"
    assert len(told) == 1


@pytest.mark.parametrize(("conf", "told"), [({"engine_wait_seconds": 0}, 0), ({}, 1)])
async def test_a_task_of_runners_passes_its_conf_on(
    conf: dict[str, Any],  # Any: of several kinds
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))

    async def works(ctx: AgentContext, text: str) -> Any:  # Any: JSON
        try:
            return await ctx.engine("ray").call("rank", top=1)
        except EngineError as error:
            return error.type

    task = Task(agent=works, input="x", conf=conf, streaming_mode="chunk")
    events = [event async for event in Runners.streaming_run_task(task)]
    assert sum(event.type == "weft.output.delta" for event in events) == told
    assert events[-1].data["output"] == "EngineUnavailable"
