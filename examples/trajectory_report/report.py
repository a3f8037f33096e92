"""A Spark job over exported trajectories. Spark aggregates all tables and returns only small results."""

from __future__ import annotations

from typing import Any, TypedDict

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SAME = ("agent", "input", "messages", "content", "calls")
"""Items that are equal in these columns are duplicates."""


class Report(TypedDict):
    """Statistics of the exported files."""

    agents: list[dict[str, Any]]
    """Per agent: ended tasks, and the share that completed."""
    tools: list[dict[str, Any]]
    """Per tool: calls, and the share that completed."""
    tokens: list[dict[str, Any]]
    """Tokens per agent and kind, as reported by the model calls."""
    duplicates: list[dict[str, Any]]
    """Per agent: items, and the number of duplicates."""
    training: dict[str, Any]
    """The training set's location and number of items."""


def trajectory_report(spark: SparkSession, steps: str, items: str, training: str, min_reward: float) -> Report:
    """Aggregate `steps` and `items`, and write the training set to the folder `training` as JSON lines.

    The training set has each item with a reward of at least `min_reward`, without duplicates.
    """
    step = spark.read.parquet(steps)
    # Models give each call its own id, which says nothing about the action.
    calls = F.regexp_replace("tool_calls", '"id":"[^"]*",', "").alias("calls")
    item = spark.read.parquet(items).select("*", calls)
    chosen = item.where(F.col("score") >= min_reward).dropDuplicates(list(SAME))
    chosen.drop("calls").write.mode("overwrite").json(training)
    return {
        "agents": _objects(success_of_agents(step)),
        "tools": _objects(success_of_tools(step)),
        "tokens": _objects(tokens(item)),
        "duplicates": _objects(duplicates(item)),
        "training": {"items": spark.read.text(training).count(), "path": training},
    }


def success_of_agents(step: DataFrame) -> DataFrame:
    """Each task counts once, for the agent that it was submitted to."""
    tasks = step.where(F.col("task_status").isNotNull()).select("namespace", "task", "agent", "task_status").distinct()
    return _success(tasks.groupBy("agent"), "task_status", "tasks").orderBy("agent")


def success_of_tools(step: DataFrame) -> DataFrame:
    """A call counts once, however often it was tried: a row is the last of its attempts."""
    calls = step.where(F.col("kind") == "tool").withColumnRenamed("name", "tool")
    return _success(calls.groupBy("tool"), "status", "calls").orderBy("tool")


def tokens(item: DataFrame) -> DataFrame:
    """Sums over all model calls."""
    used = item.select("agent", F.explode("usage").alias("unit", "amount"))
    return used.groupBy("agent", "unit").agg(F.sum("amount").alias("amount")).orderBy("agent", "unit")


def duplicates(item: DataFrame) -> DataFrame:
    """Items that repeat another one in all that is learned from."""
    alike = item.groupBy(*SAME).agg(F.count("*").alias("items"))
    counted = alike.groupBy("agent").agg(F.sum("items").alias("items"), F.sum(F.col("items") - 1).alias("repeated"))
    return counted.orderBy("agent")


def _success(grouped: Any, status: str, counted: str) -> DataFrame:  # Any: PySpark's GroupedData
    completed = F.avg(F.when(F.col(status) == "completed", 1.0).otherwise(0.0))
    return grouped.agg(F.count("*").alias(counted), F.round(completed, 4).alias("success_rate"))


def _objects(table: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in table.collect()]
