"""Compute steps: local and cluster engines, their settings, results and errors."""

from __future__ import annotations

from runtime_core.engines.function import EngineContext
from runtime_core.engines.local import LocalEngine, engine_named
from runtime_core.engines.protocol import Resources
from runtime_core.engines.results import Reference
from runtime_core.engines.runtime_engine import CallFailed, EngineCall, RunConfig, RuntimeEngine

__all__ = [
    "CallFailed",
    "EngineCall",
    "EngineContext",
    "LocalEngine",
    "Reference",
    "Resources",
    "RunConfig",
    "RuntimeEngine",
    "engine_named",
]
