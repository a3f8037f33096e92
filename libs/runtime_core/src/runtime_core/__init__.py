"""Weft's core: what an app and a client import.

A name is loaded when it is first used: a command that only needs the client does not wait for what agents need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.lazy import loader

if TYPE_CHECKING:
    from runtime_core.actors.base_agent import BaseAgent
    from runtime_core.actors.closure import ClosureAgent, ClosureContext
    from runtime_core.actors.context import AgentInstantiationContext, DefaultTopicId, MessageContext
    from runtime_core.actors.errors import (
        CancellationToken,
        CantHandleException,
        MessageDroppedException,
        NotAccessibleError,
        RemoteError,
        RuntimeStopped,
        SerializationError,
        UndeliverableException,
    )
    from runtime_core.actors.identity import AgentId, AgentType, TopicId
    from runtime_core.actors.message import DefaultInterventionHandler, DropMessage, InterventionHandler
    from runtime_core.actors.protocol import AgentProxy
    from runtime_core.actors.routed import RoutedAgent, event, message_handler, rpc
    from runtime_core.actors.runtime import Runtime
    from runtime_core.actors.serialization import MessageSerializer, UnknownPayload
    from runtime_core.actors.subscription import (
        DefaultSubscription,
        Subscription,
        TypePrefixSubscription,
        TypeSubscription,
        default_subscription,
        type_subscription,
    )
    from runtime_core.app.app import App
    from runtime_core.aworld.events.handler import Handler
    from runtime_core.aworld.events.loop import run_events
    from runtime_core.aworld.events.manager import EventManager, HandlerTable
    from runtime_core.aworld.events.message import Message
    from runtime_core.aworld.nodes.node import (
        HandleResult,
        NodeGroup,
        RunNode,
        RunNodeBusiType,
        RunNodeStatus,
        RunNodeTree,
        TransitionRefused,
    )
    from runtime_core.aworld.nodes.state_manager import StateManager
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
    from runtime_core.client.client import Client
    from runtime_core.client.task import TaskHandle
    from runtime_core.declare.hook_points import HookPoint
    from runtime_core.declare.retry_policy import RetryPolicy
    from runtime_core.engines.context import EngineContext
    from runtime_core.engines.local import LocalEngine
    from runtime_core.engines.named import engine_named
    from runtime_core.engines.protocol import Resources
    from runtime_core.engines.reference import Reference
    from runtime_core.engines.runtime_engine import CallFailed, EngineCall, RunConfig, RuntimeEngine
    from runtime_core.errors import (
        AgentError,
        ConfigurationError,
        Denied,
        EngineError,
        HumanTimeout,
        InvalidInput,
        JobCancelled,
        LocalStepError,
        Reject,
        Rejected,
        Retry,
        ToolError,
        WeftError,
    )
    from runtime_core.hooks.declared import CallbackResult, CallbackResultType, ToolResult
    from runtime_core.hooks.verdicts import Allow, Ask, Change, Deny, HookEvent
    from runtime_core.ingress.schedules import Schedule
    from runtime_core.llm.agent import LLMAgent
    from runtime_core.llm.approval import Approve
    from runtime_core.llm.budget import Price
    from runtime_core.llm.failures import ModelFailed
    from runtime_core.llm.window import KeepAll, KeepRecent, Summarise
    from runtime_core.record.usage import Usage
    from runtime_core.runs.agent import Agent, handles
    from runtime_core.runs.calls import Approval
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.model_step import ModelCall
    from runtime_core.runs.observation import ActionModel, ActionResult, Handoff, Observation
    from runtime_core.sharing.context import Context
    from runtime_core.tools.call import ToolContext
    from runtime_core.trajectory.items import (
        DefaultTrajectoryStrategy,
        FilteredTrajectoryStrategy,
        MemoryTrajectoryStrategy,
        TrajectoryItem,
        TrajectoryStrategy,
    )
    from runtime_core.wire.results import StreamEvent, TaskFailed, TaskResponse
    from runtime_core.wire.streaming import StreamingMode

__all__ = [
    "ActionModel",
    "ActionResult",
    "Agent",
    "AgentContext",
    "AgentError",
    "AgentId",
    "AgentInstantiationContext",
    "AgentProxy",
    "AgentType",
    "Allow",
    "App",
    "Approval",
    "Approve",
    "Ask",
    "BaseAgent",
    "CallFailed",
    "CallbackResult",
    "CallbackResultType",
    "CancellationToken",
    "CantHandleException",
    "Change",
    "Client",
    "ClosureAgent",
    "ClosureContext",
    "ConfigurationError",
    "Context",
    "DefaultInterventionHandler",
    "DefaultSubscription",
    "DefaultTopicId",
    "DefaultTrajectoryStrategy",
    "Denied",
    "Deny",
    "DropMessage",
    "EngineCall",
    "EngineContext",
    "EngineError",
    "EventManager",
    "FilteredTrajectoryStrategy",
    "GraphBuildType",
    "HandleResult",
    "Handler",
    "HandlerTable",
    "Handoff",
    "HandoffSwarm",
    "HookEvent",
    "HookPoint",
    "HumanTimeout",
    "HybridSwarm",
    "InterventionHandler",
    "InvalidInput",
    "JobCancelled",
    "KeepAll",
    "KeepRecent",
    "LLMAgent",
    "LocalEngine",
    "LocalStepError",
    "Loopable",
    "MemoryTrajectoryStrategy",
    "Message",
    "MessageContext",
    "MessageDroppedException",
    "MessageSerializer",
    "ModelCall",
    "ModelFailed",
    "NodeGroup",
    "NotAccessibleError",
    "Observation",
    "Price",
    "Reference",
    "Reject",
    "Rejected",
    "RemoteError",
    "Resources",
    "Retry",
    "RetryPolicy",
    "RoutedAgent",
    "RunConfig",
    "RunNode",
    "RunNodeBusiType",
    "RunNodeStatus",
    "RunNodeTree",
    "Runner",
    "Runners",
    "Runtime",
    "RuntimeEngine",
    "RuntimeStopped",
    "Schedule",
    "SerializationError",
    "StateManager",
    "StreamEvent",
    "StreamingMode",
    "Subscription",
    "Summarise",
    "Swarm",
    "Task",
    "TaskConfig",
    "TaskFailed",
    "TaskHandle",
    "TaskResponse",
    "TaskRunner",
    "TaskStatus",
    "TeamSwarm",
    "ToolContext",
    "ToolError",
    "ToolResult",
    "TopicId",
    "TrajectoryItem",
    "TrajectoryStrategy",
    "TransitionRefused",
    "TypePrefixSubscription",
    "TypeSubscription",
    "UndeliverableException",
    "UnknownPayload",
    "Usage",
    "WeftError",
    "WorkflowSwarm",
    "default_subscription",
    "engine_named",
    "event",
    "handles",
    "message_handler",
    "rpc",
    "run_events",
    "type_subscription",
]

_PLACES = {
    "ActionModel": "runtime_core.runs.observation",
    "ActionResult": "runtime_core.runs.observation",
    "Agent": "runtime_core.runs.agent",
    "AgentContext": "runtime_core.runs.context",
    "AgentError": "runtime_core.errors",
    "AgentId": "runtime_core.actors.identity",
    "AgentInstantiationContext": "runtime_core.actors.context",
    "AgentProxy": "runtime_core.actors.protocol",
    "AgentType": "runtime_core.actors.identity",
    "Allow": "runtime_core.hooks.verdicts",
    "App": "runtime_core.app.app",
    "Approval": "runtime_core.runs.calls",
    "Approve": "runtime_core.llm.approval",
    "Ask": "runtime_core.hooks.verdicts",
    "BaseAgent": "runtime_core.actors.base_agent",
    "CallFailed": "runtime_core.engines.runtime_engine",
    "CallbackResult": "runtime_core.hooks.declared",
    "CallbackResultType": "runtime_core.hooks.declared",
    "CancellationToken": "runtime_core.actors.errors",
    "CantHandleException": "runtime_core.actors.errors",
    "Change": "runtime_core.hooks.verdicts",
    "Client": "runtime_core.client.client",
    "ClosureAgent": "runtime_core.actors.closure",
    "ClosureContext": "runtime_core.actors.closure",
    "ConfigurationError": "runtime_core.errors",
    "Context": "runtime_core.sharing.context",
    "DefaultInterventionHandler": "runtime_core.actors.message",
    "DefaultSubscription": "runtime_core.actors.subscription",
    "DefaultTopicId": "runtime_core.actors.context",
    "DefaultTrajectoryStrategy": "runtime_core.trajectory.items",
    "Denied": "runtime_core.errors",
    "Deny": "runtime_core.hooks.verdicts",
    "DropMessage": "runtime_core.actors.message",
    "EngineCall": "runtime_core.engines.runtime_engine",
    "EngineContext": "runtime_core.engines.context",
    "EngineError": "runtime_core.errors",
    "EventManager": "runtime_core.aworld.events.manager",
    "FilteredTrajectoryStrategy": "runtime_core.trajectory.items",
    "GraphBuildType": "runtime_core.aworld.swarm",
    "HandleResult": "runtime_core.aworld.nodes.node",
    "Handler": "runtime_core.aworld.events.handler",
    "HandlerTable": "runtime_core.aworld.events.manager",
    "Handoff": "runtime_core.runs.observation",
    "HandoffSwarm": "runtime_core.aworld.swarm",
    "HookEvent": "runtime_core.hooks.verdicts",
    "HookPoint": "runtime_core.declare.hook_points",
    "HumanTimeout": "runtime_core.errors",
    "HybridSwarm": "runtime_core.aworld.swarm",
    "InterventionHandler": "runtime_core.actors.message",
    "InvalidInput": "runtime_core.errors",
    "JobCancelled": "runtime_core.errors",
    "KeepAll": "runtime_core.llm.window",
    "KeepRecent": "runtime_core.llm.window",
    "LLMAgent": "runtime_core.llm.agent",
    "LocalEngine": "runtime_core.engines.local",
    "LocalStepError": "runtime_core.errors",
    "Loopable": "runtime_core.aworld.swarm",
    "MemoryTrajectoryStrategy": "runtime_core.trajectory.items",
    "Message": "runtime_core.aworld.events.message",
    "MessageContext": "runtime_core.actors.context",
    "MessageDroppedException": "runtime_core.actors.errors",
    "MessageSerializer": "runtime_core.actors.serialization",
    "ModelCall": "runtime_core.runs.model_step",
    "ModelFailed": "runtime_core.llm.failures",
    "NodeGroup": "runtime_core.aworld.nodes.node",
    "NotAccessibleError": "runtime_core.actors.errors",
    "Observation": "runtime_core.runs.observation",
    "Price": "runtime_core.llm.budget",
    "Reference": "runtime_core.engines.reference",
    "Reject": "runtime_core.errors",
    "Rejected": "runtime_core.errors",
    "RemoteError": "runtime_core.actors.errors",
    "Resources": "runtime_core.engines.protocol",
    "Retry": "runtime_core.errors",
    "RetryPolicy": "runtime_core.declare.retry_policy",
    "RoutedAgent": "runtime_core.actors.routed",
    "RunConfig": "runtime_core.engines.runtime_engine",
    "RunNode": "runtime_core.aworld.nodes.node",
    "RunNodeBusiType": "runtime_core.aworld.nodes.node",
    "RunNodeStatus": "runtime_core.aworld.nodes.node",
    "RunNodeTree": "runtime_core.aworld.nodes.node",
    "Runner": "runtime_core.aworld.runner",
    "Runners": "runtime_core.aworld.runners",
    "Runtime": "runtime_core.actors.runtime",
    "RuntimeEngine": "runtime_core.engines.runtime_engine",
    "RuntimeStopped": "runtime_core.actors.errors",
    "Schedule": "runtime_core.ingress.schedules",
    "SerializationError": "runtime_core.actors.errors",
    "StateManager": "runtime_core.aworld.nodes.state_manager",
    "StreamEvent": "runtime_core.wire.results",
    "StreamingMode": "runtime_core.wire.streaming",
    "Subscription": "runtime_core.actors.subscription",
    "Summarise": "runtime_core.llm.window",
    "Swarm": "runtime_core.aworld.swarm",
    "Task": "runtime_core.aworld.task",
    "TaskConfig": "runtime_core.aworld.task",
    "TaskFailed": "runtime_core.wire.results",
    "TaskHandle": "runtime_core.client.task",
    "TaskResponse": "runtime_core.wire.results",
    "TaskRunner": "runtime_core.aworld.runner",
    "TaskStatus": "runtime_core.aworld.task",
    "TeamSwarm": "runtime_core.aworld.swarm",
    "ToolContext": "runtime_core.tools.call",
    "ToolError": "runtime_core.errors",
    "ToolResult": "runtime_core.hooks.declared",
    "TopicId": "runtime_core.actors.identity",
    "TrajectoryItem": "runtime_core.trajectory.items",
    "TrajectoryStrategy": "runtime_core.trajectory.items",
    "TransitionRefused": "runtime_core.aworld.nodes.node",
    "TypePrefixSubscription": "runtime_core.actors.subscription",
    "TypeSubscription": "runtime_core.actors.subscription",
    "UndeliverableException": "runtime_core.actors.errors",
    "UnknownPayload": "runtime_core.actors.serialization",
    "Usage": "runtime_core.record.usage",
    "WeftError": "runtime_core.errors",
    "WorkflowSwarm": "runtime_core.aworld.swarm",
    "default_subscription": "runtime_core.actors.subscription",
    "engine_named": "runtime_core.engines.named",
    "event": "runtime_core.actors.routed",
    "handles": "runtime_core.runs.agent",
    "message_handler": "runtime_core.actors.routed",
    "rpc": "runtime_core.actors.routed",
    "run_events": "runtime_core.aworld.events.loop",
    "type_subscription": "runtime_core.actors.subscription",
}
"""Public name → the module that has it."""

__getattr__ = loader(__name__, _PLACES)
