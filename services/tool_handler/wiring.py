"""Picks the implementations for a tool-handler."""

from __future__ import annotations

from runtime_core.config.settings import Settings
from runtime_core.host.service import Role
from runtime_core.host.tool_handler import tool_worker
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    return await tool_worker(settings, metrics)
