"""Tasks, runners, swarms, messages, hooks and run nodes, with AWorld's names."""

from __future__ import annotations

from runtime_core.declare.manifest import HookPoint
from runtime_core.integrations.aworld.events.bus import EventBus
from runtime_core.integrations.aworld.events.handlers import (
    DefaultAgentHandler,
    DefaultBackgroundTaskHandler,
    DefaultContextHandler,
    DefaultGroupHandler,
    DefaultHumanHandler,
    DefaultMemoryHandler,
    DefaultOutputHandler,
    DefaultTaskHandler,
    DefaultToolHandler,
    Handler,
    HandlerTable,
    ToolCallbackHandler,
)
from runtime_core.integrations.aworld.events.manager import EventLoop, EventManager, run_events
from runtime_core.integrations.aworld.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    CancelMessage,
    ChunkMessage,
    Constants,
    ContextMessage,
    EventOutcome,
    GroupMessage,
    HandlerError,
    HumanMessage,
    MemoryEventMessage,
    Message,
    Priority,
    Recorded,
    TaskMessage,
    ToolMessage,
    TopicType,
    UnknownReceiver,
)
from runtime_core.integrations.aworld.listeners import Outputs
from runtime_core.integrations.aworld.nodes.state_manager import StateManager
from runtime_core.integrations.aworld.nodes.store import (
    HandleResult,
    NodeGroup,
    RunNode,
    RunNodeBusiType,
    RunNodeStatus,
    RunNodeTree,
    TransitionRefused,
)
from runtime_core.integrations.aworld.orchestration import (
    HandoffSwarm,
    HybridSwarm,
    Swarm,
    TeamSwarm,
    WorkflowSwarm,
)
from runtime_core.integrations.aworld.runner import Runner, TaskRunner
from runtime_core.integrations.aworld.runners import Runners
from runtime_core.integrations.aworld.task import Task, TaskConfig, TaskStatus
from runtime_core.integrations.aworld.topology import GraphBuildType, Loopable
from runtime_core.runs.hooks.declared import CallbackResult, CallbackResultType, ToolResult
from runtime_core.runs.policy import ActionModel, ActionResult, Handoff, Observation
from runtime_core.trajectory.items import (
    DefaultTrajectoryStrategy,
    FilteredTrajectoryStrategy,
    MemoryTrajectoryStrategy,
    TrajectoryItem,
    TrajectoryStrategy,
)

__all__ = [
    "ActionModel",
    "ActionResult",
    "AgentMessage",
    "BackgroundTaskMessage",
    "CallbackResult",
    "CallbackResultType",
    "CancelMessage",
    "ChunkMessage",
    "Constants",
    "ContextMessage",
    "DefaultAgentHandler",
    "DefaultBackgroundTaskHandler",
    "DefaultContextHandler",
    "DefaultGroupHandler",
    "DefaultHumanHandler",
    "DefaultMemoryHandler",
    "DefaultOutputHandler",
    "DefaultTaskHandler",
    "DefaultToolHandler",
    "DefaultTrajectoryStrategy",
    "EventBus",
    "EventLoop",
    "EventManager",
    "EventOutcome",
    "FilteredTrajectoryStrategy",
    "GraphBuildType",
    "GroupMessage",
    "HandleResult",
    "Handler",
    "HandlerError",
    "HandlerTable",
    "Handoff",
    "HandoffSwarm",
    "HookPoint",
    "HumanMessage",
    "HybridSwarm",
    "Loopable",
    "MemoryEventMessage",
    "MemoryTrajectoryStrategy",
    "Message",
    "NodeGroup",
    "Observation",
    "Outputs",
    "Priority",
    "Recorded",
    "RunNode",
    "RunNodeBusiType",
    "RunNodeStatus",
    "RunNodeTree",
    "Runner",
    "Runners",
    "StateManager",
    "Swarm",
    "Task",
    "TaskConfig",
    "TaskMessage",
    "TaskRunner",
    "TaskStatus",
    "TeamSwarm",
    "ToolCallbackHandler",
    "ToolMessage",
    "ToolResult",
    "TopicType",
    "TrajectoryItem",
    "TrajectoryStrategy",
    "TransitionRefused",
    "UnknownReceiver",
    "WorkflowSwarm",
    "run_events",
]
