"""Wires the services that run no app and lead nothing: the trajectory-recorder and the HTTP gateway."""

from __future__ import annotations

from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.lazy import needs_extra
from runtime_core.telemetry.metrics import Metrics


async def build_gateway(settings: Settings, metrics: Metrics) -> Host:
    """Wire a gateway. Raises ConfigurationError."""
    from runtime_core.client.client import Client

    try:
        from runtime_core.gateway.server import Gateway  # here: the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(needs_extra("the gateway", "gateway", error))) from None
    host = service_host(settings, metrics)
    client = Client.connect(settings.redis_url, namespace=settings.namespace, partitions=settings.partitions)
    host.add_roles(Gateway(settings, client))
    return host


async def build_recorder(settings: Settings, metrics: Metrics) -> Host:
    """Wire a trajectory-recorder. Raises ConfigurationError."""
    from runtime_core.trajectory.recorder import Recorder  # here: the gateway needs no database
    from runtime_core.trajectory.store import TrajectoryStore

    host = service_host(settings, metrics)
    if settings.trajectory_url.startswith("sqlite"):
        settings.make_data_dir()
    buses = await open_partitions(host, settings)
    store = await TrajectoryStore.open(settings.trajectory_url)
    host.add_roles(Recorder(buses, store, metrics, namespace=settings.namespace, lease_seconds=settings.lease_seconds))
    return host
