"""Settings, where AWorld has them."""

from __future__ import annotations

from runtime_core.aworld.task import TaskConfig
from runtime_core.engines.runtime_engine import RunConfig

__all__ = ["RunConfig", "TaskConfig"]
