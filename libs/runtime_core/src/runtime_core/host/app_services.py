"""Wires the services that run an app: agent-handler, tool-handler, gateways, and a host for whole tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.bus.event_bus import EventBus
from runtime_core.calls.engine_gateway import RAY, SPARK, EngineGateway, ServedEngine, StepHandler
from runtime_core.calls.tool_handler import CallHandler
from runtime_core.consumer.announcements import announce, announce_served
from runtime_core.consumer.in_flight import DeliveryHandler
from runtime_core.declare.declaration import check_shares
from runtime_core.declare.mcp_server import need_sdk
from runtime_core.declare.tool import AbandonedThreads
from runtime_core.engines.local import ProcessCompute
from runtime_core.engines.results import Results
from runtime_core.errors import BusError, ConfigurationError, WeftError
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.runs.output import Outflow, OutputLimits
from runtime_core.runs.ports import Workplace
from runtime_core.runs.turn import TurnHandler
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from runtime_core.calls.mcp.servers import MCPServers
    from runtime_core.runs.ports import RecordedCalls

logger = logging.getLogger(__name__)

AGENT_HANDLER = "agent-handler"
TOOL_HANDLER = "tool-handler"
TOOL_THREADS = 32
"""Plain functions that run at once. Async functions are limited by the deliveries in flight."""
RECORDED_SECONDS = 3.0
"""How long an error waits for the recorded step that it names."""
GATEWAY_FINISH_SHARE = 0.3
"""Share of the shutdown time in which steps may finish; the rest is for handing back and for the driver."""


async def app_host(settings: Settings, metrics: Metrics) -> tuple[Host, App, list[EventBus]]:
    """Load the app that WEFT_APP names and return a host that announces it. Raises ConfigurationError."""
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
    """Publish the app's manifest."""
    host.announce(lambda: announce(buses, app.manifest()))


def pool_streams(name: str, pools: Sequence[str]) -> list[str]:
    """Return the work streams of these pools; "" is the default pool."""
    return [f"{name}:{pool}" if pool else name for pool in pools]


async def build_agent_handler(settings: Settings, metrics: Metrics) -> Host:
    """Wire an agent-handler for the app that WEFT_APP names. Raises ConfigurationError."""
    host, app, buses = await app_host(settings, metrics)
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    add_agents(
        host,
        app,
        buses,
        settings.pools or ("",),
        results=Results.of_settings(settings),
        compute=compute,
        recorded=RecordedInStore(settings),
        output=OutputLimits.of_settings(settings),
    )
    return host


class RecordedInStore:
    """Finds steps in the trajectory store, if there is one here. It reads one at a time, briefly: thousands of errors
    may need it at once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looking = False

    async def __call__(self, task: str, run: str, step: str, /) -> str:
        if self._looking:
            return ""
        self._looking = True
        try:
            async with asyncio.timeout(RECORDED_SECONDS):
                return await self._find(task, run, step)
        except Exception as error:  # stores raise errors of many libraries
            logger.info("step %s of run %s of task %s cannot be read from the trajectories: %s", step, run, task, error)
            return ""
        finally:
            self._looking = False

    async def _find(self, task: str, run: str, step: str) -> str:
        await asyncio.to_thread(import_module, "runtime_core.trajectory.store")  # it takes half a second
        from runtime_core.trajectory.store import TrajectoryStore

        store = await TrajectoryStore.open_existing(self._settings.trajectory_url)
        if store is None:
            return ""
        try:
            return await store.call_of(self._settings.namespace, task, run, step)
        finally:
            await store.close()


def add_agents(
    host: Host,
    app: App,
    buses: Sequence[EventBus],
    pools: Sequence[str],
    *,
    results: Results,
    compute: ProcessCompute | None = None,
    in_flight: int | None = None,
    recorded: RecordedCalls | None = None,
    output: OutputLimits | None = None,
) -> None:
    """Run the agents of these pools, with up to `in_flight` turns at once. The host closes `compute` when it stops.

    `recorded` finds recorded steps, for errors. `output` bounds the output on its way to the broker; None: by the
    defaults.
    """
    output = output or OutputLimits()
    host.add(stop=app.functions.models.close)
    host.add(stop=app.functions.engines.close)
    if compute is not None:
        host.add(stop=compute.close)
    outflow = Outflow(output.process, output.run)
    workplace = Workplace(app.functions, compute, results)

    for agent in app.agents.values():
        check_shares(agent.what, agent.limits, len(buses), agent.place)

    def handler(bus: EventBus) -> DeliveryHandler:
        return TurnHandler(
            bus,
            app,
            host.metrics,
            partitions=len(buses),
            workplace=workplace,
            outflow=outflow,
            recorded=recorded,
        )

    host.consume(
        buses,
        pool_streams("agent", pools),
        handler,
        service=AGENT_HANDLER,
        in_flight=in_flight,
        work_seconds=max([agent.timeout_seconds for agent in app.agents.values() if agent.pool in pools], default=0.0),
    )
    host.announce(lambda: announce_served(buses, "agent", _agents_of(app, pools)))


def _agents_of(app: App, pools: Sequence[str]) -> list[str]:
    own = [agent.name for agent in app.agents.values() if agent.pool in pools]
    return [*own, app.hooks.of_ends_agent(app.name).name] if app.hooks.of_ends else own


def _tools_of(app: App, pools: Sequence[str]) -> list[str]:
    own = [tool.name for tool in app.tools.values() if tool.pool in pools]
    return own + [f"{server.prefix}.*" for server in app.mcp_servers.values() if server.pool in pools]


def agent_pools(app: App) -> tuple[str, ...]:
    """Return the pools of an app's agents, the default pool ("") first."""
    return tuple(sorted({"", *(agent.pool for agent in app.agents.values())}))


async def build_tool_handler(settings: Settings, metrics: Metrics) -> Host:
    """Wire a tool-handler for the app that WEFT_APP names. Raises ConfigurationError."""
    host, app, buses = await app_host(settings, metrics)
    abandoned = add_tools(host, app, buses, settings.pools or ("",))
    host.add(run=partial(end_without_threads, abandoned))
    return host


def add_tools(
    host: Host,
    app: App,
    buses: Sequence[EventBus],
    pools: Sequence[str],
    *,
    threads: int = TOOL_THREADS,
    await_servers: bool = False,
) -> AbandonedThreads:
    """Run the tools of these pools and return the counter of abandoned threads.

    `await_servers` makes the start wait until the host has tried each MCP server once.
    """
    executor, abandoned = ThreadPoolExecutor(threads, thread_name_prefix="tool"), AbandonedThreads()

    async def drop_threads() -> None:
        executor.shutdown(wait=False, cancel_futures=True)

    host.add(stop=drop_threads)
    servers: MCPServers | None = None
    if declared := [server for server in app.mcp_servers.values() if server.pool in pools]:
        need_sdk(declared)
        from runtime_core.calls.mcp.servers import MCPServers  # the SDK loads in a second, and few apps need it

        servers = MCPServers(app, host.metrics, pools)
        host.add(start=partial(servers.start, host.announce_now), stop=servers.stop)
        if await_servers:
            host.add(start=servers.tried)
        host.announce(partial(servers.announce, buses))

    for tool in app.tools.values():
        check_shares(tool.what, tool.limits, len(buses), tool.place)
    for server in declared:
        for limits in server.limits.values():
            check_shares(server.what, limits, len(buses), server.place)

    def handler(bus: EventBus) -> DeliveryHandler:
        return CallHandler(bus, app.tools, executor, abandoned, host.metrics, servers, partitions=len(buses))

    seconds = [tool.timeout_seconds for tool in app.tools.values() if tool.pool in pools]
    seconds += [server.timeout_seconds for server in declared]
    host.consume(
        buses, pool_streams("tool", pools), handler, service=TOOL_HANDLER, work_seconds=max(seconds, default=0.0)
    )
    host.announce(lambda: announce_served(buses, "tool", _tools_of(app, pools)))
    return abandoned


async def end_without_threads(abandoned: AbandonedThreads) -> None:
    """Raise WeftError when half of a tool-handler's threads are lost, so that the process restarts."""
    while abandoned.running < TOOL_THREADS // 2:  # noqa: ASYNC110  # no event tells when a thread is lost
        await asyncio.sleep(1)
    raise WeftError(
        "half of the tool threads are lost to functions that ran past timeout_seconds; restarting:"
        " make these functions end, or write them as async functions"
    )


def tool_pools(app: App) -> tuple[str, ...]:
    """Return the pools of an app's tools and MCP servers, the default pool ("") first."""
    pools = {tool.pool for tool in app.tools.values()} | {server.pool for server in app.mcp_servers.values()}
    return tuple(sorted({"", *pools}))


async def build_gateway(engine: ServedEngine, settings: Settings, metrics: Metrics, *, backend: str = "") -> Host:
    """Wire the gateway of an engine. `EngineGateway` documents `backend`. Raises ConfigurationError."""
    host, app, buses = await app_host(settings, metrics)
    add_gateway(host, EngineGateway(engine, app.functions, settings, metrics, backend), buses, settings)
    return host


def add_gateway(host: Host, gateway: EngineGateway, buses: Sequence[EventBus], settings: Settings) -> None:
    """Run the steps of the gateway's engine and of the settings' pools."""
    engine = gateway.engine
    served = pool_streams(engine.name, settings.pools or ("",))

    def handler(bus: EventBus) -> DeliveryHandler:
        return StepHandler(bus, gateway, host.metrics)

    async def announce() -> None:
        for bus in buses:
            await bus.announce_engine(served)

    async def withdraw() -> None:
        for bus in buses:
            with contextlib.suppress(BusError):
                await bus.withdraw_engine(served)

    host.add(start=gateway.start, stop=gateway.stop)
    host.consume(
        buses,
        served,
        handler,
        service=f"{engine.name}-gateway",
        in_flight=settings.engine_in_flight or engine.in_flight,
        finish_share=GATEWAY_FINISH_SHARE,
        cancel_share=None,
        # A step may take hours. The gateway watches its driver for hangs.
        work_seconds=math.inf,
    )
    # Added last, so that it stops first: other gateways take over before this one finishes its steps.
    host.add(stop=withdraw)
    host.announce(announce)


build_ray_gateway = partial(build_gateway, RAY)
build_spark_gateway = partial(build_gateway, SPARK)


async def build_task_host(app: App, settings: Settings, in_flight: int | None = None) -> Host:
    """Wire a host that runs an app's agents and tools of all pools in a process that another program has started.

    `settings` name the broker; their app and pools are ignored. `in_flight` limits concurrent agent turns.
    Raises ConfigurationError.
    """
    host = service_host(settings, Metrics(CollectorRegistry(), "task-host"))
    buses = await open_partitions(host, settings)
    announce_app(host, app, buses)
    abandoned = add_tools(host, app, await open_partitions(host, settings), tool_pools(app))
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    results = Results.of_settings(settings)
    add_agents(
        host,
        app,
        buses,
        agent_pools(app),
        results=results,
        compute=compute,
        in_flight=in_flight,
        recorded=RecordedInStore(settings),
        output=OutputLimits.of_settings(settings),
    )
    host.add(run=lambda: end_without_threads(abandoned))
    return host
