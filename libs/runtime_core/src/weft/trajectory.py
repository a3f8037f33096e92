"""Recorded tasks: read, replay, check and export them."""

from __future__ import annotations

from runtime_core.client.replay import Check, Difference, check
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.trajectory.export import (
    export_items_jsonl,
    export_items_parquet,
    export_jsonl,
    export_parquet,
    trajectory_items,
)
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.trajectory.tree import render

__all__ = [
    "Check",
    "Difference",
    "TaskTrajectory",
    "TrajectoryStore",
    "check",
    "export_items_jsonl",
    "export_items_parquet",
    "export_jsonl",
    "export_parquet",
    "render",
    "replay",
    "trajectory_items",
]
