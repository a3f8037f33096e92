"""An app in one process: `async with LocalApp(app) as client` submits tasks to it, and no server is needed.

Agents, tools, journals, retries, timers, mailboxes and schedules are the same as with the services: the broker is a
Valkey that belongs to this process. What is not here: `weft:tasks` and `replyto`, which are services' work. With
`trajectory=True` the steps of its tasks are recorded too:

    async with (local := LocalApp(app, trajectory=True)) as client:
        task = await client.submit("researcher", "Redis Streams")
        await task.result()
        recorded = await local.recorded(task.task_id)
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect
from runtime_core.bus.private_server import drop_database, new_database
from runtime_core.client.client import Client
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError
from runtime_core.host.agent_handler import agent_pools, carry_agents
from runtime_core.host.apps import announce_app, streams
from runtime_core.host.host import Host
from runtime_core.host.manager import carry_small_services
from runtime_core.host.tool_handler import carry_tools, tool_pools
from runtime_core.runs.compute import ProcessCompute
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import Redactor, use

if TYPE_CHECKING:
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
        self._url = new_database()
        self._client = Client.connect(self._url, namespace=NAMESPACE, partitions=1)
        self._host: Host | None = None
        self.metrics = Metrics(CollectorRegistry(), "local")
        """What its handlers count and measure."""
        self._compute = ProcessCompute(engine_processes) if engine_processes else None
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
            try:
                return await self._start()
            except BaseException:
                if self._host is not None:
                    await self._host.stop()
                    await self._forget()
                raise

    async def _start(self) -> Client:
        host = self._host = Host(self._connect, self.metrics)
        partitions = [Keys(NAMESPACE, 0)]
        if self._trajectories is not None:
            [recorded] = await host.open(partitions)
            host.add(start=partial(self._trajectories.start, recorded, self.metrics), stop=self._trajectories.stop)
        buses = await host.open(partitions)
        await buses[0].load_library()
        results = Results.from_environment(os.environ)
        announce_app(host, self._app, buses)
        carry_tools(
            host, self._app, await host.open(partitions), tool_pools(self._app), threads=THREADS, await_servers=True
        )
        carry_agents(host, self._app, buses, agent_pools(self._app), results=results, compute=self._compute)
        carry_small_services(host, *await host.open(partitions))
        host.add(start=self._client.open, stop=self._client.close)
        await host.start()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._host is not None
        if self._app.hooks.of_ends:
            await self._hooks_of_ends()
        try:
            await self._host.stop()
            await self._host.run()  # raises what has ended a role
        finally:
            await self._forget()

    async def _hooks_of_ends(self) -> None:
        """Let the hooks of tasks that have ended run: after this process there is nobody who could."""
        from runtime_core.hooks.ended import ends_told

        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_SECONDS):
                assert self._host is not None
                bus = EventBus(await self._host.connect(), Keys(NAMESPACE, 0))
                await ends_told(bus, streams("agent", agent_pools(self._app)), self._app.name)

    async def _forget(self) -> None:
        """Delete what this app has on the private server."""
        transport = await self._connect()
        await drop_database(self._url, transport)
        await transport.close()

    async def _connect(self) -> Transport:
        return await connect(self._url)
