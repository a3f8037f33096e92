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
    from runtime_core.client import Client
    from runtime_core.errors import Reject, Retry
    from runtime_core.tools.call import ToolContext

__all__ = ["Agent", "AgentContext", "App", "Client", "Reject", "Retry", "ToolContext", "handles"]

_PLACES = {
    "Agent": "runtime_core.agents.agent",
    "AgentContext": "runtime_core.agents.context",
    "App": "runtime_core.app",
    "Client": "runtime_core.client",
    "Reject": "runtime_core.errors",
    "Retry": "runtime_core.errors",
    "ToolContext": "runtime_core.tools.call",
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
