"""The runner of agents and swarms, where AWorld has it."""

from __future__ import annotations

from runtime_core.integrations.aworld.runner import TaskRunner

__all__ = ["TaskRunner"]
