"""Tasks, and the runners and swarms that carry them out, over the same durable runs as every agent.

1. task.py, values.py, swarm.py     what a user gives: values only
2. runner.py, task_runner.py        what carries a task out, in three phases
3. handles.py, tools.py, actions.py what a runner calls: agents and tools as objects, actions as steps
4. orchestration.py                 workflow, handoff, team
5. observing.py, policy.py          agents whose input is an observation; those that are objects with a policy
6. described.py, declared.py        a task as JSON, and the durable agents that run one
7. made.py, place.py, runners.py    where a task runs, and the short way to run it
8. sent.py, hosted.py, ray_place.py whole tasks in other processes, and on Ray
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.lazy import loader

if TYPE_CHECKING:
    from runtime_core.runners.policy import PolicyDefinition
    from runtime_core.runners.runner import Runner
    from runtime_core.runners.runners import Runners
    from runtime_core.runners.swarm import (
        GraphBuildType,
        HandoffSwarm,
        HybridSwarm,
        Loopable,
        Swarm,
        TeamSwarm,
        WorkflowSwarm,
    )
    from runtime_core.runners.task import Task, TaskConfig, TaskStatus
    from runtime_core.runners.task_runner import TaskRunner
    from runtime_core.runners.values import ActionModel, ActionResult, Handoff, Observation
    from runtime_core.streaming import StreamingMode
    from runtime_core.told import TaskResponse

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
    "ActionModel": "runtime_core.runners.values",
    "ActionResult": "runtime_core.runners.values",
    "GraphBuildType": "runtime_core.runners.swarm",
    "Handoff": "runtime_core.runners.values",
    "HandoffSwarm": "runtime_core.runners.swarm",
    "HybridSwarm": "runtime_core.runners.swarm",
    "Loopable": "runtime_core.runners.swarm",
    "Observation": "runtime_core.runners.values",
    "PolicyDefinition": "runtime_core.runners.policy",
    "Runner": "runtime_core.runners.runner",
    "Runners": "runtime_core.runners.runners",
    "StreamingMode": "runtime_core.streaming",
    "Swarm": "runtime_core.runners.swarm",
    "Task": "runtime_core.runners.task",
    "TaskConfig": "runtime_core.runners.task",
    "TaskResponse": "runtime_core.told",
    "TaskRunner": "runtime_core.runners.task_runner",
    "TaskStatus": "runtime_core.runners.task",
    "TeamSwarm": "runtime_core.runners.swarm",
    "WorkflowSwarm": "runtime_core.runners.swarm",
}
"""Public name → the module that has it. Loaded at its first use: a service needs no broker in memory."""

__getattr__ = loader(__name__, _PLACES)
