"""A Ray of one node on this machine, which ends with the process that has started it.

By Ray's own command and not by `ray.init`, since only there all its ports can be given. Its raylet waits 15 seconds
for the agents to write down the ports that they have found, and then gives up: too short on a busy machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from runtime_core.engines.protocol import Away
from runtime_core.lifeline import tied

LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 for the address of the host, and listens there."""
START_SECONDS = 150.0
STOP_SECONDS = 6.0
FOLDER_PREFIX = "weft-ray-"
LONGEST_TEMPORARY = 30
"""Characters of the temporary folder's name: the names of Ray's sockets are inside, and may have 107 in all."""
STARTED = b"--block"
"""Printed when it takes drivers."""
ENVIRONMENT = {
    # Nobody else uses it, and its token would have to be kept in the home folder.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": str(int(START_SECONDS)),
    "RAY_agent_register_timeout_ms": str(int(START_SECONDS * 1000)),
}
"""Also of the process that uses it."""


class LocalRay:
    """One Ray, in a folder of its own, which goes with it."""

    def __init__(self, cpus: int, store_bytes: int, *, dashboard: bool = False) -> None:
        self.folder, self._lock = _own_folder()
        self.gcs, self._dashboard_port, *self._others = _free_ports(7)
        self._cpus = cpus
        self._store_bytes = store_bytes
        self._dashboard = dashboard
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What drivers are given."""
        return f"{LOOPBACK}:{self.gcs}"

    @property
    def jobs_url(self) -> str:
        """Of the Jobs API; empty without a dashboard."""
        return f"http://127.0.0.1:{self._dashboard_port}" if self._dashboard else ""

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Start it and wait until it takes drivers; again after it was killed. It ends with the thread that calls this.

        Raises Away.
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
                env={**environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + START_SECONDS
        while STARTED not in log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace").strip().splitlines()
                raise Away(f"Ray cannot be started on this machine: {said[-1] if said else 'it says nothing'}")
            self._write_port(agent)
            time.sleep(0.1)

    def _write_port(self, agent: int) -> None:
        """Write down the agent's port: the raylet waits for that also where the port was given."""
        for gcs in self.folder.glob("session_latest/gcs_server_port_*"):
            port = gcs.with_name(gcs.name.replace("gcs_server_port", "dashboard_agent_listen_port"))
            if not port.exists():
                new = port.with_suffix(".new")
                new.write_text(str(agent))
                new.rename(port)

    def stop(self) -> None:
        """End all of it, and remove its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # What it has started is tied to it by the kernel.
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _own_folder() -> tuple[Path, int]:
    """A new folder, and the lock that says that it is used; those that nobody uses any more go."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_TEMPORARY:
        parent = Path("/tmp")  # noqa: S108  # only its shortness counts; the folder in it is made for us alone
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
        return  # another user's, or made this moment
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # who has made it lives
    finally:
        os.close(lock)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
