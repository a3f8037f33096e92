"""What hosts that run an app have in common: they load it, read its streams and announce it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.bus.event_bus import EventBus
from runtime_core.config.settings import Settings
from runtime_core.declare.announcement import announce
from runtime_core.errors import ConfigurationError
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.telemetry.metrics import Metrics


async def app_host(settings: Settings, metrics: Metrics) -> tuple[Host, App, list[EventBus]]:
    """Load the app that WEFT_APP names, and make a host that announces it. Raises ConfigurationError in one line."""
    if settings.app is None:
        raise ConfigurationError("WEFT_APP is not set: name your app, as in WEFT_APP=package.module:app")
    try:
        app = load_app(settings.app)
    except ConfigurationError as error:
        raise ConfigurationError(f"WEFT_APP: {error}") from error
    host = service_host(settings, metrics)
    buses = await open_partitions(host, settings)
    announce_app(host, app, buses)
    return host, app, buses


def announce_app(host: Host, app: App, buses: Sequence[EventBus]) -> None:
    """Publish what an app offers."""
    host.announce(lambda: announce(buses, app.manifest()))


def streams(name: str, pools: Sequence[str]) -> list[str]:
    """The work streams of these pools; "" is the default one."""
    return [f"{name}:{pool}" if pool else name for pool in pools]
