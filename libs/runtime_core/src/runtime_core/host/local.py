"""An app in one process: `async with LocalApp(app) as client` submits tasks to it, and no server is needed.

Agents, tools, journals, retries, timers, mailboxes and schedules work as in the services: the broker is a private
Valkey of this process. `weft:tasks` and `replyto` need the state-manager and do not work here. `trajectory=True`
records the steps of tasks too:

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
from runtime_core.bus.private_server import drop_database, new_database, why_lost
from runtime_core.client.client import Client
from runtime_core.consumer.progress import LoopWatch
from runtime_core.engines.local import ProcessCompute
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError
from runtime_core.host.app_services import add_agents, add_tools, agent_pools, announce_app, pool_streams, tool_pools
from runtime_core.host.host import Host
from runtime_core.host.state_manager import add_housekeeping
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import Redactor, use

if TYPE_CHECKING:
    from runtime_core.runs.ports import RecordedCalls
    from runtime_core.trajectory.reading import TaskTrajectory
    from runtime_core.trajectory.recorder import LocalTrajectories
    from runtime_core.trajectory.store import TrajectoryStore

NAMESPACE = "local"
TOOL_THREADS = 8
ENDS_SECONDS = 30.0
"""How long the exit of a LocalApp waits for task-end hooks."""


class LocalApp:
    """Runs an app until the `async with` block ends; the block's value is a client. Raises ConfigurationError.

    `trajectory` records the steps of tasks: True keeps them until the exit, a store's URL (`sqlite:///path`) or a
    LocalTrajectories keeps them in that store. `engine_processes` worker processes run `ctx.engine("local")`; 0 runs it
    in threads. Async code that blocks the event loop for a second is logged with its agent or tool and its stack; after
    `loop_block_seconds` its attempt ends with BlockedEventLoop.
    """

    def __init__(
        self,
        app: App,
        *,
        trajectory: bool | str | LocalTrajectories = False,
        engine_processes: int = 0,
        loop_block_seconds: float = Settings.loop_block_seconds,
    ) -> None:
        if not loop_block_seconds > 0:
            raise ConfigurationError(f"loop_block_seconds is {loop_block_seconds!r}: pass seconds above 0")
        self._loop_block_seconds = loop_block_seconds
        self._app = app
        self._url = new_database()
        self._client = Client.connect(self._url, namespace=NAMESPACE, partitions=1)
        self._host: Host | None = None
        self.metrics = Metrics(CollectorRegistry(), "local")
        """The metrics of its handlers."""
        self._compute = ProcessCompute(engine_processes) if engine_processes else None
        self._watch: LoopWatch | None = None
        self._trajectories: LocalTrajectories | None = None
        if trajectory and not isinstance(trajectory, bool | str):
            self._trajectories = trajectory
        elif trajectory:
            # Imported here: SQLAlchemy takes half a second to load, and most tests do not need it.
            from runtime_core.trajectory.recorder import LocalTrajectories

            url = trajectory if isinstance(trajectory, str) else None
            self._trajectories = LocalTrajectories(NAMESPACE, url)

    @property
    def app(self) -> App:
        return self._app

    @property
    def client(self) -> Client:
        """The client that `async with` returns."""
        return self._client

    @property
    def trajectories(self) -> TrajectoryStore:
        """The store with the recorded steps. Raises ConfigurationError without `trajectory=True`."""
        return self._recording().store

    async def recorded(self, task: str, timeout: float = 10.0) -> TaskTrajectory:
        """Wait until all steps of an ended task are recorded, and return them. TimeoutError after `timeout` seconds."""
        return await self._recording().recorded(task, timeout)

    def _recording(self) -> LocalTrajectories:
        if self._trajectories is None:
            raise ConfigurationError(
                "this LocalApp does not record trajectories: create it with LocalApp(app, trajectory=True)"
            )
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
        await add_services(
            host,
            self._app,
            compute=self._compute,
            recorded=None if self._trajectories is None else self._trajectories.call_of,
        )
        host.add(start=self._client.open, stop=self._client.close)
        await host.start()
        self._watch = LoopWatch(Settings.lease_seconds, self._loop_block_seconds, interrupts=True)
        self._watch.start(host.beat_beside)
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._host is not None
        if self._watch is not None:
            self._watch.stop()
        if self._app.hooks.of_ends:
            await self._hooks_of_ends()
        try:
            await self._host.stop()
            await self._host.run()  # raises the error of a role that has failed
        finally:
            await self._forget()

    async def _hooks_of_ends(self) -> None:
        """Wait for task-end hooks: no other process can run them."""
        from runtime_core.runs.hooks.around import until_end_hooks_ran

        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_SECONDS):
                assert self._host is not None
                bus = EventBus(await self._host.connect(), Keys(NAMESPACE, 0))
                await until_end_hooks_ran(bus, pool_streams("agent", agent_pools(self._app)), self._app.name)

    async def _forget(self) -> None:
        """Delete this app's data on the private server, unless that has ended."""
        if why_lost():
            return
        transport = await self._connect()
        await drop_database(self._url, transport)
        await transport.close()

    async def _connect(self) -> Transport:
        return await connect(self._url)


async def add_services(
    host: Host, app: App, *, compute: ProcessCompute | None = None, recorded: RecordedCalls | None = None
) -> None:
    """Run the handlers of an app and the housekeeping of its namespace in this host."""
    partitions = [Keys(NAMESPACE, 0)]
    buses = await host.open(partitions)
    await buses[0].load_library()
    results = Results.from_environment(os.environ)
    announce_app(host, app, buses)
    tools = await host.open(partitions)
    add_tools(host, app, tools, tool_pools(app), threads=TOOL_THREADS, await_servers=True)
    add_agents(host, app, buses, agent_pools(app), results=results, compute=compute, recorded=recorded)
    add_housekeeping(host, *await host.open(partitions))
