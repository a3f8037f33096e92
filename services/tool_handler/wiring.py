"""Picks the implementations for a tool-handler."""

from __future__ import annotations

from runtime_core.service import Role
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.worker import tool_worker


async def build(settings: Settings, metrics: Metrics) -> Role:
    return await tool_worker(settings, metrics)
