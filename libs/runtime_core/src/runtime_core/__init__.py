"""Weft's core: what an app and a client import.

A name is loaded when it is first used: a command that only needs the client does not wait for what agents need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.lazy import loader

if TYPE_CHECKING:
    from runtime_core.agents.agent import Agent, handles
    from runtime_core.agents.approval import Approval
    from runtime_core.agents.context import AgentContext
    from runtime_core.agents.model_step import ModelCall
    from runtime_core.app import App
    from runtime_core.client import Client
    from runtime_core.context.context import Context
    from runtime_core.engines.context import EngineContext
    from runtime_core.engines.driver.messages import Resources
    from runtime_core.engines.local_engine import LocalEngine
    from runtime_core.engines.named import engine_named
    from runtime_core.engines.reference import Reference
    from runtime_core.engines.run_config import RunConfig
    from runtime_core.engines.runtime_engine import CallFailed, EngineCall, RuntimeEngine
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
    from runtime_core.events.handler import Handler
    from runtime_core.events.loop import run_events
    from runtime_core.events.manager import EventManager
    from runtime_core.events.message import Message
    from runtime_core.events.table import HandlerTable
    from runtime_core.hooks.callbacks import CallbackResult, CallbackResultType, ToolResult
    from runtime_core.hooks.points import HookPoint
    from runtime_core.hooks.verdicts import Allow, Ask, Change, Deny, HookEvent
    from runtime_core.llm.agent import LLMAgent
    from runtime_core.llm.approval import Approve
    from runtime_core.llm.failures import ModelFailed
    from runtime_core.llm.prices import Price
    from runtime_core.llm.window import KeepAll, KeepRecent, Summarise
    from runtime_core.policy import RetryPolicy
    from runtime_core.run_nodes.node import (
        HandleResult,
        NodeGroup,
        RunNode,
        RunNodeBusiType,
        RunNodeStatus,
        RunNodeTree,
    )
    from runtime_core.run_nodes.state_manager import StateManager
    from runtime_core.run_nodes.transitions import TransitionRefused
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
    from runtime_core.runtime.base_agent import BaseAgent
    from runtime_core.runtime.cancellation import CancellationToken
    from runtime_core.runtime.closure import ClosureAgent, ClosureContext
    from runtime_core.runtime.context import AgentInstantiationContext, MessageContext
    from runtime_core.runtime.default_topic import DefaultTopicId
    from runtime_core.runtime.errors import (
        CantHandleException,
        MessageDroppedException,
        NotAccessibleError,
        RemoteError,
        RuntimeStopped,
        SerializationError,
        UndeliverableException,
    )
    from runtime_core.runtime.identity import AgentId, AgentType, TopicId
    from runtime_core.runtime.intervention import DefaultInterventionHandler, DropMessage, InterventionHandler
    from runtime_core.runtime.proxy import AgentProxy
    from runtime_core.runtime.routed import RoutedAgent, event, message_handler, rpc
    from runtime_core.runtime.runtime import Runtime
    from runtime_core.runtime.serialization import MessageSerializer, UnknownPayload
    from runtime_core.runtime.subscription import (
        DefaultSubscription,
        Subscription,
        TypePrefixSubscription,
        TypeSubscription,
        default_subscription,
        type_subscription,
    )
    from runtime_core.schedules.definition import Schedule
    from runtime_core.streaming import StreamingMode
    from runtime_core.task_handle import TaskHandle
    from runtime_core.told import StreamEvent, TaskFailed, TaskResponse
    from runtime_core.tools.call import ToolContext
    from runtime_core.trajectory.items import TrajectoryItem
    from runtime_core.trajectory.strategy import (
        DefaultTrajectoryStrategy,
        FilteredTrajectoryStrategy,
        MemoryTrajectoryStrategy,
        TrajectoryStrategy,
    )
    from runtime_core.usage import Usage

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
    "ActionModel": "runtime_core.runners.values",
    "ActionResult": "runtime_core.runners.values",
    "Agent": "runtime_core.agents.agent",
    "AgentContext": "runtime_core.agents.context",
    "AgentError": "runtime_core.errors",
    "AgentId": "runtime_core.runtime.identity",
    "AgentInstantiationContext": "runtime_core.runtime.context",
    "AgentProxy": "runtime_core.runtime.proxy",
    "AgentType": "runtime_core.runtime.identity",
    "Allow": "runtime_core.hooks.verdicts",
    "App": "runtime_core.app",
    "Approval": "runtime_core.agents.approval",
    "Approve": "runtime_core.llm.approval",
    "Ask": "runtime_core.hooks.verdicts",
    "BaseAgent": "runtime_core.runtime.base_agent",
    "CallFailed": "runtime_core.engines.runtime_engine",
    "CallbackResult": "runtime_core.hooks.callbacks",
    "CallbackResultType": "runtime_core.hooks.callbacks",
    "CancellationToken": "runtime_core.runtime.cancellation",
    "CantHandleException": "runtime_core.runtime.errors",
    "Change": "runtime_core.hooks.verdicts",
    "Client": "runtime_core.client",
    "ClosureAgent": "runtime_core.runtime.closure",
    "ClosureContext": "runtime_core.runtime.closure",
    "ConfigurationError": "runtime_core.errors",
    "Context": "runtime_core.context.context",
    "DefaultInterventionHandler": "runtime_core.runtime.intervention",
    "DefaultSubscription": "runtime_core.runtime.subscription",
    "DefaultTopicId": "runtime_core.runtime.default_topic",
    "DefaultTrajectoryStrategy": "runtime_core.trajectory.strategy",
    "Denied": "runtime_core.errors",
    "Deny": "runtime_core.hooks.verdicts",
    "DropMessage": "runtime_core.runtime.intervention",
    "EngineCall": "runtime_core.engines.runtime_engine",
    "EngineContext": "runtime_core.engines.context",
    "EngineError": "runtime_core.errors",
    "EventManager": "runtime_core.events.manager",
    "FilteredTrajectoryStrategy": "runtime_core.trajectory.strategy",
    "GraphBuildType": "runtime_core.runners.swarm",
    "HandleResult": "runtime_core.run_nodes.node",
    "Handler": "runtime_core.events.handler",
    "HandlerTable": "runtime_core.events.table",
    "Handoff": "runtime_core.runners.values",
    "HandoffSwarm": "runtime_core.runners.swarm",
    "HookEvent": "runtime_core.hooks.verdicts",
    "HookPoint": "runtime_core.hooks.points",
    "HumanTimeout": "runtime_core.errors",
    "HybridSwarm": "runtime_core.runners.swarm",
    "InterventionHandler": "runtime_core.runtime.intervention",
    "InvalidInput": "runtime_core.errors",
    "JobCancelled": "runtime_core.errors",
    "KeepAll": "runtime_core.llm.window",
    "KeepRecent": "runtime_core.llm.window",
    "LLMAgent": "runtime_core.llm.agent",
    "LocalEngine": "runtime_core.engines.local_engine",
    "LocalStepError": "runtime_core.errors",
    "Loopable": "runtime_core.runners.swarm",
    "MemoryTrajectoryStrategy": "runtime_core.trajectory.strategy",
    "Message": "runtime_core.events.message",
    "MessageContext": "runtime_core.runtime.context",
    "MessageDroppedException": "runtime_core.runtime.errors",
    "MessageSerializer": "runtime_core.runtime.serialization",
    "ModelCall": "runtime_core.agents.model_step",
    "ModelFailed": "runtime_core.llm.failures",
    "NodeGroup": "runtime_core.run_nodes.node",
    "NotAccessibleError": "runtime_core.runtime.errors",
    "Observation": "runtime_core.runners.values",
    "Price": "runtime_core.llm.prices",
    "Reference": "runtime_core.engines.reference",
    "Reject": "runtime_core.errors",
    "Rejected": "runtime_core.errors",
    "RemoteError": "runtime_core.runtime.errors",
    "Resources": "runtime_core.engines.driver.messages",
    "Retry": "runtime_core.errors",
    "RetryPolicy": "runtime_core.policy",
    "RoutedAgent": "runtime_core.runtime.routed",
    "RunConfig": "runtime_core.engines.run_config",
    "RunNode": "runtime_core.run_nodes.node",
    "RunNodeBusiType": "runtime_core.run_nodes.node",
    "RunNodeStatus": "runtime_core.run_nodes.node",
    "RunNodeTree": "runtime_core.run_nodes.node",
    "Runner": "runtime_core.runners.runner",
    "Runners": "runtime_core.runners.runners",
    "Runtime": "runtime_core.runtime.runtime",
    "RuntimeEngine": "runtime_core.engines.runtime_engine",
    "RuntimeStopped": "runtime_core.runtime.errors",
    "Schedule": "runtime_core.schedules.definition",
    "SerializationError": "runtime_core.runtime.errors",
    "StateManager": "runtime_core.run_nodes.state_manager",
    "StreamEvent": "runtime_core.told",
    "StreamingMode": "runtime_core.streaming",
    "Subscription": "runtime_core.runtime.subscription",
    "Summarise": "runtime_core.llm.window",
    "Swarm": "runtime_core.runners.swarm",
    "Task": "runtime_core.runners.task",
    "TaskConfig": "runtime_core.runners.task",
    "TaskFailed": "runtime_core.told",
    "TaskHandle": "runtime_core.task_handle",
    "TaskResponse": "runtime_core.told",
    "TaskRunner": "runtime_core.runners.task_runner",
    "TaskStatus": "runtime_core.runners.task",
    "TeamSwarm": "runtime_core.runners.swarm",
    "ToolContext": "runtime_core.tools.call",
    "ToolError": "runtime_core.errors",
    "ToolResult": "runtime_core.hooks.callbacks",
    "TopicId": "runtime_core.runtime.identity",
    "TrajectoryItem": "runtime_core.trajectory.items",
    "TrajectoryStrategy": "runtime_core.trajectory.strategy",
    "TransitionRefused": "runtime_core.run_nodes.transitions",
    "TypePrefixSubscription": "runtime_core.runtime.subscription",
    "TypeSubscription": "runtime_core.runtime.subscription",
    "UndeliverableException": "runtime_core.runtime.errors",
    "UnknownPayload": "runtime_core.runtime.serialization",
    "Usage": "runtime_core.usage",
    "WeftError": "runtime_core.errors",
    "WorkflowSwarm": "runtime_core.runners.swarm",
    "default_subscription": "runtime_core.runtime.subscription",
    "engine_named": "runtime_core.engines.named",
    "event": "runtime_core.runtime.routed",
    "handles": "runtime_core.agents.agent",
    "message_handler": "runtime_core.runtime.routed",
    "rpc": "runtime_core.runtime.routed",
    "run_events": "runtime_core.events.loop",
    "type_subscription": "runtime_core.runtime.subscription",
}
"""Public name → the module that has it."""

__getattr__ = loader(__name__, _PLACES)
