"""Carries the agents of an app, and wires the agent-handler."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Handler
from runtime_core.engines.results import Results
from runtime_core.host.apps import app_host, streams
from runtime_core.host.host import Host
from runtime_core.runs.calls import PROCESS_BYTES, Outflow
from runtime_core.runs.compute import ProcessCompute
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics

SERVICE = "agent-handler"


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire an agent-handler for the app that WEFT_APP names. Raises ConfigurationError."""
    host, app, buses = await app_host(settings, metrics)
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    carry_agents(host, app, buses, settings.pools or ("",), results=Results.of_settings(settings), compute=compute)
    return host


def carry_agents(
    host: Host,
    app: App,
    buses: Sequence[EventBus],
    pools: Sequence[str],
    *,
    results: Results,
    compute: ProcessCompute | None = None,
    in_flight: int | None = None,
) -> None:
    """Run the agents of these pools. `in_flight` is how many turns it takes at once at most; `compute` ends with it."""
    host.add(stop=app.functions.models.close)
    if compute is not None:
        host.add(stop=compute.close)
    outflow = Outflow(PROCESS_BYTES)

    def handler(bus: EventBus) -> Handler:
        return TurnHandler(
            bus,
            app,
            host.metrics,
            partitions=len(buses),
            compute=compute,
            results=results,
            outflow=outflow,
        )

    host.consume(buses, streams("agent", pools), handler, service=SERVICE, in_flight=in_flight)


def agent_pools(app: App) -> tuple[str, ...]:
    """The pools of an app's agents, the default one ("") first."""
    return tuple(sorted({"", *(agent.pool for agent in app.agents.values())}))
