"""Recorded tasks: read, replay, check and export them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
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

_PLACES = {
    "Check": "runtime_core.client.replay",
    "Difference": "runtime_core.client.replay",
    "TaskTrajectory": "runtime_core.trajectory.reading",
    "TrajectoryStore": "runtime_core.trajectory.store",
    "check": "runtime_core.client.replay",
    "export_items_jsonl": "runtime_core.trajectory.export",
    "export_items_parquet": "runtime_core.trajectory.export",
    "export_jsonl": "runtime_core.trajectory.export",
    "export_parquet": "runtime_core.trajectory.export",
    "render": "runtime_core.trajectory.tree",
    "replay": "runtime_core.integrations.aworld.events.replay",
    "trajectory_items": "runtime_core.trajectory.export",
}

__getattr__ = loader(__name__, _PLACES)
