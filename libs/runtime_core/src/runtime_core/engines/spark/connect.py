"""Spark Connect: a local server if no other one is named, and sessions on any server.

The local server is a separate process and ends with this one. Sessions report progress, and their errors show
whether the server or the session is lost.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runtime_core.base.lifeline import tied
from runtime_core.engines.protocol import Away
from runtime_core.settings import Settings
from runtime_core.telemetry.redaction import kept

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

START_SECONDS = 180.0
"""The limit until the server listens, in seconds; generous for busy machines."""
STOP_SECONDS = 10.0
"""The longest wait for the killed server to end, in seconds."""
LOOPBACK = "127.0.0.1"
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
_NEEDED_JAVA = "Spark needs Java 17 or newer: install it, set JAVA_HOME, or set WEFT_SPARK_REMOTE to a running server"
_LAST_LINES = 20
_FOLDER = "weft-spark-"

# Errors only: otherwise Spark logs each of its steps.
_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
DEFAULT_PORT = 15002
REPORT_SECONDS = 0.5
"""The shortest interval between two progress reports, in seconds."""
# By default a client retries a lost server for ten minutes.
_RETRIES = 4
_LONGEST_PAUSE_MILLISECONDS = 1000
OnProgress = Callable[[int, int, int, int, str], None]
"""Called with an operation's number of stages, completed tasks, tasks and running tasks, and its id."""
_JOBS = uuid.UUID("6b1f0d8e-3c53-4b83-9c1d-2d4f27f6a7b1")
# Messages of the server, or the client itself, about a session that no longer exists.
_SESSION_GONE = re.compile(
    r"INVALID_HANDLE\.SESSION_|server side session identifier|SESSION_(CLOSED|NOT_FOUND|CHANGED)"
)


class ConnectServer:
    """A server on a free loopback port. It dies with the process that started it, however that ends."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._port = 0

    @property
    def url(self) -> str:
        """Return the server's address, such as `sc://127.0.0.1:41873`."""
        return f"sc://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """Return the process id of the server's JVM."""
        assert self._process is not None
        return self._process.pid

    @property
    def files(self) -> Path:
        """Return the folder that this process, the server and its workers share; it is removed with the server."""
        assert self._folder is not None
        return self._folder / "files"

    async def start(self) -> None:
        """Start the server and wait until it listens. Call this on the main thread: the server ends with its thread.

        Raises Away if there is no Java, or if the server ends at once or does not listen in time.
        """
        java_checked(self._environ)
        home = _spark_home()
        await asyncio.to_thread(_sweep)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self.files.mkdir()
        (self._folder / "log4j2.properties").write_text(_LOGGING)
        self._port = _free_port()
        command = [f"{home}/bin/spark-submit", "--class", _SERVER, *self._options(), "spark-internal"]
        # Each script execs the next and the last the JVM, so the tie and the process id are the JVM's.
        self._process = await asyncio.create_subprocess_exec(
            *tied(command, signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(home),
        )
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            await self._listens()
        except BaseException:
            await self.stop()
            raise

    async def ended(self) -> str:
        """Wait for the server's end and return how it ended, in one line."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the local Spark Connect server (process {self._process.pid}) ended with {how}{self._tail()}"

    async def stop(self) -> None:
        """Kill the server and remove its files."""
        process, self._process = self._process, None
        if process is not None:
            # A graceful end takes seconds and gains nothing. Its Python workers end with their pipes.
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
            self._reading = None
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    def _options(self) -> list[str]:
        assert self._folder is not None
        settings = {
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
            "spark.local.dir": str(self._folder),
            # The default of 200 is for clusters: here each partition costs more than its work.
            "spark.sql.shuffle.partitions": "2",
            "spark.connect.progress.reportInterval": "500ms",
            # The time between a cancel and the kill of the function's process.
            "spark.python.task.killTimeout": "500ms",
            "spark.python.daemon.module": "runtime_core.engines.spark.worker",
            # Results of 100 MiB and more pass through the driver.
            "spark.driver.maxResultSize": "0",
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={self._folder} -Dderby.system.home={self._folder}",
        }
        configured = Settings.from_environment(self._environ)
        master, memory = configured.spark_local_master, configured.spark_local_memory
        options = ["--master", master, "--driver-memory", memory, "--name", "weft"]
        for name, value in settings.items():
            options += ["--conf", f"{name}={value}"]
        return options

    def _environment(self, home: str) -> dict[str, str]:
        assert self._folder is not None
        environment = {
            name: value
            for name, value in self._environ.items()
            # Those belong to another Spark or its client.
            if not name.startswith("SPARK_") and name != "PYSPARK_SUBMIT_ARGS"
        }
        return environment | {
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_CONF_DIR": str(self._folder),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONUNBUFFERED": "1",
        }

    async def _listens(self) -> None:
        assert self._process is not None
        ending = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                while not ending.done():
                    if await answers(LOOPBACK, self._port):
                        return
                    await asyncio.wait((ending,), timeout=0.1)
        except TimeoutError:
            raise Away(f"the local Spark Connect server did not listen within {START_SECONDS:g} s") from None
        finally:
            ending.cancel()
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=1.0)
        raise Away(f"the local Spark Connect server ended while it started{self._tail() or '; ' + _NEEDED_JAVA}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # the line exceeds the reader's limit
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last.append(text)
                print(text, file=sys.stderr, flush=True)

    def _tail(self) -> str:
        lines = [line for line in self._last if not line.startswith("WARNING: Using incubator modules")]
        return f": {kept(' | '.join(lines[-3:]), 600, end=True)}" if lines else ""


async def answers(host: str, port: int, seconds: float = 5.0) -> bool:
    """Return whether something listens at this address."""
    try:
        async with asyncio.timeout(seconds):
            _reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


def java_checked(environ: Mapping[str, str]) -> str:
    """Return the Java that Spark's scripts will use. Raise Away if there is none."""
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise Away(f"JAVA_HOME={home!r} has no bin/java; {_NEEDED_JAVA}")
        return str(java)
    found = shutil.which("java", path=environ.get("PATH"))
    if found is None:
        raise Away(f"there is no Java; {_NEEDED_JAVA}")
    return found


def _spark_home() -> str:
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise Away("pyspark is not installed: pip install 'weft[spark]'")
    home = found.submodule_search_locations[0]
    if not Path(home, "bin", "spark-submit").exists():
        raise Away(f"{home} has no bin/spark-submit (pyspark-client has no server): pip install 'weft[spark]'")
    return home


def _free_port() -> int:
    """Return a free port below those of outgoing connections, so that it stays free until the server binds it."""
    while True:
        port = random.randint(10_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((LOOPBACK, port))
                return port


def _sweep() -> None:
    """Remove the folders of processes that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def address_of(remote: str) -> tuple[str, int]:
    """Return host and port of `sc://host:port/;parameters`. Raise Away if it is not such an address."""
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme != "sc" or not host:
        raise Away(f"WEFT_SPARK_REMOTE={remote!r} is not the address of a Spark Connect server: write sc://host:15002")
    return host, port or DEFAULT_PORT


def is_lost(error: BaseException) -> bool:
    """Return whether the error means that the server, or the session there, is gone."""
    for one in _chain(error):
        # Only PySpark's errors: a job may use other servers, too.
        if not type(one).__module__.startswith("pyspark."):
            continue
        status = getattr(one, "getGrpcStatusCode", lambda: None)()
        if getattr(status, "name", "") == "UNAVAILABLE" or _SESSION_GONE.search(str(one)):
            return True
    return False


def condition_of(error: BaseException) -> str:
    """Return Spark's name of an error, such as `OPERATION_CANCELED`; empty if it has none."""
    found = getattr(error, "getCondition", lambda: None)()
    return found or ""


class Sessions:
    """Opens sessions on one server. All methods block except `open`, which is cheap."""

    def __init__(self, remote: str) -> None:
        """Raise ImportError if PySpark is not installed."""
        from pyspark.sql import SparkSession

        self._remote = remote
        # The builder, not a constructor: it makes all of PySpark use a remote server in this process.
        self.first: SparkSession = SparkSession.builder.remote(remote).create()
        _hurry(self.first)

    def open(self, key: str = "", attempt: int = 0) -> SparkSession:
        """Return a separate session, without a request to the server. Sessions do not share settings or registrations.

        With a key it is the same session in each process, so a later process can end an earlier one's operations.
        """
        if not key:
            session = self.first.newSession()
        else:
            from pyspark.sql.connect.client import DefaultChannelBuilder
            from pyspark.sql.connect.session import SparkSession

            channel = DefaultChannelBuilder(self._remote)
            channel.set("session_id", str(uuid.uuid5(_JOBS, f"{key}#{attempt}")))
            session = SparkSession(connection=channel)
        _hurry(session)
        return session

    def of_job(self, key: str, attempt: int) -> SparkSession:
        """Return the session of a job's attempt. End operations left by the previous attempt's dead driver."""
        if not key:
            return self.open()
        if attempt > 1:
            before = self.open(key, attempt - 1)
            self._ended(before)
            before.stop()
        session = self.open(key, attempt)
        if self._ended(session):
            return session
        # That attempt and its session have already ended: this is a redelivery.
        session.stop()
        return self.open()

    def details(self) -> dict[str, str]:
        """Return the server's version, application id and number of CPUs."""
        session = self.first
        plan = session.client.explain_string(session.range(1)._plan.to_proto(session.client), "formatted")
        splits = re.search(r"splits=(?:Some\()?(\d+)", plan)
        return {
            "version": session.version,
            "application": session.conf.get("spark.app.id", "") or "",
            "cpus": splits[1] if splits else "",
        }

    def ask(self) -> None:
        """Send a small request, which also prevents the session's idle timeout. Raises the client's errors."""
        self.first.client.get_configs("spark.app.id")

    def close(self) -> None:
        """Disconnect from the server."""
        self.first.stop()

    def _ended(self, session: SparkSession) -> bool:
        """End the operations of a session. Return False if the server has closed the session."""
        try:
            session.interruptAll()
        except Exception as error:
            if _SESSION_GONE.search(str(error)):
                return False
            raise
        return True


class Watched:
    """Routes the progress of a shared session's operations to the thread that runs each."""

    def __init__(self, session: SparkSession) -> None:
        self._here = threading.local()
        watch(session, self._forward)

    def report_to(self, on_progress: OnProgress) -> None:
        """Report operations of this thread to `on_progress` from now on."""
        self._here.on_progress = on_progress

    def _forward(self, stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
        on_progress: OnProgress | None = getattr(self._here, "on_progress", None)
        if on_progress is not None:
            on_progress(stages, tasks_done, tasks, running, operation)


def watch(session: SparkSession, on_progress: OnProgress) -> None:
    """Report all operations of a session to `on_progress`, in the threads that run them."""

    def handle(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:  # Any: of PySpark
        stages = list(stages)
        tasks_done = sum(stage.num_completed_tasks for stage in stages)
        on_progress(
            len(stages), tasks_done, sum(stage.num_tasks for stage in stages), inflight_tasks, operation_id or ""
        )

    session.registerProgressHandler(handle)


class Paced:
    """Forwards a report if it differs from the last one and REPORT_SECONDS have passed."""

    def __init__(self, report: Callable[[bytes], None]) -> None:
        self._report = report
        self._last = b""
        self._next = 0.0

    def __call__(self, value: bytes, last: bool = False) -> None:
        """Forward `value` if it differs and is due; with `last`, even if it is not due."""
        now = time.monotonic()
        if value != self._last and (last or now >= self._next):
            self._last = value
            self._next = now + REPORT_SECONDS
            self._report(value)


def _hurry(session: SparkSession) -> None:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES, max_backoff=_LONGEST_PAUSE_MILLISECONDS)])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    waiting = [error]
    while waiting and len(seen) < 20:
        one = waiting.pop()
        if one not in seen:
            seen.append(one)
            yield one
            waiting += itertools.filterfalse(lambda other: other is None, (one.__cause__, one.__context__))  # type: ignore[arg-type]
