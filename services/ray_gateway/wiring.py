"""Picks the implementations for a ray-gateway."""

from __future__ import annotations

from runtime_core.clusters.gateway import RAY, open_gateway
from runtime_core.config.settings import Settings
from runtime_core.host.service import Role
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    return await open_gateway(RAY, settings, metrics)
