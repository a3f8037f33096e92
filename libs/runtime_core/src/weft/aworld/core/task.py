"""Tasks and their base runner, where AWorld has them."""

from __future__ import annotations

from runtime_core.integrations.aworld.runner import Runner
from runtime_core.integrations.aworld.task import Task, TaskConfig
from runtime_core.wire.events import TaskResponse

__all__ = ["Runner", "Task", "TaskConfig", "TaskResponse"]
