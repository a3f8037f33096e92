"""Picks the implementations for an agent-handler."""

from __future__ import annotations

from runtime_core.agents.turn_handler import TurnHandler
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.consumer import Handler
from runtime_core.consumer.worker import Worker
from runtime_core.service import Role
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    worker = await Worker.open(settings, metrics, service="agent-handler", stream="agent")
    app = worker.app

    def handler(bus: EventBus) -> Handler:
        return TurnHandler(bus, app, metrics, partitions=settings.partitions)

    worker.consume(handler)
    return worker
