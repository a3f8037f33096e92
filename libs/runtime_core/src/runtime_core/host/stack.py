"""Everything on this machine: the embedded server, where no broker is named, and the services, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.config.settings import Settings
from runtime_core.config.values import without_password
from runtime_core.errors import ConfigurationError, WeftError
from runtime_core.host.supervisor import ChildSpec, Supervisor
from runtime_core.telemetry import logs

SERVICES = ("agent_handler", "tool_handler", "state_manager", "trajectory_recorder")
RAY_GATEWAY = "ray_gateway"
SPARK_GATEWAY = "spark_gateway"
"""Started where they are asked for, or where the settings name the cluster."""
REPLICATED = frozenset({"agent_handler", "tool_handler"})
"""More of these do more work; of the others one works and the rest would stand by, or wait for the same cluster."""
WITH_APP = REPLICATED | {RAY_GATEWAY, SPARK_GATEWAY}
ENTRY = "runtime_core.host"
"""The module that starts a service by its name."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def services_for(settings: Settings, *, ray: bool = False, spark: bool = False) -> tuple[str, ...]:
    """The services to run: all, and of the gateways those that are asked for or whose cluster is named."""
    gateways = [(RAY_GATEWAY, ray or settings.ray_address), (SPARK_GATEWAY, spark or settings.spark_remote)]
    return (*SERVICES, *(service for service, wanted in gateways if wanted))


async def up(settings: Settings, replicas: int = 1, services: Sequence[str] = SERVICES) -> int:
    """Runs everything on this machine until SIGINT or SIGTERM; returns the exit status.

    `replicas` is how many handlers of each kind run. What cannot work is told in one line on standard error.
    """
    logs.configure("weft", settings.log_level, settings.log_format)
    try:
        return await _up(settings, replicas, services)
    except WeftError as error:
        print(f"weft up: {logs.one_line(str(error))}", file=sys.stderr, flush=True)
        return 1


async def _up(settings: Settings, replicas: int, services: Sequence[str]) -> int:
    if settings.app is None and not WITH_APP.isdisjoint(services):
        raise ConfigurationError("WEFT_APP is not set; say which app to run, as in WEFT_APP=package.module:app")
    if settings.redis_url is not None and settings.redis_url.startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL: memory:// lives in one process and services are several; leave it unset"
            " for the embedded server, or name a Redis or Valkey"
        )
    settings.make_data_dir()
    async with contextlib.AsyncExitStack() as stack:
        stopping = asyncio.Event()
        supervisor: Supervisor | None = None

        def on_signal() -> None:
            stopping.set()
            if supervisor is not None:
                supervisor.stop()

        stack.enter_context(_signals(on_signal))
        if settings.redis_url is None:
            server = EmbeddedServer(
                settings.data_dir, appendfsync="everysec" if settings.durability == "fast" else "always"
            )
            stack.push_async_callback(server.stop)
            # A large append-only file takes time to read.
            if not await _unless_stopped(server.start(), stopping):
                return 0
            stack.push_async_callback(_cancelled, asyncio.create_task(server.keep(), name="keep the server"))
            told = replace(settings, redis_url=server.url)
        else:
            if not await _unless_stopped(_checked(settings.redis_url, settings), stopping):
                return 0
            told = settings
        supervisor = Supervisor(
            child_specs(told, replicas, services), sys.stdout, shutdown_seconds=settings.shutdown_seconds
        )
        print(banner(told, services, embedded=settings.redis_url is None), flush=True)
        status = await supervisor.run()
        if supervisor.failure:
            print(supervisor.failure, file=sys.stderr, flush=True)
        return status


def child_specs(settings: Settings, replicas: int, services: Sequence[str]) -> list[ChildSpec]:
    """What to start, in order; the n-th child's metrics port is n above the one that is set."""
    names = []
    for service in services:
        name = service.replace("_", "-")
        count = replicas if service in REPLICATED else 1
        names += [(service, name)] if count == 1 else [(service, f"{name}-{n}") for n in range(1, count + 1)]
    specs = []
    for place, (service, name) in enumerate(names):
        port = settings.metrics_port + place if settings.metrics_port else settings.metrics_port
        own = replace(settings, instance=name, metrics_port=port)
        inherited = {key: value for key, value in os.environ.items() if key != "WEFT_METRICS_PORT"}
        # -P: the user's folder must not shadow our modules. The handlers look for the app there themselves.
        argv = [sys.executable, "-P", "-m", ENTRY, service.replace("_", "-")]
        specs.append(ChildSpec(name, argv, {**inherited, "PYTHONUNBUFFERED": "1", **own.to_environment()}))
    return specs


def banner(settings: Settings, services: Sequence[str] = SERVICES, *, embedded: bool) -> str:
    """What runs, where the data is, and how to submit."""
    url = settings.redis_url or ""
    event = """type weft.task.submit data '{"agent":"NAME","input":"TEXT"}'"""
    connect = f"-p {url.rpartition(':')[2]}" if embedded else f"-u {without_password(url)}"
    lines = [
        "Weft is starting",
        f"  broker   {without_password(url)}" + ("  (embedded)" if embedded else ""),
        f"  app      {settings.app or 'none'}",
        f"  data     {settings.data_dir}",
        *_engines(settings, services),
        "  submit   weft submit NAME '\"TEXT\"'",
        f"           redis-cli {connect} XADD {settings.namespace}:tasks '*' {event}",
        "  stop     Ctrl-C",
    ]
    return "\n".join(lines)


def _engines(settings: Settings, services: Sequence[str]) -> list[str]:
    """The line of the banner that tells which clusters steps go to, if any."""
    # What follows `;` in a Spark remote may be a token.
    remote = (settings.spark_remote or "").partition(";")[0]
    clusters = ((RAY_GATEWAY, "ray", settings.ray_address), (SPARK_GATEWAY, "spark", remote))
    told = [f"{engine} ({where or 'a local one'})" for service, engine, where in clusters if service in services]
    return [f"  engines  {', '.join(told)}"] if told else []


async def _checked(url: str, settings: Settings) -> None:
    """Refuses a broker that every service would refuse: once, and before anything is started."""
    transport = await connect(url)
    try:
        await open_namespace(transport, settings.namespace, settings.partitions)
    finally:
        await transport.close()


async def _unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Does the work; False where a signal came first."""
    loop = asyncio.get_running_loop()
    doing, stop = loop.create_task(work), loop.create_task(stopping.wait())
    await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
    await _cancelled(stop)
    if not doing.done():
        await _cancelled(doing)
        return False
    doing.result()
    return True


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait([task])


@contextlib.contextmanager
def _signals(on_signal: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
