"""`weft up`: all services on this machine, and an embedded broker unless the settings name one, until Ctrl-C.

With `--reload` it checks a changed app in a separate process, and then restarts the services of the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime_core.base.lifeline import tied
from runtime_core.base.periodic import cancel_and_wait
from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.errors import ConfigurationError, WeftError
from runtime_core.host.supervisor import ChildSpec, Supervisor
from runtime_core.settings import Settings, without_password
from runtime_core.telemetry import logs

SERVICES = ("agent_handler", "tool_handler", "state_manager", "trajectory_recorder")
RAY_GATEWAY = "ray_gateway"
SPARK_GATEWAY = "spark_gateway"
"""Started on request, or if the settings name the cluster."""
GATEWAY = "gateway"
"""The HTTP gateway, started if the settings name its port."""
REPLICATED = frozenset({"agent_handler", "tool_handler"})
"""Services that scale with replicas. Of the others one replica leads, or all wait for the same cluster."""
WITH_APP = REPLICATED | {RAY_GATEWAY, SPARK_GATEWAY}
ENTRY = "runtime_core.host"
"""The module that starts a service by name."""
LIBRARIES = {
    GATEWAY: ("gateway", ("starlette", "uvicorn"), "--http-port"),
    RAY_GATEWAY: ("ray", ("ray",), "--ray and WEFT_RAY_ADDRESS"),
    SPARK_GATEWAY: ("spark", ("pyspark",), "--spark and WEFT_SPARK_REMOTE"),
}
"""Service → the extra that it needs, the libraries of it, and what requests the service."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def services_for(settings: Settings, *, ray: bool = False, spark: bool = False) -> tuple[str, ...]:
    """Return the services to run, with the gateways that are requested, or whose cluster or port the settings name."""
    gateways = [
        (RAY_GATEWAY, ray or settings.ray_address),
        (SPARK_GATEWAY, spark or settings.spark_remote),
        (GATEWAY, settings.http_port is not None),
    ]
    return (*SERVICES, *(service for service, wanted in gateways if wanted))


async def up(settings: Settings, replicas: int = 1, services: Sequence[str] = SERVICES, *, reload: bool = False) -> int:
    """Run everything on this machine until SIGINT or SIGTERM, and return the exit status.

    `replicas` is the number of agent-handlers and of tool-handlers. `reload` restarts services of the app when its code
    changes. An error is one line on standard error.
    """
    logs.configure("weft", settings.log_level, settings.log_format)
    try:
        return await _up(settings, replicas, services, reload)
    except WeftError as error:
        print(f"weft up: {logs.one_line(str(error))}", file=sys.stderr, flush=True)
        return 1


async def _up(settings: Settings, replicas: int, services: Sequence[str], reload: bool) -> int:
    if settings.app is None and not WITH_APP.isdisjoint(services):
        raise ConfigurationError("WEFT_APP is not set: name your app, as in WEFT_APP=package.module:app")
    if settings.redis_url is not None and settings.redis_url.startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL=memory:// starts a broker that only one process can reach: leave it unset"
            " for the embedded server, or name a Redis or Valkey"
        )
    _check_libraries(services)
    settings.make_data_dir()
    async with contextlib.AsyncExitStack() as stack:
        stopping = asyncio.Event()
        supervisor: Supervisor | None = None

        def on_signal() -> None:
            stopping.set()
            if supervisor is not None:
                supervisor.stop()

        stack.enter_context(_signals(on_signal))
        # Before the broker starts: each service would report the same error.
        if settings.app is not None and not await _unless_stopped(check_app(settings.app), stopping):
            return 0
        if settings.redis_url is None:
            server = EmbeddedServer(
                settings.data_dir, appendfsync="everysec" if settings.durability == "fast" else "always"
            )
            stack.push_async_callback(server.stop)
            # Loading a large append-only file takes time.
            if not await _unless_stopped(server.start(), stopping):
                return 0
            stack.push_async_callback(cancel_and_wait, asyncio.create_task(server.keep(), name="keep the server"))
            effective = replace(settings, redis_url=server.url)
        else:
            if not await _unless_stopped(_checked(settings.redis_url, settings), stopping):
                return 0
            effective = settings
        specs = child_specs(effective, replicas, services)
        _check_ports(settings, len(specs), http=GATEWAY in services)
        supervisor = Supervisor(specs, sys.stdout, shutdown_seconds=settings.shutdown_seconds)
        print(banner(effective, services, embedded=settings.redis_url is None), flush=True)
        if reload and settings.app is not None:
            restarted = frozenset(spec.name for spec in specs if spec.argv[-1].replace("-", "_") in WITH_APP)
            watch = asyncio.create_task(reload_on_change(settings.app, supervisor, restarted), name="reload")
            stack.push_async_callback(cancel_and_wait, watch)
        status = await supervisor.run()
        if supervisor.failure:
            print(supervisor.failure, file=sys.stderr, flush=True)
        return status


def child_specs(settings: Settings, replicas: int, services: Sequence[str]) -> list[ChildSpec]:
    """Return the children to start, in order. The n-th child's metrics port is the setting plus n."""
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
        # -P: the user's folder must not shadow our modules. Handlers add the folder for the app themselves.
        argv = [sys.executable, "-P", "-m", ENTRY, service.replace("_", "-")]
        specs.append(ChildSpec(name, argv, {**inherited, "PYTHONUNBUFFERED": "1", **own.to_environment()}))
    return specs


def banner(settings: Settings, services: Sequence[str] = SERVICES, *, embedded: bool) -> str:
    """Return the text that `weft up` prints first: services, data folder, how to submit."""
    url = settings.redis_url or ""
    event = """type weft.task.submit data '{"agent":"AGENT","input":"TEXT"}'"""
    connect = f"-p {url.rpartition(':')[2]}" if embedded else f"-u {without_password(url)}"
    lines = [
        "Weft is starting",
        f"  broker   {without_password(url)}" + ("  (embedded)" if embedded else ""),
        f"  app      {settings.app or 'none'}",
        f"  data     {settings.data_dir}",
        *_engines(settings, services),
        *_http(settings, services),
        '  submit   weft submit AGENT "TEXT"',
        f"           redis-cli {connect} XADD {settings.namespace}:tasks '*' {event}",
        "  stop     Ctrl-C",
    ]
    return "\n".join(lines)


def _engines(settings: Settings, services: Sequence[str]) -> list[str]:
    """Return the banner's line about clusters, if steps go to any."""
    # The part of a Spark remote after `;` may hold a token.
    remote = (settings.spark_remote or "").partition(";")[0]
    clusters = ((RAY_GATEWAY, "ray", settings.ray_address), (SPARK_GATEWAY, "spark", remote))
    named = [f"{engine} ({where or 'a local one'})" for service, engine, where in clusters if service in services]
    return [f"  engines  {', '.join(named)}"] if named else []


def _http(settings: Settings, services: Sequence[str]) -> list[str]:
    """Return the banner's lines about the gateway, if there is one."""
    if GATEWAY not in services:
        return []
    if not settings.http_port:
        return ["  http     at a free port, which the log shows; the console is at /console"]
    url = f"http://{settings.http_host}:{settings.http_port}"
    return [f"  console  {url}/console", f"  http     {url}/openapi.json"]


def _check_libraries(services: Sequence[str]) -> None:
    """Raise ConfigurationError if a gateway lacks its libraries: it would refuse to start, or wait for them."""
    for service, (extra, libraries, requested_by) in LIBRARIES.items():
        if service in services and (missing := [each for each in libraries if importlib.util.find_spec(each) is None]):
            raise ConfigurationError(
                f"the {service.replace('_', '-')} needs {missing[0]}, which is not installed: pip install "
                f"'weft[{extra}]', or leave out {requested_by}"
            )


def _check_ports(settings: Settings, count: int, *, http: bool) -> None:
    """Check the ports once, before each service would refuse to start.

    Raises ConfigurationError.
    """
    first = settings.metrics_port or 0
    for port in range(first, first + count) if first else ():
        if _is_in_use(settings.metrics_host, port):
            raise ConfigurationError(
                f"port {port} is in use: choose another first port with --metrics-port (0: any free ports)"
            )
    port = settings.http_port or 0
    if http and port and _is_in_use(settings.http_host, port):
        raise ConfigurationError(f"port {port} is in use: choose another one with --http-port (0: any free port)")


def _is_in_use(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError, OverflowError) as error:  # the services explain a wrong host or port
            return isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return False


async def _checked(url: str, settings: Settings) -> None:
    """Check the broker once, before any service starts and fails for the same reason."""
    transport = await connect(url)
    try:
        await open_namespace(transport, settings.namespace, settings.partitions)
    finally:
        await transport.close()


async def _unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Run `work` and return True; cancel it and return False if a signal comes first."""
    loop = asyncio.get_running_loop()
    doing, stop = loop.create_task(work), loop.create_task(stopping.wait())
    await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait(stop)
    if not doing.done():
        await cancel_and_wait(doing)
        return False
    doing.result()
    return True


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


POLL_SECONDS = 0.5
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that are not searched, besides those whose names begin with a dot."""
FILES_MAX = 10_000


async def check_app(reference: str) -> None:
    """Import and check the app in another process. Raises ConfigurationError, on one line."""
    # Not in this process: importing runs the user's code, and a later change needs a fresh import.
    # -P: the user's folder must not shadow our modules. The loader adds it for the app itself.
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-P", "-m", "runtime_core.app.loading", reference], signal.SIGKILL),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, written = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = written.decode(errors="replace").strip().splitlines() or [f"app {reference!r} cannot be imported"]
        raise ConfigurationError(lines[-1])


async def reload_on_change(reference: str, supervisor: Supervisor, names: frozenset[str]) -> None:
    """Restart the children `names` after each change of a Python file below this folder, if the app can be imported.

    Runs until it is cancelled.
    """
    folder = Path(os.getcwd())
    known = await asyncio.to_thread(_files, folder)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        found = await asyncio.to_thread(_files, folder)
        if found == known:
            continue
        changed = sorted(path for path in found.keys() | known.keys() if found.get(path) != known.get(path))
        known = found
        shown = ", ".join(Path(path).relative_to(folder).as_posix() for path in changed[:3]) + (
            ", …" if len(changed) > 3 else ""
        )
        try:
            await check_app(reference)
        except ConfigurationError as error:
            supervisor.note(f"{shown} changed, and the old code keeps running: {error}")
            continue
        supervisor.note(f"{shown} changed: restarting the handlers")
        supervisor.restart(names)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the Python files below a folder, with their times and sizes."""
    found: dict[str, tuple[int, int]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if _is_source(name, root)]
        for name in files:
            if name.endswith(".py") and len(found) < FILES_MAX:
                try:
                    status = os.stat(os.path.join(root, name))
                except FileNotFoundError:  # an editor has just replaced it
                    continue
                found[os.path.join(root, name)] = (status.st_mtime_ns, status.st_size)
    return found


def _is_source(name: str, root: str) -> bool:
    # An environment has any name, and this file.
    return name not in SKIPPED and name[:1] != "." and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
