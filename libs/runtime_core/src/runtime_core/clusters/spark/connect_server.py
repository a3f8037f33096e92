"""A Spark Connect server of this machine, as its own process: for laptops and tests, where no other one was named."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runtime_core.config.settings import Settings
from runtime_core.engines.protocol import Away
from runtime_core.lifeline import tied
from runtime_core.telemetry.redaction import kept

START_SECONDS = 180.0
"""The limit until the server listens, in seconds; generous for busy machines."""
STOP_SECONDS = 10.0
"""The longest wait for the killed server to end, in seconds."""
LOOPBACK = "127.0.0.1"
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
_NEEDED_JAVA = (
    "Spark needs Java 17 or newer: install one, or name it by JAVA_HOME; or name a server by WEFT_SPARK_REMOTE"
)
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
            "spark.python.daemon.module": "runtime_core.clusters.spark.worker_daemon",
            # Results of 100 MiB and more pass through the driver.
            "spark.driver.maxResultSize": "0",
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={self._folder} -Dderby.system.home={self._folder}",
        }
        told = Settings.from_environment(self._environ)
        options = ["--master", told.spark_local_master, "--driver-memory", told.spark_local_memory, "--name", "weft"]
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
        raise Away(f"the local Spark Connect server ended at its start{self._tail() or '; ' + _NEEDED_JAVA}")

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
        told = [line for line in self._last if not line.startswith("WARNING: Using incubator modules")]
        return f": {kept(' | '.join(told[-3:]), 600, end=True)}" if told else ""


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
