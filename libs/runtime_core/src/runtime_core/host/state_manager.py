"""Wires the state-manager."""

from __future__ import annotations

from functools import partial

from runtime_core.bus.namespace import connect, server_info
from runtime_core.config.settings import Settings
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.host.manager import StateManager
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a state-manager. Raises ConfigurationError in one line."""
    limits = {
        "retention": max(1, int(settings.retention_seconds)),
        "dedupe_max": settings.dedupe_max,
        "mailbox_max": settings.mailbox_max,
        "stream_max": settings.stream_max,
        "ready_max": settings.ready_max,
        "record_max": settings.record_max,
        "output_max": settings.output_max_bytes,
        "request_timeout_ms": max(1, int(settings.request_timeout_seconds * 1000)),
    }
    host = service_host(settings, metrics)
    buses = await open_partitions(host, settings, limits, durability=settings.durability)
    for bus in buses:
        await bus.check_durability()
    ingress = await host.connect()
    # A connection follows one key's server at a time: in a Cluster each publisher's stream may live on another one.
    clustered = (await server_info(ingress)).get("redis_mode") == "cluster"
    of_publisher = partial(connect, settings.redis_url or "") if clustered else None
    host.carry(StateManager(buses, ingress, settings, metrics, of_publisher))
    return host
