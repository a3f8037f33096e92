"""A service process: settings → wire → start → ready → run until SIGTERM → stop.

    starting ──started──> running ──signal, or the role ends──> stopping ──> exit
    /readyz: 503          200, if the role is ready too         503
    /healthz: 200         the role's progress                   200

The exit status is 0 after a clean stop and 1 otherwise; a second signal ends the process at once
(130 for SIGINT, 143 for SIGTERM).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from types import FrameType
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from runtime_core.config.settings import Settings
from runtime_core.consumer.progress import HEALTHY, LEASE_PART, Health, LoopWatch, ProgressWatch
from runtime_core.errors import ConfigurationError, WeftError
from runtime_core.forked import guard_forks
from runtime_core.host.host import Role
from runtime_core.periodic import Periodic
from runtime_core.telemetry import logs, tracing
from runtime_core.telemetry.endpoint import Answer, Endpoint, plain
from runtime_core.telemetry.metrics import CONTENT_TYPE, Metrics, version

__all__ = ["Build", "Health", "ProgressWatch", "run_service", "serve"]

LAG_SAMPLE_SECONDS = 0.1
LAG_INTERVAL_SECONDS = 1.0
CLOSING_SECONDS = 5.0
"""How long tasks and threads that were left behind may hold up the end of a stopped process."""

RUN_USERS_CODE = ("agent-handler", "tool-handler")
"""Services whose event loop runs code of the app."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


Build = Callable[[Settings, Metrics], Awaitable[Role]]
"""Wires a role: picks the implementations. Raises WeftError where that cannot work."""


def serve(name: str, build: Build) -> NoReturn:
    """`run_service` as the whole of a process: ends it, even if an abandoned thread still runs."""
    status = run_service(name, build)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: that would wait for threads, and one that runs past its limit may never end.
    os._exit(status)


def run_service(name: str, build: Build, environ: Mapping[str, str] | None = None) -> int:
    """Runs a service in the main thread until it is told to stop; returns the exit status.

    `environ` is the process's own environment by default.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = Settings.from_environment(environ)
        _refuse_a_broker_of_its_own(settings)
    except ConfigurationError as error:
        # What the log's format is may be what is wrong.
        _say(name, environ.get("WEFT_LOG_FORMAT", "").strip().lower(), error)
        return 1
    logs.configure(settings.instance or name, settings.log_level, settings.log_format)
    guard_forks()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        status = runner.run(_Process(name, settings, build, environ).run())
        # Closing the loop waits for threads and for tasks that swallow their cancellation: not for ever.
        last_resort = threading.Timer(CLOSING_SECONDS, os._exit, (status,))
        last_resort.daemon = True
        last_resort.start()
    last_resort.cancel()
    return status


class _Process:
    """The life of one service process."""

    def __init__(self, name: str, settings: Settings, build: Build, environ: Mapping[str, str]) -> None:
        self._name = name
        self._environ = environ
        self._traces: tracing.Traces | None = None
        self._watch = LoopWatch(LEASE_PART * settings.lease_seconds, interrupts=name in RUN_USERS_CODE)
        self._settings = settings
        self._build = build
        self._metrics = Metrics(CollectorRegistry(), name)
        self._stop = asyncio.Event()
        self._role: Role | None = None
        self._running: asyncio.Task[None] | None = None
        """The role's `run`, once it is started."""

    async def run(self) -> int:
        """Returns the exit status."""
        lag = Periodic("loop-lag", LAG_INTERVAL_SECONDS, self._measure_lag)
        endpoint: Endpoint | None = None
        with _signals(self._on_signal):
            try:
                endpoint = await self._listen()
                lag.start()
                await self._work(endpoint)
                status = 0
            except WeftError as error:
                _say(self._settings.instance or self._name, self._settings.log_format, error)
                status = 1
            except Exception:
                logger.exception("ended by an error that nobody expected")
                status = 1
            status = max(status, await self._leave())
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            # Last, so that `/readyz` says "stopping" until there is nothing left to stop.
            await lag.stop()
            if endpoint is not None:
                await endpoint.stop()
            self._watch.stop()
        return status

    async def _work(self, endpoint: Endpoint | None) -> None:
        """Starts the role and returns when a signal came or the role ended; raises what it raised."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        starting = loop.create_task(self._start(), name="start")
        if not await self._until_done_or_stopped(starting):
            starting.cancel()
            await asyncio.wait([starting])
            return
        role = starting.result()
        if endpoint is not None:
            # Not before: one that is refused says why, and nothing else.
            logger.info("metrics and health on %s", endpoint.url)
        self._running = loop.create_task(role.run(), name="run")
        logger.info("ready in %.2f s (process %d)", time.monotonic() - began, os.getpid())
        if await self._until_done_or_stopped(self._running):
            self._running.result()
            logger.warning("ended by itself")

    async def _start(self) -> Role:
        self._role = await self._build(self._settings, self._metrics)
        # After the app is loaded: one that has configured an SDK of its own keeps it.
        self._traces = tracing.configure(
            self._name, self._settings.instance or f"{socket.gethostname()}-{os.getpid()}", version(), self._environ,
            self._metrics.spans_dropped.inc,
        )  # fmt: skip
        await self._role.start()
        # Not before: loading an app may take its time.
        self._watch.start()
        # What is loaded now stays: looking at it again and again costs a handler a sixth of its time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        return self._role

    async def _until_done_or_stopped(self, task: asyncio.Task[Any]) -> bool:  # whatever it returns
        """True where the task has ended, False where a signal came first."""
        stopped = asyncio.get_running_loop().create_task(self._stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        return task.done()

    async def _leave(self) -> int:
        """Stops the role and waits for the end of its `run`; 1 where that failed or took too long."""
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
            logger.error("not stopped within %g s (WEFT_SHUTDOWN_SECONDS): others adopt what it holds", limit)
            return 1
        except Exception:
            logger.exception("could not stop as it should: others adopt what it holds")
            return 1
        if not refused:
            logger.info("stopped")
        return 0

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info("stopping (%s); the same again ends it at once", number.name)
            self._stop.set()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LAG_SAMPLE_SECONDS
        await asyncio.sleep(LAG_SAMPLE_SECONDS)
        self._metrics.loop_lag.set(max(0.0, loop.time() - due))

    async def _listen(self) -> Endpoint | None:
        port = self._settings.metrics_port
        if port is None:
            return None
        routes = {
            "/metrics": self._answer_metrics,
            "/healthz": self._answer_health,
            "/readyz": self._answer_ready,
        }
        endpoint = Endpoint(self._settings.metrics_host, port, routes)
        try:
            await endpoint.start()
        except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a name
            host = self._settings.metrics_host
            if (
                not isinstance(error, OSError)
                or isinstance(error, socket.gaierror)
                or error.errno == errno.EADDRNOTAVAIL
            ):
                raise ConfigurationError(
                    f"WEFT_METRICS_HOST={host!r}: is no address of this machine; 0.0.0.0 listens on all of them"
                ) from None
            why = "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"WEFT_METRICS_PORT={port}: cannot listen on {host}: {why}; choose another port (0 takes a free one)"
            ) from None
        logger.debug("listens on %s", endpoint.url)
        return endpoint

    def _answer_metrics(self) -> Answer:
        return Answer(HTTPStatus.OK, self._metrics.exposition(), CONTENT_TYPE)

    def _answer_ready(self) -> Answer:
        if self._stop.is_set():
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "stopping")
        if self._running is None or self._role is None:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "starting")
        if not self._role.ready():
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "not reading")
        return plain(HTTPStatus.OK, "ready")

    def _answer_health(self) -> Answer:
        # Before and after `run` there is no progress to ask for; a stop that hangs has a limit of its own.
        measurable = self._running is not None and not self._stop.is_set()
        health = self._role.progress() if measurable and self._role is not None else HEALTHY
        if health.ok:
            return plain(HTTPStatus.OK, "ok")
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, logs.one_line(health.reason))


@contextlib.contextmanager
def _signals(on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls `on_signal` in the loop for the first SIGTERM or SIGINT; a second one ends the process."""
    loop = asyncio.get_running_loop()

    def first(number: int, _: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, lambda late, _: os._exit(128 + late))
        loop.call_soon_threadsafe(on_signal, signal.Signals(number))

    for number in STOP_SIGNALS:
        # Python runs a plain handler between two instructions, so also where the loop is blocked; the
        # loop's own handler, which does nothing, is what wakes up a loop that waits.
        loop.add_signal_handler(number, lambda: None)
        signal.signal(number, first)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # not there on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop


def _refuse_a_broker_of_its_own(settings: Settings) -> None:
    if (settings.redis_url or "").startswith("memory:"):
        raise ConfigurationError(
            "WEFT_REDIS_URL=memory:// is a server for one process, which no other service sees: name a server"
        )


def _say(name: str, log_format: str, error: Exception) -> None:
    """Why it ends, in one line on standard error."""
    print(logs.last_line(name, log_format, str(error)), file=sys.stderr, flush=True)
