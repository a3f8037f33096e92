"""The report of the examples, over trajectories of real tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.trajectory_report.app import in_words
from runtime_core.engines.driver.driver import Driver
from runtime_core.engines.protocol import Registered, Value, Work
from runtime_core.host.local import LocalApp
from runtime_core.trajectory.export import export_items_parquet, export_parquet, trajectory_items
from runtime_core.trajectory.items import TrajectoryItem
from tests.conftest import ROOT
from weft import AgentContext, App, RetryPolicy

# The first of them starts a JVM, which takes minutes on a machine that is busy enough.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

app = App("asked")


@app.tool(retry=RetryPolicy(attempts=1))
def divide(by: int) -> float:
    return 12 / by


async def answer(messages: list[dict[str, str]]) -> dict[str, Any]:
    """Stands in for a model."""
    return {"content": messages[-1]["content"], "usage": {"input_tokens": 10, "output_tokens": 2}}


@app.agent("asker")
async def asker(ctx: AgentContext, by: int) -> float:
    await ctx.step(answer, messages=[{"role": "user", "content": f"12 by {by}"}])
    quotient: float = await ctx.tool(divide, by=by)
    return quotient


@app.agent("idler")
async def idler(ctx: AgentContext, text: str) -> str:
    return text


async def reward(item: TrajectoryItem, end: Any) -> float:
    return (
        1.0 if item.reward.status == "completed" and item.meta.agent == "asker" and end.status == "completed" else 0.0
    )


async def test_it_counts_the_work_of_tasks(spark_driver: Driver, tmp_path: Path) -> None:
    local = LocalApp(app, trajectory=True)
    async with local as client:
        tasks = [await client.submit("asker", by) for by in (3, 4, 3, 0)] + [await client.submit("idler", "ü")]
        for task in tasks:
            await task.result(timeout=60)
            await local.recorded(task.task_id)
        await export_parquet(local.trajectories, "local", tmp_path / "steps.parquet")
        items = trajectory_items(local.trajectories, "local", reward=reward)
        assert await export_items_parquet(tmp_path / "items.parquet", items) == 5
    arguments = {
        "steps": str(tmp_path / "steps.parquet"),
        "items": str(tmp_path / "items.parquet"),
        "training": str(tmp_path / "training"),
        "min_reward": 0.5,
    }
    call = Registered(
        "examples.trajectory_report.app:app", str(ROOT), "trajectory_report", json.dumps(arguments).encode()
    )
    outcome = await spark_driver.run(Work(call, "trajectory_report", driver_side=True))
    assert isinstance(outcome, Value), outcome
    counted = json.loads(outcome.data)
    assert counted == {
        "agents": [
            {"agent": "asker", "tasks": 4, "success_rate": 0.75},
            {"agent": "idler", "tasks": 1, "success_rate": 1.0},
        ],
        "tools": [{"tool": "divide", "calls": 4, "success_rate": 0.75}],
        "tokens": [
            {"agent": "asker", "unit": "input_tokens", "amount": 40.0},
            {"agent": "asker", "unit": "output_tokens", "amount": 8.0},
        ],
        "duplicates": [
            {"agent": "asker", "items": 4, "repeated": 1},
            {"agent": "idler", "items": 1, "repeated": 0},
        ],
        "training": {"items": 2, "path": str(tmp_path / "training")},
    }
    lines = [
        json.loads(line) for part in (tmp_path / "training").glob("*.json") for line in part.read_text().splitlines()
    ]
    assert sorted(json.loads(line["input"]) for line in lines) == [3, 4]
    assert in_words(counted).splitlines()[0] == "asker: 4 tasks, 75% completed"
