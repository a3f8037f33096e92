"""The default handlers, one file each. They do their work through the run's context only."""

from __future__ import annotations

from runtime_core.events.handlers.agent import DefaultAgentHandler
from runtime_core.events.handlers.background_task import DefaultBackgroundTaskHandler
from runtime_core.events.handlers.context import DefaultContextHandler
from runtime_core.events.handlers.group import DefaultGroupHandler
from runtime_core.events.handlers.human import DefaultHumanHandler
from runtime_core.events.handlers.memory import DefaultMemoryHandler
from runtime_core.events.handlers.output import DefaultOutputHandler
from runtime_core.events.handlers.task import DefaultTaskHandler
from runtime_core.events.handlers.tool import DefaultToolHandler
from runtime_core.events.handlers.tool_callback import ToolCallbackHandler

__all__ = [
    "DefaultAgentHandler",
    "DefaultBackgroundTaskHandler",
    "DefaultContextHandler",
    "DefaultGroupHandler",
    "DefaultHumanHandler",
    "DefaultMemoryHandler",
    "DefaultOutputHandler",
    "DefaultTaskHandler",
    "DefaultToolHandler",
    "ToolCallbackHandler",
]
