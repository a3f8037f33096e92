"""Picks the implementations for a spark-gateway."""

from __future__ import annotations

from runtime_core.engines.gateway.gateway import open_gateway
from runtime_core.engines.gateway.served import SPARK
from runtime_core.service import Role
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    return await open_gateway(SPARK, settings, metrics)
