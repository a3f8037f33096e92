"""Whole tasks on Ray or Spark: workers of a cluster run the handlers of their app, which take tasks from a broker.

    this process            the client; without a given broker, also an embedded server, schedules and the recorder
    └─ driver process       holds the connection to the cluster (engines/driver), keeps the hosts
       └─ workers           agents and tools, run as a handler service runs them

The tasks live on the broker: the death of a host, or of the whole cluster, loses no finished work.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.base.periodic import cancel_and_wait
from runtime_core.bus.connector import MEMORY, parse_address
from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.client.client import Client
from runtime_core.engines.driver.driver import Driver, DriverEngine, RayEngine, SparkEngine
from runtime_core.engines.protocol import Error, Outcome, Pickled, Report, Work
from runtime_core.engines.ray.backend import RayBackend
from runtime_core.errors import BusError, ConfigurationError, EngineError, WeftError
from runtime_core.host.app_services import agent_pools, pool_streams
from runtime_core.host.host import Host
from runtime_core.host.local import ENDS_SECONDS
from runtime_core.host.state_manager import add_housekeeping
from runtime_core.integrations.aworld.engines.packing import HostsSpec, PackedApp, pack
from runtime_core.integrations.aworld.target import RunTarget, TasksApp
from runtime_core.integrations.aworld.task import Task
from runtime_core.runs.hooks.around import until_end_hooks_ran
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.recorder import LocalTrajectories

CLUSTERS: dict[str, tuple[type[DriverEngine], str]] = {
    "ray": (RayEngine, "runtime_core.integrations.aworld.engines.target:HostsBackend"),
    "spark": (SparkEngine, "runtime_core.integrations.aworld.engines.spark_hosts:SparkHostsBackend"),
}
"""The clusters that run whole tasks: the engine, and the backend of the driver that keeps the hosts."""
NO_HOST_SECONDS = 300.0
"""The longest time without a host. A cluster takes half a minute to start, and several on a busy machine."""
AGAIN_SECONDS = 1.0
"""The wait between two attempts to start hosts."""
SILENT_SECONDS = 20.0
"""How often a warning says that there is no host yet."""
RECORDED_SECONDS = 15.0
"""The longest wait for the record after the tasks have ended."""
CANCEL_SECONDS = 5.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def cluster_target(
    engine: str,
    tasks: Sequence[Task],
    *,
    client: Client | None,
    url: str | None,
    app: App | None,
    workers: int,
    at_once: int,
) -> AsyncIterator[RunTarget]:
    """Yield a target whose handlers run in `workers` processes of a cluster: `ray` or `spark`.

    0 workers: one per CPU of a Ray cluster; one less than the tasks that a Spark server runs in parallel. `at_once`
    tasks run concurrently. Raises ConfigurationError if the cluster or the broker cannot be used, and InvalidInput for
    objects that cannot be sent.
    """
    cluster, backend = CLUSTERS[engine]
    settings = Settings.from_environment(os.environ)
    reference = (settings.app or "") if app is None else ""
    base = load_app(reference) if reference else app
    given = client is not None or bool(url or settings.redis_url)
    # Apps on a shared broker need different names.
    made = TasksApp(base, f"tasks-{secrets.token_hex(4)}") if given else TasksApp(base)
    for task in tasks:
        made.take(task)
    sent = await asyncio.to_thread(_packed, cluster, made, reference)
    async with AsyncExitStack() as stack:
        broker: _CallBroker | None = None
        if not given:
            _check_here(cluster)
            broker = await stack.enter_async_context(_CallBroker(settings))
            client = await stack.enter_async_context(Client.connect(broker.url, namespace=settings.namespace))
        elif client is None:
            client = await stack.enter_async_context(Client.connect(url, namespace=settings.namespace))
        elif client.url.startswith(MEMORY):
            raise ConfigurationError(
                f"engine {engine!r}: the client's broker exists only in this process: pass url=, or no client"
            )
        assert client is not None
        hosted = replace(
            settings, redis_url=client.url, namespace=client.namespace, partitions=len(client.buses), metrics_port=None
        )
        wanted = HostsSpec(sent, hosted.to_environment(), workers, at_once, _answers_here_only(client.url))
        hosting = await stack.enter_async_context(_Hosting(cluster, backend, wanted))
        read = None if broker is None else broker.read
        target = RunTarget(client, made.whole, made.names, hosting.failed, gateways=broker is None, read=read)
        try:
            await hosting.first()
            yield target
        finally:
            if broker is None:
                await _cancel_open(target)
        if broker is not None:
            await broker.finish(target, made.whole)


class _Hosting:
    """The hosts, from the start of their driver process to its end."""

    def __init__(self, cluster: type[DriverEngine], backend: str, wanted: HostsSpec) -> None:
        self._cluster = cluster
        # HostsBackend takes no other work.
        self._work = Work(Pickled(msgspec.msgpack.encode(wanted)), "task hosts")
        self._driver = Driver(backend, os.environ)
        self._hosts = 0
        self._seen = time.monotonic()
        """The last time when there was a host."""
        self._changed = asyncio.Event()
        self.failed: asyncio.Future[WeftError] = asyncio.get_running_loop().create_future()
        """The reason why there will be no more hosts."""
        self._keeping: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _Hosting:
        loop = asyncio.get_running_loop()
        self._keeping = [
            loop.create_task(self._keep(), name="task hosts"),
            loop.create_task(self._watch(), name="watch the task hosts"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.wait(self._keeping)
        await self._driver.stop()

    async def first(self) -> None:
        """Wait for the first host. Raises ConfigurationError if there will be none."""
        while not self._hosts:
            if self.failed.done():
                raise self.failed.result()
            await self._changed.wait()

    async def _keep(self) -> None:
        await self._driver.start()
        state = await self._driver.reached()
        engine = self._cluster.engine
        if not state.connected and os.environ.get(self._cluster.address):
            # Fail fast if the given cluster is not there. Our own cluster may start late on a busy machine.
            self._fail(ConfigurationError(f"engine {engine!r}: {state.reason}"))
            return
        while True:
            while not state.connected:
                state = await self._driver.changed(state)
            outcome = await self._driver.run(self._work, self._heard)
            self._count(0)
            if not isinstance(outcome, Error) or outcome.cause == "invalid":
                message = outcome.message if isinstance(outcome, Error) else "its hosts ended unexpectedly"
                self._fail(ConfigurationError(f"engine {engine!r}: {message}"))
                return
            logger.warning("lost the hosts on %s, starting them again: %s", engine.capitalize(), outcome.message)
            # A cluster that starts or stops fails in many ways; _watch gives up when that takes too long.
            await asyncio.sleep(AGAIN_SECONDS)
            state = self._driver.state

    async def _watch(self) -> None:
        warned = time.monotonic()
        while not self.failed.done():
            await asyncio.sleep(1)
            now = time.monotonic()
            if self._hosts:
                self._seen = warned = now
            elif now - self._seen > NO_HOST_SECONDS:
                self._fail(
                    EngineError(
                        "EngineUnavailable",
                        f"no host on {self._cluster.engine.capitalize()} for {NO_HOST_SECONDS:g} s: {self._why()}",
                    )
                )
            elif now - warned > SILENT_SECONDS:
                warned = now
                logger.warning(
                    "no host on %s for %d s: %s", self._cluster.engine.capitalize(), now - self._seen, self._why()
                )

    def _why(self) -> str:
        return self._driver.state.reason or "the cluster has not started one yet; does it have a free CPU?"

    def _heard(self, progress: bytes) -> None:
        self._count(msgspec.json.decode(progress, type=dict[str, int])["hosts"])

    def _count(self, hosts: int) -> None:
        if self._hosts or hosts:
            self._seen = time.monotonic()
        self._hosts = hosts
        self._tell()

    def _fail(self, error: WeftError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class HostsBackend(RayBackend):
    """A Ray driver whose only work is to keep the hosts of a HostsSpec until it is cancelled."""

    async def run(self, work: Work, report: Report) -> Outcome:
        """Keep the hosts. Report `{"hosts": n}` whenever the number of ready hosts changes."""
        from runtime_core.integrations.aworld.engines.ray_hosts import (
            RayHosts,  # here: Ray reads its environment when it is imported
        )

        assert isinstance(work.call, Pickled)
        return await RayHosts(work.call.payload, report).run()


class _CallBroker:
    """A broker for one call, with the services that tasks need: schedules, the recorder, and the limit of waits for
    gateways."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._server: EmbeddedServer | None = None
        self._host: Host | None = None
        # The store is that of `weft up`; a separate partition number keeps the recorders' positions apart.
        number = 2**20 + secrets.randbelow(2**30)
        self._record = LocalTrajectories(settings.namespace, settings.trajectory_url, store_partition=number)

    @property
    def url(self) -> str:
        assert self._server is not None  # from `__aenter__` on
        return self._server.url

    async def __aenter__(self) -> _CallBroker:
        async with AsyncExitStack() as stack:
            if self._settings.trajectory_url.startswith("sqlite"):
                self._settings.make_data_dir()
            folder = stack.enter_context(TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True))
            self._server = EmbeddedServer(
                Path(folder), appendfsync="everysec" if self._settings.durability == "fast" else "always"
            )
            stack.push_async_callback(self._server.stop)
            await self._server.start()
            stack.push_async_callback(cancel_and_wait, asyncio.create_task(self._server.keep(), name="keep the server"))
            self._host = host = Host(partial(connect, self.url), Metrics(CollectorRegistry(), "trajectory-recorder"))
            stack.push_async_callback(host.stop)
            home, recorded = await self._open(), await self._open()
            await home.load_library()
            host.add(start=partial(self._record.start, recorded, host.metrics), stop=self._record.stop)
            add_housekeeping(host, home)
            await host.start()
            self._stack = stack.pop_all()
        return self

    async def read(self, task: str) -> TaskTrajectory:
        """Return the record of an ended task. Raises TimeoutError."""
        return await self._record.recorded(task, RECORDED_SECONDS)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def finish(self, target: RunTarget, app: App) -> None:
        """Wait for the end hooks and the record of tasks that have ended."""
        if app.hooks.of_ends:
            bus = await self._open()
            with suppress(TimeoutError, BusError):
                async with asyncio.timeout(ENDS_SECONDS):
                    await until_end_hooks_ran(bus, pool_streams("agent", agent_pools(app)), app.name)
        try:
            async with asyncio.timeout(RECORDED_SECONDS):
                for task in target.ended:
                    await self._record.recorded(task, RECORDED_SECONDS)
        except TimeoutError:
            logger.warning("the trajectories of some tasks were not recorded within %g s", RECORDED_SECONDS)

    async def _open(self) -> EventBus:
        assert self._host is not None  # from `__aenter__` on
        transport = await self._host.connect()
        keys = await open_namespace(transport, self._settings.namespace, 1)
        return EventBus(transport, keys[0])


def _packed(cluster: type[DriverEngine], made: TasksApp, reference: str) -> PackedApp:
    if find_spec(cluster.package) is None:
        raise ConfigurationError(
            f"engine {cluster.engine!r}: {cluster.package} is not installed: pip install 'weft[{cluster.engine}]'"
        )

    def dumps(value: object) -> bytes:
        # Here: it loads the library of the cluster. It sends objects that are in no module with their code.
        return cast(bytes, importlib.import_module(cluster.cloudpickle).dumps(value))

    return pack(made, reference, dumps)


def _check_here(cluster: type[DriverEngine]) -> None:
    """Refuse a remote cluster: its workers could not reach a broker on this machine."""
    address = os.environ.get(cluster.address, "")
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    if address and host and not _is_here(host):
        raise ConfigurationError(
            f"{cluster.address}={address!r} is another machine, and without WEFT_REDIS_URL the broker is on this "
            "machine, out of its reach: set WEFT_REDIS_URL, or pass url="
        )


def _answers_here_only(url: str) -> bool:
    address = parse_address(url)
    return bool(address.path) or address.host == "localhost" or address.host.startswith("127.") or address.host == "::1"


def _is_here(host: str) -> bool:
    """Whether an address belongs to this machine: only then can it be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.bind(address)
            return True
    return False


async def _cancel_open(target: RunTarget) -> None:
    """Cancel unfinished tasks: without these hosts, nothing may run them."""
    with suppress(WeftError, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await target.give_up()
