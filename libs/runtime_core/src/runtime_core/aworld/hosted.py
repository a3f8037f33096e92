"""An app's handlers in a process that somebody else has started, as the services' processes run them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from msgspec import Struct
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.aworld.sent import SentApp
from runtime_core.config.settings import Settings
from runtime_core.host.agent_handler import agent_worker
from runtime_core.host.tool_handler import tool_worker
from runtime_core.host.worker import Worker
from runtime_core.telemetry.metrics import Metrics


class HostsWanted(Struct, frozen=True):
    """What is asked of an engine that shall host an app's handlers."""

    app: SentApp
    environ: dict[str, str]
    """The settings of the handlers, as variables."""
    number: int
    """How many processes host them; 0: as many as the engine has CPUs."""
    at_once: int
    """How many tasks are under way at once."""
    here_only: bool
    """Whether the broker answers on this machine only."""


class HostedApp:
    """Runs the agents and the tools of an app, of all its pools, from the streams of a broker."""

    def __init__(self, app: App, settings: Settings, in_flight: int | None = None) -> None:
        """`settings` name the broker; what they say of pools and of the app does not count.

        `in_flight` is how many turns of agents are in hand at most.
        """
        self._app = app
        self._in_flight = in_flight
        self._settings = settings
        self._workers: list[Worker] = []

    async def start(self) -> None:
        """Return when it reads. Raises ConfigurationError in one line."""
        app, settings = self._app, self._settings
        metrics = Metrics(CollectorRegistry(), "task-host")
        own = replace(settings, pools=agent_pools(app))
        self._workers.append(await agent_worker(own, metrics, app, in_flight=self._in_flight))
        self._workers.append(await tool_worker(replace(settings, pools=tool_pools(app)), metrics, app))
        for worker in self._workers:
            await worker.start()

    async def run(self) -> None:
        """Work until `stop`. Raises what ends a handler."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.run())

    async def stop(self) -> None:
        """Finish what is in hand, or hand it back, and let go of the broker."""
        for worker in self._workers:
            await worker.stop()
        self._workers = []


def agent_pools(app: App) -> tuple[str, ...]:
    """The pools of an app's agents, the default one ("") first."""
    return tuple(sorted({"", *(agent.pool for agent in app.agents.values())}))


def tool_pools(app: App) -> tuple[str, ...]:
    """The pools of an app's tools and MCP servers, the default one ("") first."""
    pools = {tool.pool for tool in app.tools.values()} | {server.pool for server in app.mcp_servers.values()}
    return tuple(sorted({"", *pools}))
