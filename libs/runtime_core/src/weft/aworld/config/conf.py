"""Settings, where AWorld has them."""

from __future__ import annotations

from runtime_core.engines.runtime_engine import RunConfig
from runtime_core.integrations.aworld.task import TaskConfig

__all__ = ["RunConfig", "TaskConfig"]
