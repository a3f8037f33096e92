"""Engines, where and as AWorld names them."""

from __future__ import annotations

from runtime_core.engines.driver.driver import RayEngine as RayRuntime
from runtime_core.engines.driver.driver import SparkEngine as SparkRuntime
from runtime_core.engines.local import LocalEngine as LocalRuntime
from runtime_core.engines.runtime_engine import RuntimeEngine

__all__ = ["LocalRuntime", "RayRuntime", "RuntimeEngine", "SparkRuntime"]
