"""Compute steps: local and cluster engines, their settings, results and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
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

_PLACES = {
    "CallFailed": "runtime_core.engines.runtime_engine",
    "EngineCall": "runtime_core.engines.runtime_engine",
    "EngineContext": "runtime_core.engines.function",
    "LocalEngine": "runtime_core.engines.local",
    "Reference": "runtime_core.engines.results",
    "Resources": "runtime_core.engines.protocol",
    "RunConfig": "runtime_core.engines.runtime_engine",
    "RuntimeEngine": "runtime_core.engines.runtime_engine",
    "engine_named": "runtime_core.engines.local",
}

__getattr__ = loader(__name__, _PLACES)
