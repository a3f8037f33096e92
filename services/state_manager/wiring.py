"""Picks the implementations for a state-manager."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace, server_info
from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError
from runtime_core.host.service import Role
from runtime_core.telemetry.metrics import Metrics
from services.state_manager.manager import StateManager


async def build(settings: Settings, metrics: Metrics) -> Role:
    if settings.redis_url is None:
        raise ConfigurationError("WEFT_REDIS_URL is not set: name a broker, or use `weft up`, which starts one")
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
    transports = [await connect(settings.redis_url) for _ in range(settings.partitions)]
    buses = []
    for transport, number in zip(transports, range(settings.partitions), strict=True):
        keys = await open_namespace(transport, settings.namespace, settings.partitions, limits)
        bus = EventBus(transport, keys[number], durability=settings.durability)
        await bus.check_durability()
        buses.append(bus)
    ingress = await connect(settings.redis_url)
    url = settings.redis_url
    # A connection follows one key's server at a time: in a Cluster each publisher's stream may live on another one.
    clustered = (await server_info(ingress)).get("redis_mode") == "cluster"
    return StateManager(buses, ingress, settings, metrics, (lambda: connect(url)) if clustered else None)
