"""Wires the HTTP gateway."""

from __future__ import annotations

from runtime_core.client.client import Client
from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError
from runtime_core.host.host import Host, service_host
from runtime_core.lazy import needs_extra
from runtime_core.telemetry.metrics import Metrics


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a gateway. Raises ConfigurationError."""
    try:
        from runtime_core.gateway.server import Gateway  # here: the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(needs_extra("the gateway", "gateway", error))) from None
    host = service_host(settings, metrics)
    client = Client.connect(settings.redis_url, namespace=settings.namespace, partitions=settings.partitions)
    host.add_roles(Gateway(settings, client))
    return host
