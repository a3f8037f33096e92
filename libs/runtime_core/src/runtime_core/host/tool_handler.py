"""Carries the tools of an app, and wires the tool-handler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Handler
from runtime_core.errors import WeftError
from runtime_core.host.apps import app_host, streams
from runtime_core.host.host import Host
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.handler import CallHandler
from runtime_core.tools.tool import AbandonedThreads

if TYPE_CHECKING:
    from runtime_core.tools.mcp.servers import MCPServers


SERVICE = "tool-handler"
THREADS = 32
"""Plain functions that run at once; async ones are bounded by what is in flight."""


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a tool-handler for the app that WEFT_APP names. Raises ConfigurationError."""
    host, app, buses = await app_host(settings, metrics)
    abandoned = carry_tools(host, app, buses, settings.pools or ("",))
    host.add(run=partial(end_without_threads, abandoned))
    return host


def carry_tools(
    host: Host,
    app: App,
    buses: Sequence[EventBus],
    pools: Sequence[str],
    *,
    threads: int = THREADS,
    await_servers: bool = False,
) -> AbandonedThreads:
    """Run the tools of these pools; returns what counts the threads that are lost to them.

    `await_servers` makes the start wait until each MCP server was tried once.
    """
    executor, abandoned = ThreadPoolExecutor(threads, thread_name_prefix="tool"), AbandonedThreads()

    async def drop_threads() -> None:
        executor.shutdown(wait=False, cancel_futures=True)

    host.add(stop=drop_threads)
    servers: MCPServers | None = None
    if app.mcp_servers:
        from runtime_core.tools.mcp.servers import MCPServers  # here: most apps have none

        servers = MCPServers(app, host.metrics, pools)
        host.add(start=partial(servers.start, host.announce_now), stop=servers.stop)
        if await_servers:
            host.add(start=servers.tried)
        host.announce(partial(servers.announce, buses))

    def handler(bus: EventBus) -> Handler:
        return CallHandler(bus, app.tools, executor, abandoned, host.metrics, servers)

    host.consume(buses, streams("tool", pools), handler, service=SERVICE)
    return abandoned


async def end_without_threads(abandoned: AbandonedThreads) -> None:
    """Raise WeftError when half of a tool-handler's threads are lost, so that the process is started again."""
    while abandoned.running < THREADS // 2:  # noqa: ASYNC110  # threads end where no event can be set for it
        await asyncio.sleep(1)
    raise WeftError("too many functions passed their limit and still hold threads: ending to be started again")


def tool_pools(app: App) -> tuple[str, ...]:
    """The pools of an app's tools and MCP servers, the default one ("") first."""
    pools = {tool.pool for tool in app.tools.values()} | {server.pool for server in app.mcp_servers.values()}
    return tuple(sorted({"", *pools}))
