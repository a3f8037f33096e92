"""An app in one process behaves as with the services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime_core.declare.declaration import Agent
from runtime_core.errors import InvalidInput
from runtime_core.runs.definition import handles
from runtime_core.trajectory.store import TrajectoryStore
from weft import AgentContext, App, ToolContext
from weft.errors import ConfigurationError
from weft.testing import LocalApp

app = App("local")


@app.tool
async def double(ctx: ToolContext, number: int) -> int:
    if ctx.attempt == 1 and number == 3:
        raise ValueError("not at the first attempt")
    return number * 2


@app.tool(pool="far")
def plain(text: str) -> str:
    return text.upper()


@app.agent("worker")
async def worker(ctx: AgentContext, numbers: list[int]) -> dict[str, object]:
    doubled = await ctx.gather(*(ctx.tool(double, number=number) for number in numbers))
    await ctx.emit("half way")
    await ctx.sleep(0.01)
    answer = await ctx.human("go on?", timeout=0.05, default="yes")
    return {"doubled": doubled, "loud": await ctx.tool(plain, text="far"), "answer": answer}


class Counter(Agent):
    """Counts its messages."""

    @handles(int)
    async def on_number(self, number: int, ctx: AgentContext) -> int:
        ctx.state["sum"] = ctx.state.get("sum", 0) + number
        total: int = ctx.state["sum"]
        return total


app.add_agent("counter", Counter)


async def test_a_task_passes_agents_tools_timers_and_retries() -> None:
    async with LocalApp(app) as client:
        task = await client.submit("worker", [1, 2, 3])
        deltas = [event.text async for event in task.stream() if event.type == "weft.output.delta"]
        response = await task.result(timeout=60)
    assert deltas == ["half way"]
    assert response.value() == {"doubled": [2, 4, 6], "loud": "FAR", "answer": "yes"}


async def test_an_instance_handles_one_message_at_a_time_and_in_order() -> None:
    async with LocalApp(app) as client:
        tasks = [await client.submit("counter", number, key="one") for number in range(1, 30)]
        totals = [(await task.result(timeout=60)).value() for task in tasks]
    assert totals == [sum(range(1, number + 1)) for number in range(1, 30)]


async def test_two_runs_of_one_app_are_independent() -> None:
    for _ in range(2):
        async with LocalApp(app) as client:
            assert (await (await client.submit("counter", 5, key="one")).result(timeout=60)).value() == 5


async def test_steps_are_recorded_with_trajectory_enabled() -> None:
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("worker", [1, 2])
        await task.result(timeout=60)
        found = await local.recorded(task.task_id)
        assert [end.task for end in await local.trajectories.tasks("local")] == [task.task_id]
    kinds = sorted(step.kind for step in found.steps)
    assert kinds == ["agent", "emit", "human", "timer", "tool", "tool", "tool"]
    assert found.end is not None
    assert found.end.status == "completed"


async def test_a_store_that_was_named_outlives_the_app(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    for number in (1, 2):
        local = LocalApp(app, trajectory=url)
        async with local as client:
            task = await client.submit("counter", number, key="one", task_id=f"t-{number}")
            await task.result(timeout=60)
            await local.recorded(f"t-{number}")
    store = await TrajectoryStore.open(url)
    assert {end.task for end in await store.tasks("local")} == {"t-1", "t-2"}
    await store.close()


async def test_recording_is_off_by_default_and_the_error_says_so() -> None:
    local = LocalApp(app)
    async with local:
        with pytest.raises(ConfigurationError, match="trajectory=True"):
            _ = local.trajectories


@pytest.mark.parametrize("key", ["two\nlines", "\ud800", "k" * 257, 3])
async def test_an_impossible_key_is_refused_where_it_is_used(key: Any) -> None:  # Any: what a user might give
    own = App("keys")
    own.add_agent("counter", Counter)

    @own.agent("asks")
    async def asks(ctx: AgentContext, nothing: str) -> list[str]:
        said = []
        for attempt in (
            lambda: ctx.agent("counter", 1, key=key),
            lambda: ctx.send("counter", 1, key=key),
            lambda: ctx.publish("numbers", 1, source=key),
        ):
            with pytest.raises(InvalidInput) as refused:
                await attempt()
            said.append(refused.value.field)
        await ctx.agent("counter", 1, key="é 1")
        return said

    async with LocalApp(own) as client:
        response = await (await client.submit("asks", "x")).result(timeout=60)
    assert response.value() == ["key of ctx.agent", "key of ctx.send", "source of ctx.publish"]
