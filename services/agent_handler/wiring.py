"""Picks the implementations for an agent-handler."""

from __future__ import annotations

from runtime_core.agents.turn_handler import TurnHandler
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.consumer import Handler
from runtime_core.consumer.worker import Worker
from runtime_core.engines.compute import ProcessCompute
from runtime_core.engines.results import Results
from runtime_core.service import Role
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Role:
    worker = await Worker.open(settings, metrics, service="agent-handler", stream="agent")
    app = worker.app

    worker.at_stop(app.functions.models.close)
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    results = Results.of_settings(settings)
    if compute is not None:
        worker.at_stop(compute.close)

    def handler(bus: EventBus) -> Handler:
        return TurnHandler(bus, app, metrics, partitions=settings.partitions, compute=compute, results=results)

    worker.consume(handler)
    return worker
