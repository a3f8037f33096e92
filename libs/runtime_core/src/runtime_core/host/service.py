"""A service process: settings → wire → start → ready → run until SIGTERM → stop.

    starting ──started──> running ──signal, or the role ends──> stopping ──> exit
    /readyz: 503          200, if the role is ready too         503
    /healthz: 200         the role's progress                   200

`HttpEndpoint` serves these and the metrics over HTTP. The exit status is 0 after a clean stop and 1 otherwise; a second
signal ends the process at once (130 for SIGINT, 143 for SIGTERM).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from runtime_core.base.lazy import collect_seldom
from runtime_core.base.lifeline import guard_forks
from runtime_core.base.periodic import Periodic, cancel_and_wait
from runtime_core.consumer.progress import HEALTHY, LoopWatch
from runtime_core.consumer.settle import is_of_weft
from runtime_core.errors import ConfigurationError, WeftError
from runtime_core.host.host import Host, Role
from runtime_core.settings import Settings
from runtime_core.telemetry import logs, tracing
from runtime_core.telemetry.metrics import CONTENT_TYPE, Metrics, version

HEAD_MAX_BYTES = 16 * 1024
REQUEST_SECONDS = 5.0

TEXT = "text/plain; charset=utf-8"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


def plain(status: HTTPStatus, line: str) -> Response:
    return Response(status, line.encode() + b"\n")


class HttpEndpoint:
    """Serves `routes` (path → function that returns the response) on `host` and `port`; port 0 takes a free one.

    Bad requests get status 400. Requests that take longer than 5 s are closed.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Callable[[], Response]]) -> None:
        self.host = host
        self.port = port
        """The actual port, after `start`."""
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The base URL, as in `http://127.0.0.1:9464`."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Start listening. Raises OSError if the address is not available."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=HEAD_MAX_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and close open connections."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for writer in tuple(self._connections):
            writer.close()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                method, answer = await self._answer(reader)
                writer.write(_response(method, answer))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone or is too slow
        finally:
            self._connections.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Response]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "GET", plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request headers are too large")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return "GET", plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
        method, path = words[0], words[1].split("?", 1)[0]
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            return method, plain(HTTPStatus.NOT_FOUND, f"no such path; paths are {known}")
        if method not in ("GET", "HEAD"):
            return method, plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        try:
            return method, route()
        except Exception:
            logger.exception("cannot answer %s", path)
            return method, plain(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the log")


def _response(method: str, answer: Response) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if answer.status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() if method == "HEAD" else head.encode() + answer.body


logger = logging.getLogger(__name__)

LAG_SAMPLE_SECONDS = 0.1
LAG_INTERVAL_SECONDS = 1.0
CLOSING_SECONDS = 5.0
"""How long leftover tasks and threads may delay the exit of a stopped process."""
RUN_USERS_CODE = ("agent-handler", "tool-handler")
"""Services that run the app's code in their event loop."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Build = Callable[[Settings, Metrics], Awaitable[Role]]
"""Wires a role. Raises WeftError if the settings or the app do not allow it."""
_BUILDERS = {
    "agent-handler": "app_services:build_agent_handler",
    "gateway": "host:build_gateway",
    "ray-gateway": "app_services:build_ray_gateway",
    "spark-gateway": "app_services:build_spark_gateway",
    "state-manager": "state_manager:build",
    "tool-handler": "app_services:build_tool_handler",
    "trajectory-recorder": "host:build_recorder",
}
"""Service → `module:function` in this package that wires it."""
GATEWAY = "gateway"
SERVICES = tuple(name for name in _BUILDERS if name != GATEWAY)
"""The services of an installation. The HTTP gateway is an addition to it."""


def serve(name: str, build: Build) -> NoReturn:
    """Run a service, then exit the process even if an abandoned thread still runs."""
    collect_seldom()
    status = run_service(name, build)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: it would wait for threads, and an abandoned thread may never end.
    os._exit(status)


def run_service(name: str, build: Build, environ: Mapping[str, str] | None = None) -> int:
    """Run a service in the main thread until SIGTERM or SIGINT, and return the exit status.

    `environ` defaults to `os.environ`.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = Settings.from_environment(environ)
        _refuse_private_broker(settings)
    except ConfigurationError as error:
        # The log format itself may be the invalid setting.
        _print_reason(name, environ.get("WEFT_LOG_FORMAT", "").strip().lower(), error)
        return 1
    logs.configure(settings.instance or name, settings.log_level, settings.log_format)
    guard_forks()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if name in RUN_USERS_CODE:
            _GuardedLoop(runner.get_loop())
        status = runner.run(_ServiceProcess(name, settings, build, environ).run())
        # Closing the loop waits for threads and for tasks that swallow cancellation. Limit that wait.
        last_resort = threading.Timer(CLOSING_SECONDS, os._exit, (status,))
        last_resort.daemon = True
        last_resort.start()
    last_resort.cancel()
    return status


class _ServiceProcess:
    """The life of one service process."""

    def __init__(self, name: str, settings: Settings, build: Build, environ: Mapping[str, str]) -> None:
        self._name = name
        self._environ = environ
        self._traces: tracing.Traces | None = None
        self._watch = LoopWatch(settings.lease_seconds, settings.loop_block_seconds, interrupts=name in RUN_USERS_CODE)
        self._settings = settings
        self._build = build
        self._metrics = Metrics(CollectorRegistry(), name)
        self._stop = asyncio.Event()
        self._role: Role | None = None
        self._running: asyncio.Task[None] | None = None
        """The role's `run`, once it is started."""

    async def run(self) -> int:
        """Run until the end of the process, and return its exit status."""
        lag = Periodic("loop-lag", LAG_INTERVAL_SECONDS, self._measure_lag)
        endpoint: HttpEndpoint | None = None
        with _signals(self._on_signal):
            try:
                endpoint = await self._listen()
                lag.start()
                await self._work(endpoint)
                status = 0
            except WeftError as error:
                _print_reason(self._settings.instance or self._name, self._settings.log_format, error)
                status = 1
            except Exception:
                logger.exception("unexpected error")
                status = 1
            status = max(status, await self._leave())
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            # Last, so that `/readyz` answers "stopping" until everything has stopped.
            await lag.stop()
            if endpoint is not None:
                await endpoint.stop()
            self._watch.stop()
        return status

    async def _work(self, endpoint: HttpEndpoint | None) -> None:
        """Start the role, and return after a signal or when the role ends. Raises the role's error."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        starting = loop.create_task(self._start(), name="start")
        if not await self._until_done_or_stopped(starting):
            await cancel_and_wait(starting)
            return
        role = starting.result()
        if endpoint is not None:
            # Only now: a service that cannot start logs nothing but the reason.
            logger.info("metrics and health on %s", endpoint.url)
        self._running = loop.create_task(role.run(), name="run")
        logger.info("ready in %.2f s (process %d)", time.monotonic() - began, os.getpid())
        if await self._until_done_or_stopped(self._running):
            self._running.result()
            logger.warning("the service ended without a signal")

    async def _start(self) -> Role:
        self._role = await self._build(self._settings, self._metrics)
        # After loading the app: if it has configured OpenTelemetry itself, its SDK stays.
        self._traces = tracing.configure(
            self._name, self._settings.instance or f"{socket.gethostname()}-{os.getpid()}", version(), self._environ,
            self._metrics.spans_dropped.inc,
        )  # fmt: skip
        await self._role.start()
        # Only now: loading an app may block the loop for long.
        self._watch.start(self._role.beat_beside if isinstance(self._role, Host) else None)
        # Loaded modules stay alive: scanning them at each collection costs a handler a sixth of its time.
        gc.collect()
        gc.freeze()
        return self._role

    async def _until_done_or_stopped(self, task: asyncio.Task[Any]) -> bool:  # whatever it returns
        """Return True if the task has ended, False if a signal came first."""
        stopped = asyncio.get_running_loop().create_task(self._stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        return task.done()

    async def _leave(self) -> int:
        """Stop the role and wait until its `run` returns. Return 1 if that fails or takes too long."""
        refused = self._running is None and not self._stop.is_set()
        self._stop.set()
        if self._role is None:
            return 0
        limit = self._settings.shutdown_seconds
        try:
            async with asyncio.timeout(limit):
                await self._role.stop()
                if self._running is not None and not self._running.done():
                    await self._running
        except TimeoutError:
            logger.error(
                "not stopped within %g s (WEFT_SHUTDOWN_SECONDS): other handlers reclaim its deliveries", limit
            )
            return 1
        except Exception:
            logger.exception("the stop failed: other handlers reclaim its deliveries")
            return 1
        if not refused:
            logger.info("stopped")
        return 0

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info("stopping (%s); send the signal again to exit immediately", number.name)
            self._stop.set()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LAG_SAMPLE_SECONDS
        await asyncio.sleep(LAG_SAMPLE_SECONDS)
        self._metrics.loop_lag.set(max(0.0, loop.time() - due))

    async def _listen(self) -> HttpEndpoint | None:
        port = self._settings.metrics_port
        if port is None:
            return None
        routes = {
            "/metrics": self._answer_metrics,
            "/healthz": self._answer_health,
            "/readyz": self._answer_ready,
        }
        endpoint = HttpEndpoint(self._settings.metrics_host, port, routes)
        try:
            await endpoint.start()
        except (OSError, UnicodeError) as error:  # UnicodeError: the text is not a host name
            host = self._settings.metrics_host
            if (
                not isinstance(error, OSError)
                or isinstance(error, socket.gaierror)
                or error.errno == errno.EADDRNOTAVAIL
            ):
                raise ConfigurationError(
                    f"WEFT_METRICS_HOST={host!r} is not an address of this machine; 0.0.0.0 listens on all addresses"
                ) from None
            why = "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"WEFT_METRICS_PORT={port}: cannot listen on {host}: {why}; choose another port (0: any free port)"
            ) from None
        logger.debug("listening on %s", endpoint.url)
        return endpoint

    def _answer_metrics(self) -> Response:
        return Response(HTTPStatus.OK, self._metrics.exposition(), CONTENT_TYPE)

    def _answer_ready(self) -> Response:
        if self._stop.is_set():
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "stopping")
        if self._running is None or self._role is None:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "starting")
        if not self._role.ready():
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "not reading")
        return plain(HTTPStatus.OK, "ready")

    def _answer_health(self) -> Response:
        # Before and after `run` there is no progress to check. A separate timeout limits the stop.
        measurable = self._running is not None and not self._stop.is_set()
        health = self._role.progress() if measurable and self._role is not None else HEALTHY
        if health.ok:
            return plain(HTTPStatus.OK, "ok")
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, logs.one_line(health.reason))


@contextlib.contextmanager
def _signals(on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `on_signal` in the loop at the first SIGTERM or SIGINT; a second one exits the process."""
    loop = asyncio.get_running_loop()

    def first(number: int, _: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, lambda late, _: os._exit(128 + late))
        loop.call_soon_threadsafe(on_signal, signal.Signals(number))

    for number in STOP_SIGNALS:
        # Python runs this handler between two instructions, even if the loop is blocked. The loop's empty handler
        # only wakes a waiting loop.
        loop.add_signal_handler(number, lambda: None)
        signal.signal(number, first)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # not available on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop


class _GuardedLoop:
    """Keeps code of agents and tools from ending the event loop that all runs of the process share."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stop = loop.stop
        self._every_task = asyncio.tasks.all_tasks
        self._users: WeakKeyDictionary[asyncio.Task[Any], tuple[str, str]] = WeakKeyDictionary()
        """The tasks that users' code has created, and its task and run."""
        loop.stop = self._refuse_stop  # type: ignore[method-assign]  # a subclass would have to know the loop's class
        loop.set_task_factory(self._create)
        asyncio.all_tasks = asyncio.tasks.all_tasks = self._all_tasks

    def _refuse_stop(self) -> None:
        if logs.HANDLED.get() is not None:
            raise RuntimeError(
                "loop.stop() would end the process with all other runs: return from the function, or raise an error"
            )
        self._stop()

    def _create(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:  # Any: tasks of all results, and options of all Python versions
        task = asyncio.Task(coroutine, loop=loop, **options)
        if (handled := logs.HANDLED.get()) is not None and not is_of_weft(coroutine):
            self._users[task] = handled.task, handled.run
        return task

    def _all_tasks(self, loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:  # Any: as above
        """As `asyncio.all_tasks`; inside an agent or tool without the tasks of Weft and of other runs."""
        found, handled = self._every_task(loop), logs.HANDLED.get()
        running = asyncio._get_running_loop()
        if handled is None or (loop or running) is not self._loop:
            return found  # for Weft, and for a loop that a tool runs in its thread
        mine, here = (handled.task, handled.run), asyncio.current_task() if running is self._loop else None
        return {task for task in found if task is here or self._users.get(task) == mine}


def _refuse_private_broker(settings: Settings) -> None:
    if (settings.redis_url or "").startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL=memory:// starts a broker that only one process can reach: name a Redis or Valkey server"
        )


def _print_reason(name: str, log_format: str, error: Exception) -> None:
    """Print why the service ends, in one line on standard error."""
    print(logs.last_line(name, log_format, str(error)), file=sys.stderr, flush=True)


def build_of(service: str) -> Build:
    """Return the function that wires a service. Only the modules of that service are imported."""
    module, _, function = _BUILDERS[service.replace("_", "-")].partition(":")
    return cast("Build", getattr(importlib.import_module(f"runtime_core.host.{module}"), function))


def main(arguments: Sequence[str]) -> int:
    """Run one service as the whole of this process.

    Args:
        arguments: The service's name. Without one, the variable `SERVICE` names it.

    Returns:
        2, after one line on standard error, if there is no such service. Otherwise the process ends here.
    """
    given = arguments[0] if arguments else os.environ.get("SERVICE", "")
    name = given.strip().replace("_", "-")
    if len(arguments) > 1 or name not in _BUILDERS:
        shown = " ".join(arguments) or f"SERVICE={given!r}"
        problem = f"{shown}: there is no such service" if arguments or name else "SERVICE is not set"
        print(f"weft: {problem}; choose one of {', '.join(_BUILDERS)}", file=sys.stderr)
        return 2
    serve(name, build_of(name))
