"""Tasks, runners and swarms by AWorld's names, over the same durable runs as every agent.

`task`, `values`, `swarm` are what a user gives; `runner`, `policy`, `orchestration` carry a task out;
`described` and `declared` make it a durable agent; `task_app`, `place`, `runners`, `ray` say where it runs;
`events` and `nodes` are AWorld's messages and StateManager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.lazy import loader

if TYPE_CHECKING:
    from runtime_core.aworld.runner import Runner, TaskRunner
    from runtime_core.aworld.runners import Runners
    from runtime_core.aworld.swarm import (
        GraphBuildType,
        HandoffSwarm,
        HybridSwarm,
        Loopable,
        Swarm,
        TeamSwarm,
        WorkflowSwarm,
    )
    from runtime_core.aworld.task import Task, TaskConfig, TaskStatus
    from runtime_core.runs.observation import ActionModel, ActionResult, Handoff, Observation
    from runtime_core.runs.policy import PolicyDefinition
    from runtime_core.wire.results import TaskResponse
    from runtime_core.wire.streaming import StreamingMode

__all__ = [
    "ActionModel",
    "ActionResult",
    "GraphBuildType",
    "Handoff",
    "HandoffSwarm",
    "HybridSwarm",
    "Loopable",
    "Observation",
    "PolicyDefinition",
    "Runner",
    "Runners",
    "StreamingMode",
    "Swarm",
    "Task",
    "TaskConfig",
    "TaskResponse",
    "TaskRunner",
    "TaskStatus",
    "TeamSwarm",
    "WorkflowSwarm",
]

_PLACES = {
    "ActionModel": "runtime_core.runs.observation",
    "ActionResult": "runtime_core.runs.observation",
    "GraphBuildType": "runtime_core.aworld.swarm",
    "Handoff": "runtime_core.runs.observation",
    "HandoffSwarm": "runtime_core.aworld.swarm",
    "HybridSwarm": "runtime_core.aworld.swarm",
    "Loopable": "runtime_core.aworld.swarm",
    "Observation": "runtime_core.runs.observation",
    "PolicyDefinition": "runtime_core.runs.policy",
    "Runner": "runtime_core.aworld.runner",
    "Runners": "runtime_core.aworld.runners",
    "StreamingMode": "runtime_core.wire.streaming",
    "Swarm": "runtime_core.aworld.swarm",
    "Task": "runtime_core.aworld.task",
    "TaskConfig": "runtime_core.aworld.task",
    "TaskResponse": "runtime_core.wire.results",
    "TaskRunner": "runtime_core.aworld.runner",
    "TaskStatus": "runtime_core.aworld.task",
    "TeamSwarm": "runtime_core.aworld.swarm",
    "WorkflowSwarm": "runtime_core.aworld.swarm",
}
"""Public name → the module that has it. Loaded at its first use: a service needs no `LocalApp`."""

__getattr__ = loader(__name__, _PLACES)
