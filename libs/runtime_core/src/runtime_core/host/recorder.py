"""Wires the trajectory-recorder."""

from __future__ import annotations

from runtime_core.config.settings import Settings
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import TrajectoryStore


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a trajectory-recorder. Raises ConfigurationError."""
    host = service_host(settings, metrics)
    if settings.trajectory_url.startswith("sqlite"):
        settings.make_data_dir()
    buses = await open_partitions(host, settings)
    store = await TrajectoryStore.open(settings.trajectory_url)
    host.add_roles(Recorder(buses, store, metrics, namespace=settings.namespace, lease_seconds=settings.lease_seconds))
    return host
