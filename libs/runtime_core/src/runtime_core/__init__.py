"""Weft's core: what an app and a client import.

A name is loaded when it is first used: a command that only needs the client does not wait for what agents need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime_core.agents.agent import Agent, handles
    from runtime_core.agents.context import AgentContext
    from runtime_core.app import App
    from runtime_core.client import Client, TaskHandle
    from runtime_core.errors import (
        AgentError,
        ConfigurationError,
        EngineError,
        HumanTimeout,
        InvalidInput,
        LocalStepError,
        Reject,
        Rejected,
        Retry,
        ToolError,
        WeftError,
    )
    from runtime_core.policy import RetryPolicy
    from runtime_core.told import StreamEvent, TaskFailed, TaskResponse
    from runtime_core.tools.call import ToolContext

__all__ = [
    "Agent",
    "AgentContext",
    "AgentError",
    "App",
    "Client",
    "ConfigurationError",
    "EngineError",
    "HumanTimeout",
    "InvalidInput",
    "LocalStepError",
    "Reject",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "StreamEvent",
    "TaskFailed",
    "TaskHandle",
    "TaskResponse",
    "ToolContext",
    "ToolError",
    "WeftError",
    "handles",
]

_PLACES = {
    "Agent": "runtime_core.agents.agent",
    "AgentContext": "runtime_core.agents.context",
    "AgentError": "runtime_core.errors",
    "App": "runtime_core.app",
    "Client": "runtime_core.client",
    "ConfigurationError": "runtime_core.errors",
    "EngineError": "runtime_core.errors",
    "HumanTimeout": "runtime_core.errors",
    "InvalidInput": "runtime_core.errors",
    "LocalStepError": "runtime_core.errors",
    "Reject": "runtime_core.errors",
    "Rejected": "runtime_core.errors",
    "Retry": "runtime_core.errors",
    "RetryPolicy": "runtime_core.policy",
    "StreamEvent": "runtime_core.told",
    "TaskFailed": "runtime_core.told",
    "TaskHandle": "runtime_core.client",
    "TaskResponse": "runtime_core.told",
    "ToolContext": "runtime_core.tools.call",
    "ToolError": "runtime_core.errors",
    "WeftError": "runtime_core.errors",
    "handles": "runtime_core.agents.agent",
}
"""Public name → the module that has it."""


def __getattr__(name: str) -> object:
    """Loads a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = found
    return found
