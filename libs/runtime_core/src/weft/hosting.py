"""A broker and the services, started and stopped by your own program."""

from __future__ import annotations

from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.host.stack import SERVICES, child_specs
from runtime_core.host.supervisor import Supervisor
from runtime_core.settings import Settings, without_password
from runtime_core.telemetry.logs import configure as configure_logs
from runtime_core.telemetry.logs import one_line

__all__ = [
    "SERVICES",
    "EmbeddedServer",
    "Settings",
    "Supervisor",
    "child_specs",
    "configure_logs",
    "one_line",
    "without_password",
]
