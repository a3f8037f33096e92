"""`ctx.engine(...)` in an app of this process: calls, maps, errors, large results, and the engine from `conf`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runtime_core.client.replay import replay_code
from runtime_core.host.local import LocalApp
from runtime_core.runs.engine_calls import INPUTS_STEP
from tests.apps import engines_app
from tests.contracts.engine import functions
from tests.contracts.engine.promises import until
from tests.integration.engines.test_pool import gone, pid_of
from weft import AgentContext, App, Client, Reject, StreamingMode, SubmitOptions
from weft.engines import EngineContext, Reference
from weft.errors import EngineError, InvalidInput

WAIT = 60.0
"""Patience of a test, which decides nothing."""

app = App("steps")


@app.engine_function
def passages(count: int) -> list[str]:
    return [f"passage {number} ü" for number in range(count)]


@app.engine_function(version="1")
def longest(texts: list[str]) -> int:
    return max(map(len, texts))


@app.engine_function
def where(texts: Reference) -> str:
    return texts.url


@app.engine_function
def refuse(how: str) -> None:
    raise Reject(f"not {how}", type="Refused") if how == "reject" else OSError(how)


@app.engine_function
class Model:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __call__(self, text: str) -> int:
        return len(text)


@app.engine_function
def told(ctx: EngineContext) -> dict[str, Any]:  # Any: JSON
    return {"key": ctx.idempotency_key, "run": ctx.run_id, "attempt": ctx.attempt, "deadline": ctx.deadline}


@app.tool
def measure(texts: Reference) -> int:
    return len(texts.load())


def _count(texts: Reference) -> int:
    return len(texts.load())


@app.engine_function
def hold(number: int, folder: str) -> None:
    functions.hold(folder, str(number), "never")


@app.agent("holds")
async def holds(ctx: AgentContext, folder: str) -> None:
    await ctx.engine("local").map(hold, range(100), folder=folder)


@app.agent("large")
async def large(ctx: AgentContext, count: int) -> dict[str, Any]:  # Any: JSON
    engine = ctx.engine("local")
    found = await engine.call(passages, count=count)
    kept = isinstance(found, Reference)
    return {
        "by_reference": kept,
        "longest": await engine.call("longest", texts=found),
        "mapped": await engine.map(longest, [found, found]),
        "where": await engine.call(where, texts=found) if kept else "",
        "read": await ctx.step(_count, found) if kept else len(found),
        "here": len(await asyncio.to_thread(found.load)) if kept else len(found),
        "tool": await ctx.tool(measure, texts=found) if kept else 0,
    }


@app.engine_function
def same(number: int) -> int:
    return number


@app.agent("maps")
async def maps(ctx: AgentContext, count: int) -> list[int]:
    numbers: list[int] = await ctx.engine().map(same, range(count), in_flight=2)
    return numbers


@app.agent("errors")
async def errors(ctx: AgentContext, input: None) -> list[str]:
    engine = ctx.engine("local")
    found = await ctx.gather(
        engine.call(refuse, how="reject"),
        engine.call(refuse, how="now"),
        engine.call(longest, texts=3),
        engine.call(passages, count=200_000),
        engine.map(refuse, ["reject", "now"]),
        return_exceptions=True,
    )
    mapped = await engine.map(refuse, ["reject", "now", 3], return_exceptions=True)
    assert all(isinstance(each, EngineError) for each in [*found, *mapped])
    return [str(each) for each in [*found, *mapped]]


@app.agent("chosen")
async def chosen(ctx: AgentContext, depth: int) -> str:
    if depth:
        answer: str = await ctx.agent(chosen, depth - 1)
        return answer
    return ctx.engine().name


@app.agent("told")
async def agent_told(ctx: AgentContext, input: None) -> list[object]:
    engine = ctx.engine()
    return [await engine.call(told), await engine.map(Model, ["a", "bc"]), await engine.call(Model, text="abc")]


@pytest.fixture(params=[0, 2], ids=["threads", "processes"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with LocalApp(app, engine_processes=request.param) as made:
        yield made


async def answer(client: Client, agent: str, input: object = None, **more: Any) -> Any:  # Any: JSON
    task = await client.submit(agent, input, **more)
    return (await task.result(timeout=WAIT)).value()


async def test_without_a_blob_store_results_are_values(client: Client) -> None:
    found = await answer(client, "large", 1000)
    assert (found["by_reference"], found["longest"], found["read"]) == (False, 13, 1000)
    assert found["mapped"] == [13, 13]


@pytest.mark.parametrize("processes", [0, 1])
async def test_with_a_blob_store_large_results_are_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("WEFT_BLOB_URL", tmp_path.as_uri())
    monkeypatch.setenv("WEFT_RESULT_INLINE_BYTES", "1000")
    async with LocalApp(app, engine_processes=processes) as client:
        small = await answer(client, "large", 10)
        # Past the limit of what an event may carry.
        found = await answer(client, "large", 100_000, task_id="t-large")
    assert small["by_reference"] is False
    assert found["by_reference"] is True
    assert (found["longest"], found["mapped"], found["read"], found["here"]) == (15, [15, 15], 100_000, 100_000)
    assert found["tool"] == 100_000
    assert found["where"].startswith(f"{tmp_path.as_uri()}/weft/t-large/")
    assert len(list((tmp_path / "weft" / "t-large").iterdir())) == 1


async def test_large_inputs_go_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BLOB_URL", tmp_path.as_uri())
    local = LocalApp(engines_app.app, trajectory=True)
    async with local as client:
        assert await answer(client, "large_inputs", "local", task_id="t-in") == engines_app.LARGE_INPUTS
        recorded = await local.recorded("t-in")
    stored = [row for row in recorded.steps if row.name == INPUTS_STEP]
    assert len(stored) == 4
    assert all(len(row.output) < 1000 for row in stored)
    assert all(len(row.input) < 300_000 for row in recorded.steps)
    replayed = await replay_code(recorded, engines_app.app, None)
    assert replayed.runs["r"].status == "completed"


async def test_large_inputs_need_a_blob_store() -> None:
    async with LocalApp(engines_app.app) as client:
        response = await (await client.submit("large_inputs", "local")).result(timeout=WAIT)
    assert response.error is not None
    assert response.error["type"] == "InvalidInput"
    assert response.error["message"].startswith("arguments: are 2,100,004 bytes of JSON, over the limit of 1,048,576")
    assert "set WEFT_BLOB_URL" in response.error["message"]


async def test_each_error_is_one_of_its_step(client: Client) -> None:
    found = await answer(client, "errors")
    assert found[:3] == [
        "Refused: not reject",
        "OSError: now",
        "InvalidInput: arguments.texts: Input should be a valid array, got 3",
    ]
    assert found[3].startswith("ResultTooLarge: result: is 3,888,891 bytes of JSON")
    assert found[4:] == [
        "Refused: item 0: not reject (2 of 2 failed)",
        "Refused: not reject",
        "OSError: now",
        "InvalidInput: arguments.how: Input should be a valid string, got 3",
    ]


async def test_the_engine_comes_from_the_conf_and_passes_to_called_agents(client: Client) -> None:
    assert await answer(client, "chosen", 0) == "local"
    assert await answer(client, "chosen", 2, options=SubmitOptions(engine="ray")) == "ray"
    assert await answer(client, "chosen", 1, options=SubmitOptions(engine="spark")) == "spark"
    with pytest.raises(
        InvalidInput, match=r"data\.conf\.engine: .mars. is not an engine; choose from local, ray, spark"
    ):
        await client.submit("chosen", 0, options=SubmitOptions(engine="mars"))


async def test_a_function_can_read_the_key_and_attempt_of_its_step(client: Client) -> None:
    context, mapped, called = await answer(
        client, "told", task_id="t-told", options=SubmitOptions(timeout_seconds=500.0)
    )
    assert context["key"] == "t-told/r/1"
    assert (context["run"], context["attempt"]) == ("r/1", 1)
    assert (mapped, called) == ([1, 2], 3)
    assert Model.made <= 1


async def test_a_map_reports_progress_to_the_task(client: Client) -> None:
    task = await client.submit("maps", 20, stream=StreamingMode.CHUNK)
    events = [event async for event in task.stream(mode=StreamingMode.CHUNK)]
    assert (await task.result(timeout=WAIT)).value() == list(range(20))
    said = [event.data for event in events if event.data.get("progress")]
    assert said[-1]["value"] == {"done": 20, "failed": 0, "total": 20}
    assert said[-1]["run_id"] == "r/1"


async def test_the_cancel_of_a_task_ends_its_map(tmp_path: Path) -> None:
    async with LocalApp(app, engine_processes=1) as client:
        task = await client.submit("holds", str(tmp_path))
        await until(lambda: functions.count_begun(str(tmp_path)) == 1, "the first item runs")
        await task.cancel()
        await until(lambda: gone(pid_of(str(tmp_path), "0")), "its process is ended")
        assert (await task.result(timeout=WAIT)).status == "cancelled"
    assert functions.count_begun(str(tmp_path)) == 1
