"""An agent that reports on exported trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft import AgentContext, App

app = App("trajectory-report")


@app.engine_function(timeout_seconds=3600)
def trajectory_report(spark: Any, steps: str, items: str, training: str, min_reward: float) -> dict[str, Any]:
    """The job. Only the process that runs it needs PySpark."""
    from examples.trajectory_report import report

    return dict(report.trajectory_report(spark, steps, items, training, min_reward))


@dataclass
class Wanted:
    """The agent's input: files or folders that the Spark server can read and write."""

    steps: str
    """From `weft trajectory export --format parquet`."""
    items: str
    """From `weft trajectory export --format sar-parquet`."""
    training: str
    """A folder for the training set."""
    min_reward: float = 0.5


@app.agent("reporter")
async def reporter(ctx: AgentContext, wanted: Wanted) -> str:
    """Run the job on Spark, and return the report as text."""
    counted = await ctx.engine("spark").call(
        trajectory_report,
        steps=wanted.steps,
        items=wanted.items,
        training=wanted.training,
        min_reward=wanted.min_reward,
    )
    return in_words(counted)


def in_words(counted: dict[str, Any]) -> str:
    """Return the report as text, one line per row."""
    lines = [f"{one['agent']}: {one['tasks']} tasks, {one['success_rate']:.0%} completed" for one in counted["agents"]]
    lines += [f"{one['tool']}: {one['calls']} calls, {one['success_rate']:.0%} completed" for one in counted["tools"]]
    lines += [f"{one['agent']}: {one['amount']:g} {one['unit']}" for one in counted["tokens"]]
    lines += [
        f"{one['agent']}: {one['repeated']} of {one['items']} items repeat others" for one in counted["duplicates"]
    ]
    lines.append(f"training set: {counted['training']['items']} items in {counted['training']['path']}")
    return "\n".join(lines)
