"""The worker of a tool-handler: its consumers with what they need, for the app that is named or given."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Handler
from runtime_core.host.worker import FINISH_PART, LET_GO_PART, Worker
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.call import AbandonedThreads
from runtime_core.tools.handler import CallHandler

if TYPE_CHECKING:
    from runtime_core.tools.mcp.servers import MCPServers

SERVICE = "tool-handler"
THREADS = 32
"""Plain functions that run at once; async ones are bounded by what is in flight."""


async def tool_worker(settings: Settings, metrics: Metrics, app: App | None = None) -> Worker:
    """A worker that runs tools; None: the app that WEFT_APP names. Raises ConfigurationError."""
    worker = await Worker.open(settings, metrics, service=SERVICE, stream="tool", app=app)
    found = worker.app
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tool")
    abandoned = AbandonedThreads()
    servers: MCPServers | None = None
    if found.mcp_servers:
        from runtime_core.tools.mcp.servers import MCPServers  # here: most apps have none

        servers = MCPServers(found, metrics, settings.pools or ("",))
        worker.at_start(partial(servers.start, worker.announce_now))
        worker.announce_also(servers.announce)
        worker.at_stop(servers.stop)

    def handler(bus: EventBus) -> Handler:
        return CallHandler(bus, found.tools, threads, abandoned, metrics, servers)

    worker.consume(
        handler,
        abandoned=lambda: abandoned.running >= THREADS // 2,
        finish_seconds=FINISH_PART * settings.shutdown_seconds,
        let_go_seconds=LET_GO_PART * settings.shutdown_seconds,
    )
    return worker
