"""An app's agents and tools, of all its pools, in a process that somebody else has started."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.config.settings import Settings
from runtime_core.engines.results import Results
from runtime_core.host.agent_handler import agent_pools, carry_agents
from runtime_core.host.apps import announce_app
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.host.tool_handler import carry_tools, end_without_threads, tool_pools
from runtime_core.runs.compute import ProcessCompute
from runtime_core.telemetry.metrics import Metrics


async def build(app: App, settings: Settings, in_flight: int | None = None) -> Host:
    """Wire a host of whole tasks. `settings` name the broker; their app and pools do not count.

    `in_flight` is how many turns of agents are in hand at most. Raises ConfigurationError in one line.
    """
    host = service_host(settings, Metrics(CollectorRegistry(), "task-host"))
    buses = await open_partitions(host, settings)
    announce_app(host, app, buses)
    abandoned = carry_tools(host, app, await open_partitions(host, settings), tool_pools(app))
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    results = Results.of_settings(settings)
    carry_agents(host, app, buses, agent_pools(app), results=results, compute=compute, in_flight=in_flight)
    host.add(run=lambda: end_without_threads(abandoned))
    return host
