"""An app in one process: `async with LocalApp(app) as client` submits tasks to it, and no server is needed.

Agents, tools, journals, retries, timers, mailboxes and schedules are the same as with the services, since the broker in
memory runs the same functions. What is not here: `weft:tasks` and `replyto`, which are services' work. With
`trajectory=True` the steps of its tasks are recorded too:

    async with (local := LocalApp(app, trajectory=True)) as client:
        task = await client.submit("researcher", "Redis Streams")
        await task.result()
        recorded = await local.recorded(task.task_id)
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.memory.server import MemoryServer, MemoryTransport
from runtime_core.client.client import Client
from runtime_core.consumer.consumer import Consumer
from runtime_core.declare.announcement import announce
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError
from runtime_core.host.worker import ANNOUNCE_SECONDS
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.scheduler import Scheduler
from runtime_core.maintenance.engines import LOOK_SECONDS, EngineWatch
from runtime_core.periodic import Periodic
from runtime_core.runs.compute import ProcessCompute
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import Redactor, use
from runtime_core.tools.call import AbandonedThreads
from runtime_core.tools.handler import CallHandler

if TYPE_CHECKING:
    from runtime_core.tools.mcp.servers import MCPServers
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.recorder import LocalTrajectories
    from runtime_core.trajectory.store import TrajectoryStore

NAMESPACE = "local"
THREADS = 8
ENDS_SECONDS = 30.0
"""How long the end of an app waits for the hooks of its tasks' ends."""


class LocalApp:
    """Runs an app until the `async with` ends, and gives a client of it. Raises ConfigurationError as `app.check()`.

    `trajectory` records what its tasks do: True keeps that until the end, a store's URL (as `sqlite:///path`) for ever.
    `engine_processes` worker processes run `ctx.engine("local")`; with 0 threads of this process do.
    """

    def __init__(self, app: App, *, trajectory: bool | str = False, engine_processes: int = 0) -> None:
        self._app = app
        self._server = MemoryServer()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="local tool")
        self._consumers: list[Consumer] = []
        self._running: list[asyncio.Task[None]] = []
        self._scheduling: asyncio.Task[None] | None = None
        self._announcing: Periodic | None = None
        self._engines: Periodic | None = None
        self._client = MemoryClient(self._server)
        self.metrics = Metrics(CollectorRegistry(), "local")
        """What its handlers count and measure."""
        self._compute = ProcessCompute(engine_processes) if engine_processes else None
        self._mcp: MCPServers | None = None
        self._trajectories: LocalTrajectories | None = None
        if trajectory:
            # Not at the top: the databases take half a second to load, and most tests need none.
            from runtime_core.trajectory.recorder import LocalTrajectories

            self._trajectories = LocalTrajectories(NAMESPACE, trajectory if isinstance(trajectory, str) else None)

    @property
    def app(self) -> App:
        return self._app

    @property
    def client(self) -> Client:
        """What `async with` gives."""
        return self._client

    @property
    def trajectories(self) -> TrajectoryStore:
        """The store in which the tasks' steps are recorded. ConfigurationError without `trajectory=True`."""
        return self._recording().store

    async def recorded(self, task: str, timeout: float = 10.0) -> TaskTrajectory:
        """Wait until an ended task is recorded completely. TimeoutError after `timeout` seconds."""
        return await self._recording().recorded(task, timeout)

    def _recording(self) -> LocalTrajectories:
        if self._trajectories is None:
            raise ConfigurationError("this LocalApp records nothing: make it with LocalApp(app, trajectory=True)")
        return self._trajectories

    async def __aenter__(self) -> Client:
        self._app.check()
        with use(Redactor.from_environment(os.environ, os.environ.get("WEFT_REDACT", ""))):
            return await self._start()

    async def _start(self) -> Client:
        metrics = self.metrics
        turns, calls = self._bus(), self._bus()
        await turns.load_library()
        if self._app.mcp_servers:
            from runtime_core.tools.mcp.servers import MCPServers  # here: most apps have none

            self._mcp = MCPServers(self._app, metrics)
        if self._trajectories is not None:
            await self._trajectories.start(self._bus(), metrics)
        self._consumers = [
            Consumer(
                turns,
                _agent_streams(self._app),
                TurnHandler(
                    turns, self._app, metrics, compute=self._compute, results=Results.from_environment(os.environ)
                ),
                metrics,
                service="agent-handler",
            ),
            Consumer(
                calls,
                _streams("tool", _tool_pools(self._app)),
                CallHandler(calls, self._app.tools, self._threads, AbandonedThreads(), metrics, self._mcp),
                metrics,
                service="tool-handler",
            ),
        ]
        for consumer in self._consumers:
            await consumer.start()
            self._running.append(asyncio.create_task(consumer.run()))
        await announce([turns], self._app.manifest())
        if self._mcp is not None:
            servers = self._mcp
            self._announcing = Periodic("announce", ANNOUNCE_SECONDS, lambda: servers.announce([turns]))
            await servers.start(self._announcing.trigger)
            await servers.tried()
            await servers.announce([turns])
            self._announcing.start()
        watch = EngineWatch(turns, anyone_may_come=False)
        self._engines = Periodic("watch engines", LOOK_SECONDS, watch.look)
        self._engines.start()
        home = self._bus()
        self._scheduling = asyncio.create_task(Scheduler(home, Admission([home])).run(), name="scheduler")
        await self._client.open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._app.hooks.of_ends:
            await self._hooks_of_ends()
        await self._client.close()
        if self._scheduling is not None:
            self._scheduling.cancel()
            await asyncio.wait((self._scheduling,))
        if self._engines is not None:
            await self._engines.stop()
        for consumer in self._consumers:
            await consumer.stop()
        await asyncio.gather(*self._running)
        if self._announcing is not None:
            await self._announcing.stop()
        if self._mcp is not None:
            await self._mcp.stop()
        if self._compute is not None:
            await self._compute.close()
        await self._app.functions.models.close()
        if self._trajectories is not None:
            await self._trajectories.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _hooks_of_ends(self) -> None:
        """Let the hooks of tasks that have ended run: after this process there is nobody who could."""
        from runtime_core.hooks.ended import ends_told

        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_SECONDS):
                await ends_told(self._bus(), _agent_streams(self._app), self._app.name)

    def _bus(self) -> EventBus:
        return EventBus(MemoryTransport(self._server), Keys(NAMESPACE, 0))


class MemoryClient(Client):
    """A client whose connections lead to a broker in this process."""

    def __init__(self, server: MemoryServer, namespace: str = NAMESPACE) -> None:
        super().__init__("memory://", namespace, 1, "")
        self._server = server

    async def _open_transport(self, url: str, like: Transport | None = None) -> Transport:
        transport = MemoryTransport(self._server)
        self._transports.append(transport)
        return transport


def _agent_streams(app: App) -> list[str]:
    return _streams("agent", {agent.pool for agent in app.agents.values()})


def _tool_pools(app: App) -> set[str]:
    return {tool.pool for tool in app.tools.values()} | {server.pool for server in app.mcp_servers.values()}


def _streams(kind: str, pools: set[str]) -> list[str]:
    return [f"{kind}:{pool}" if pool else kind for pool in sorted(pools | {""})]
