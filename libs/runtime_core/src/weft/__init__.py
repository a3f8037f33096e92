"""Weft, a durable runtime for agents: what most apps and clients import.

Submodules hold what fewer programs need:

    weft.errors         every error that Weft raises on purpose
    weft.hooks          the events that hooks get, and what they decide
    weft.llm            conversations with a model: windows, prices, failures
    weft.engines        compute steps, on this machine and on clusters
    weft.trajectory     what tasks did: read, replay, export
    weft.testing        an app in one process, for tests
    weft.hosting        a broker and the services, run by your own program
    weft.runtime        agents as objects: requests, topics, subscriptions
    weft.aworld         tasks, runners, swarms, messages and run nodes by AWorld's names
    weft.autogen        AutoGen programs on Weft; needs the extra `autogen`
    weft.pydantic_ai    inside the tools of a pydantic-ai agent; needs the extra `llm`

`runtime_core` is the implementation behind these names and may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.client.client import Client
    from runtime_core.client.task import TaskHandle
    from runtime_core.declare.declaration import Agent, Limit, RetryPolicy
    from runtime_core.declare.tool import ToolContext
    from runtime_core.errors import Reject, Retry, WeftError
    from runtime_core.llm.agent import Approve, LLMAgent
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.definition import handles
    from runtime_core.runs.effects import Approval
    from runtime_core.runs.shared_context import Context
    from runtime_core.state_manager.schedules import Schedule
    from runtime_core.wire.commands import SubmitOptions
    from runtime_core.wire.events import StreamEvent, StreamingMode, TaskFailed, TaskOutput, TaskResponse

__all__ = [
    "Agent",
    "AgentContext",
    "App",
    "Approval",
    "Approve",
    "Client",
    "Context",
    "LLMAgent",
    "Limit",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "StreamEvent",
    "StreamingMode",
    "SubmitOptions",
    "TaskFailed",
    "TaskHandle",
    "TaskOutput",
    "TaskResponse",
    "ToolContext",
    "WeftError",
    "handles",
]

_PLACES = {
    "Agent": "runtime_core.declare.declaration",
    "AgentContext": "runtime_core.runs.context",
    "App": "runtime_core.app.app",
    "Approval": "runtime_core.runs.effects",
    "Approve": "runtime_core.llm.agent",
    "Client": "runtime_core.client.client",
    "Context": "runtime_core.runs.shared_context",
    "LLMAgent": "runtime_core.llm.agent",
    "Limit": "runtime_core.declare.declaration",
    "Reject": "runtime_core.errors",
    "Retry": "runtime_core.errors",
    "RetryPolicy": "runtime_core.declare.declaration",
    "Schedule": "runtime_core.state_manager.schedules",
    "StreamEvent": "runtime_core.wire.events",
    "StreamingMode": "runtime_core.wire.events",
    "SubmitOptions": "runtime_core.wire.commands",
    "TaskFailed": "runtime_core.wire.events",
    "TaskHandle": "runtime_core.client.task",
    "TaskOutput": "runtime_core.wire.events",
    "TaskResponse": "runtime_core.wire.events",
    "ToolContext": "runtime_core.declare.tool",
    "WeftError": "runtime_core.errors",
    "handles": "runtime_core.runs.definition",
}

_EXTRAS = {"Approve": "llm", "LLMAgent": "llm"}

__getattr__ = loader(__name__, _PLACES, _EXTRAS)
