"""Picks the implementations for a trajectory-recorder."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError
from runtime_core.host.service import Role
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import TrajectoryStore


async def build(settings: Settings, metrics: Metrics) -> Role:
    if settings.redis_url is None:
        raise ConfigurationError("WEFT_REDIS_URL is not set: name a broker, or use `weft up`, which starts one")
    if settings.trajectory_url.startswith("sqlite"):
        settings.make_data_dir()
    buses = []
    for number in range(settings.partitions):
        transport = await connect(settings.redis_url)
        keys = await open_namespace(transport, settings.namespace, settings.partitions)
        buses.append(EventBus(transport, keys[number]))
    store = await TrajectoryStore.open(settings.trajectory_url)
    return Recorder(buses, store, metrics, namespace=settings.namespace, lease_seconds=settings.lease_seconds)
