"""Values of tasks and agents, where AWorld has them."""

from __future__ import annotations

from runtime_core.integrations.aworld.task import TaskStatus
from runtime_core.runs.policy import ActionModel, ActionResult, Observation
from runtime_core.wire.events import StreamingMode

__all__ = ["ActionModel", "ActionResult", "Observation", "StreamingMode", "TaskStatus"]
