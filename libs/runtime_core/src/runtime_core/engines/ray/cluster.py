"""A driver's connection to its Ray cluster: its settings, a check for a lost head, and a local Ray."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from runtime_core.base.lifeline import tied
from runtime_core.engines.protocol import Away
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError
from runtime_core.settings import Settings

ADDRESS_VARIABLE = "WEFT_RAY_ADDRESS"
DASHBOARD_VARIABLE = "WEFT_RAY_DASHBOARD"
JOBS_URL_VARIABLE = "WEFT_RAY_JOBS_URL"
RAY_NAMESPACE = "weft"
"""The Ray namespace; names of actors are unique in it."""
REACH_SECONDS = 3.0
"""The limit for a TCP connection, in seconds."""
CONNECT_SECONDS = 180.0
"""The limit for joining a cluster or starting one, in seconds."""
CHECK_SECONDS = 1.0
MAX_FAILED_CHECKS = 2
"""The number of consecutive failed connections after which a server counts as gone."""
SILENT_SECONDS = 30.0
"""The limit for an answer of the GCS to the regular check, in seconds."""
LOOPBACK = "127.0.0.2"
"""Not 127.0.0.1: Ray replaces that with the host's address and listens there."""
LOCAL_START_SECONDS = 150.0
LOCAL_STOP_SECONDS = 6.0
FOLDER_PREFIX = "weft-ray-"
MAX_FOLDER_LENGTH = 30
"""The most characters of the temporary folder's path: Ray's sockets are inside, and their paths may have 107."""
STARTED_OUTPUT = b"--block"
"""The text that Ray prints once it accepts drivers."""
LOCAL_ENVIRONMENT = {
    # Nobody else uses this Ray, and a token would have to be stored in the home folder.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": str(int(LOCAL_START_SECONDS)),
    "RAY_agent_register_timeout_ms": str(int(LOCAL_START_SECONDS * 1000)),
}
"""Environment variables of a local Ray and of the process that uses it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RaySettings:
    """The location of Ray and of results."""

    address: str
    """`host:port` of the head's GCS, or `auto`; empty for the driver's own local Ray."""
    namespace: str
    """Weft's namespace; each has its own holder."""
    local_cpus: int
    local_store_bytes: int
    dashboard: bool
    """Whether the driver's own local Ray has a dashboard, which batch jobs need."""
    jobs_url: str
    """The URL of the Jobs API; empty for the cluster's dashboard."""
    results: Results

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RaySettings:
        """Read the environment. Raise Away for an invalid variable."""
        # First: the general checks include this one, with a less specific message.
        address = _address(environ.get(ADDRESS_VARIABLE, "").strip())
        try:
            settings = Settings.from_environment(environ)
        except ConfigurationError as error:
            raise Away(str(error)) from error
        return cls(
            address=address,
            namespace=settings.namespace,
            local_cpus=settings.ray_local_cpus or os.cpu_count() or 1,
            local_store_bytes=settings.ray_local_store_bytes,
            dashboard=settings.ray_dashboard,
            jobs_url=settings.ray_jobs_url or "",
            results=Results.of_settings(settings),
        )


def _address(text: str) -> str:
    if not text or text == "auto":
        return text
    if "://" in text:
        why = "Ray Client is not supported, since its work ends with the client" if "ray:" in text else ""
        raise Away(
            f"{ADDRESS_VARIABLE}={text!r}: {why or 'not an address'}: give host:port of the head (its GCS), or 'auto'"
        )
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Away(
            f"{ADDRESS_VARIABLE}={text!r}: not host:port; give that of the head's GCS, as in 'ray-head:6379', or 'auto'"
        )
    return text


class LocalRay:
    """A Ray of one node on this machine, which ends with its process. Its folder is removed with it.

    `ray start` starts it and not `ray.init`, because only the command accepts all ports. A raylet waits 15 seconds for
    its agents to write down their ports and then gives up. LOCAL_ENVIRONMENT raises this limit for busy machines.
    """

    def __init__(self, cpus: int, store_bytes: int, *, dashboard: bool = False) -> None:
        self.folder, self._lock = _own_folder()
        self.gcs, self._dashboard_port, *self._others = _free_ports(7)
        self._cpus = cpus
        self._store_bytes = store_bytes
        self._dashboard = dashboard
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Return the address for drivers."""
        return f"{LOOPBACK}:{self.gcs}"

    @property
    def jobs_url(self) -> str:
        """Return the URL of the Jobs API; empty without a dashboard."""
        return f"http://127.0.0.1:{self._dashboard_port}" if self._dashboard else ""

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Start Ray and wait until it accepts drivers. May be called again after Ray was killed.

        Ray ends with the calling thread. Raises Away.
        """
        client, agent, agent_grpc, metrics, environments = self._others
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
            f"--node-ip-address={LOOPBACK}", f"--port={self.gcs}", f"--num-cpus={self._cpus}",
            f"--object-store-memory={self._store_bytes}", f"--temp-dir={self.folder}",
            f"--include-dashboard={str(self._dashboard).lower()}", "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}", f"--ray-client-server-port={client}",
            f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={environments}",
            "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        log = self.folder / "start.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603  # Ray's own command
                tied([sys.executable, *command], signal.SIGTERM),
                env={**environ, **LOCAL_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + LOCAL_START_SECONDS
        while STARTED_OUTPUT not in log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > until:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise Away(f"Ray cannot be started on this machine: {lines[-1] if lines else 'it printed nothing'}")
            self._write_port(agent)
            time.sleep(0.1)

    def _write_port(self, agent: int) -> None:
        """Write the agent's port to a file: the raylet waits for the file even if the port is configured."""
        for gcs in self.folder.glob("session_latest/gcs_server_port_*"):
            port = gcs.with_name(gcs.name.replace("gcs_server_port", "dashboard_agent_listen_port"))
            if not port.exists():
                new = port.with_suffix(".new")
                new.write_text(str(agent))
                new.rename(port)

    def stop(self) -> None:
        """Stop all processes of Ray and remove its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(LOCAL_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # The kernel ends the processes that it started.
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _own_folder() -> tuple[Path, int]:
    """Return a new folder and the lock that marks it as used. Remove the folders that are no longer used."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_FOLDER_LENGTH:
        parent = Path("/tmp")  # noqa: S108  # chosen for its short path; mkdtemp makes a private folder in it
    for old in parent.glob(f"{FOLDER_PREFIX}*"):
        _remove_unused(old)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _remove_unused(folder: Path) -> None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return  # another user's, or just created
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # its owner is still alive
    finally:
        os.close(lock)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


class Cluster:
    """A driver's connection to its Ray; a process makes one in its life.

    Ray notices late that its head is gone. By then it ends the process, or leaves calls waiting forever. So this class
    watches the two servers that a driver depends on, the head's GCS and the raylet of its node, by plain connections.
    """

    def __init__(self, settings: RaySettings) -> None:
        self.jobs_url = settings.jobs_url
        """The URL of the Jobs API; empty if the cluster has no dashboard."""
        self._settings = settings
        self._opening: Future[dict[str, str]] | None = None
        self._close = threading.Event()
        self._closed = threading.Event()
        self._lost = False
        self._servers: dict[str, tuple[str, int]] = {}

    async def open(self) -> dict[str, str]:
        """Connect and return facts about the cluster. Raises Away or ImportError; may then be called again."""
        address = self._settings.address
        if address and address != "auto":
            await self._reach(address)
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = Future()
            # A dedicated thread that stays alive: Ray ties the processes that it starts to the starting thread.
            threading.Thread(target=self._hold, args=(self._opening,), name="ray connection", daemon=True).start()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                # Shielded: a caller that gives up does not stop the connecting and can wait for it again.
                return await asyncio.shield(asyncio.wrap_future(self._opening))
        except TimeoutError:
            raise Away(f"Ray at {address or 'this machine'} did not answer within {CONNECT_SECONDS:g} s") from None

    async def lost(self) -> str:
        """Wait until one of the cluster's servers is gone. Return which one and why, in one line."""
        watching = [asyncio.create_task(self._gone(name, host, port)) for name, (host, port) in self._servers.items()]
        watching.append(asyncio.create_task(self._silent()))
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            self._lost = True
            return done.pop().result()
        finally:
            for task in watching:
                task.cancel()

    async def gone(self) -> str:
        """Return in one line which of the cluster's servers is unreachable now; empty if none is."""
        for name, (host, port) in self._servers.items():
            try:
                await _connects(host, port)
            except (OSError, TimeoutError) as error:
                return f"{name} is gone: {str(error) or 'no answer'}"
        return ""

    async def close(self) -> None:
        """Leave the cluster; stop it if it was started here."""
        if self._opening is None:
            return
        self._close.set()
        await asyncio.to_thread(self._closed.wait)

    async def _reach(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            await _connects(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer within {REACH_SECONDS:g} s"
            raise Away(
                f"no Ray at {ADDRESS_VARIABLE}={address}: {why}; is its head up, and is this its GCS port?"
            ) from None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _hold(self, opened: Future[dict[str, str]]) -> None:
        local: LocalRay | None = None
        try:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            if not self._settings.address:
                os.environ.update(LOCAL_ENVIRONMENT)
                import ray  # noqa: F401  # first, since Ray may not be installed

                local = LocalRay(
                    self._settings.local_cpus, self._settings.local_store_bytes, dashboard=self._settings.dashboard
                )
                local.start()
                self.jobs_url = self.jobs_url or local.jobs_url
            info = self._init(local)
        except BaseException as error:
            _shut_down(local)
            # Ray raises arbitrary errors with long messages.
            known = isinstance(error, ImportError | Away)
            opened.set_exception(error if known else Away(f"Ray cannot be joined: {_first_line(error)}"))
            return
        opened.set_result(info)
        self._close.wait()
        # Leaving a lost head takes Ray long; this process exits without it.
        _shut_down(local, leave=not self._lost)
        self._closed.set()

    def _init(self, local: LocalRay | None) -> dict[str, str]:
        import ray  # not before the environment is set

        context = ray.init(
            self._settings.address if local is None else local.address,
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level="error",
        )
        own = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == own)
        host, _, port = context.address_info["gcs_address"].rpartition(":")
        self._servers = {
            f"the GCS of its head ({host}:{port})": (host, int(port)),
            "the raylet of the driver's node": (node["NodeManagerAddress"], int(node["NodeManagerPort"])),
        }
        dashboard = context.address_info.get("webui_url")
        if dashboard and not self.jobs_url:
            self.jobs_url = f"http://{dashboard}"
        return {
            "version": f"Ray {ray.__version__}",
            "address": f"{host}:{port}" if local is None else f"{host}:{port} (local)",
            "cpus": f"{ray.cluster_resources().get('CPU', 0):g}",
        }

    # -- watching --------------------------------------------------------------------------------------------------

    async def _gone(self, name: str, host: str, port: int) -> str:
        failed = 0
        while True:
            try:
                await _connects(host, port)
                failed = 0
            except (OSError, TimeoutError) as error:
                failed += 1
                if failed == MAX_FAILED_CHECKS:
                    return f"{name} is gone: {str(error) or 'no answer'}"
            await asyncio.sleep(CHECK_SECONDS)

    async def _silent(self) -> str:
        """Wait until the GCS no longer answers, fails or has no live node. Return which, in one line."""
        import ray

        while True:
            asking = asyncio.create_task(asyncio.to_thread(ray.nodes))
            done, _ = await asyncio.wait((asking,), timeout=SILENT_SECONDS)
            if not done:
                return f"the GCS of its head has not answered for {SILENT_SECONDS:g} s"
            if (error := asking.exception()) is not None:
                return f"the GCS of its head fails: {_first_line(error)}"
            if not any(node["Alive"] for node in asking.result()):
                return "none of its nodes is alive"
            await asyncio.sleep(5 * CHECK_SECONDS)


async def _connects(host: str, port: int) -> None:
    async with asyncio.timeout(REACH_SECONDS):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _shut_down(local: LocalRay | None, *, leave: bool = True) -> None:
    try:
        if leave and (ray := sys.modules.get("ray")) is not None:  # else there is nothing to leave
            ray.shutdown()
    except Exception as error:
        logger.warning("leaving Ray failed: %s", _first_line(error))
    if local is not None:
        local.stop()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
