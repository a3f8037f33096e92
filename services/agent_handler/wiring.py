"""Picks the implementations for an agent-handler."""

from __future__ import annotations

from runtime_core.config.settings import Settings
from runtime_core.host.agent_handler import agent_worker
from runtime_core.host.service import Role
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    return await agent_worker(settings, metrics)
