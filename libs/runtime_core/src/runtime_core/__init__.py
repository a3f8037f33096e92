"""The implementation of Weft, behind the public names of `weft`. Modules may change and move at any time.

The names here are those of `weft`, for programs that import them from this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.app.app import App
    from runtime_core.client.client import Client
    from runtime_core.declare.declaration import Agent
    from runtime_core.declare.tool import ToolContext
    from runtime_core.errors import Reject, Retry
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.definition import handles

__all__ = ["Agent", "AgentContext", "App", "Client", "Reject", "Retry", "ToolContext", "handles"]

_PLACES = {
    "Agent": "runtime_core.declare.declaration",
    "AgentContext": "runtime_core.runs.context",
    "App": "runtime_core.app.app",
    "Client": "runtime_core.client.client",
    "Reject": "runtime_core.errors",
    "Retry": "runtime_core.errors",
    "ToolContext": "runtime_core.declare.tool",
    "handles": "runtime_core.runs.definition",
}

__getattr__ = loader(__name__, _PLACES)
