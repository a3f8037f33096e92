"""The server behind `memory://`: a Valkey for this process alone, which exits with it and leaves no file.

It starts at first use and serves all threads and event loops of the process. `memory://` is its first database, which
all share; `new_database` returns an unused one. A forked child starts a separate server.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from runtime_core.base.lazy import load_redis
from runtime_core.base.lifeline import tied
from runtime_core.bus.connection import Transport
from runtime_core.bus.connector import MEMORY
from runtime_core.bus.embedded import SMALL_HASHES, exit_reason, find_binary, tuned
from runtime_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

DATABASES = 65_536
"""The server creates a database at its first use."""
START_SECONDS = 60.0
EXIT_WAIT_SECONDS = 5.0
"""How long a process that exits waits for a starting server, to kill it."""
POLL_SECONDS = 0.001
LONGEST_PATH = 100
"""In bytes. The path of a socket may have 108 on Linux and 104 on macOS."""
OURS_ALONE = 0o077
"""The umask of the server, so that other users of this machine cannot connect to its socket."""


class PrivateServer:
    """One server, started by a thread that waits for its exit.

    On Linux the kernel kills the server with the thread that started it, so this thread lasts as long as the process.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.path = _socket_path()
        self.ready: Future[str] = Future()
        """The URL, once the server replies, or a ConfigurationError."""
        self.ready.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it for others
        self.why_lost = ""
        """Why the server exited unexpectedly; empty while it runs."""
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="private server", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self.ready.done() and self.ready.exception() is not None

    def end(self) -> None:
        """Kill the server and remove its socket."""
        self._ending = True
        wait((self.ready,), EXIT_WAIT_SECONDS)
        if self.process is not None:
            self.process.kill()
            self._thread.join()
        self.path.unlink(missing_ok=True)

    def disown(self) -> None:
        """Leave the server to the process that this one was forked from."""
        if self.process is not None:
            self.process.returncode = 0  # else Popen would warn that it is still running

    def _run(self) -> None:
        with tempfile.TemporaryFile() as log:
            try:
                self.process = self._spawn(log)
                self._wait_ready(self.process, log)
            except BaseException as error:
                self.ready.set_exception(error)
                return
            self.ready.set_result(f"unix://{quote(str(self.path))}")
            status = self.process.wait()
            if not self._ending:
                # A killed server writes nothing about it to its log.
                said = "" if status == -signal.SIGKILL else f" (the last line of its log: {_last_line(log)})"
                self.why_lost = (
                    f"the server behind memory:// exited ({exit_reason(status)}), and its data is lost: "
                    f"restart this process{said}"
                )
                logger.error("%s", self.why_lost)

    def _spawn(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        settings = {
            "port": "0",
            "databases": str(DATABASES),
            "unixsocket": str(self.path),
            "dir": str(self.path.parent),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            **SMALL_HASHES,
            "daemonize": "no",
            "loglevel": "warning",
        }
        command = [str(find_binary()), *(word for name, value in settings.items() for word in (f"--{name}", value))]
        return subprocess.Popen(  # noqa: S603  # the binary of a package, and fixed arguments
            # SIGTERM, so that the server removes its socket.
            tied(command, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=tuned(os.environ),
            umask=OURS_ALONE,
            start_new_session=True,  # Ctrl-C is for this process
        )

    def _wait_ready(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        end_at = time.monotonic() + START_SECONDS
        while not _listens(self.path):
            if process.poll() is not None:
                how = exit_reason(process.returncode)
                raise ConfigurationError(f"memory://: its server exited at start ({how}): {_last_line(log)}")
            if time.monotonic() > end_at:
                process.kill()
                process.wait()
                raise ConfigurationError(f"memory://: its server did not reply within {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)


_lock = threading.Lock()
_server: PrivateServer | None = None
_unused: list[int] = []
_numbers = itertools.count(1)


def new_database() -> str:
    """Return the URL of an empty, unused database, as `memory://7`. `drop_database` releases it."""
    return f"{MEMORY}{_unused.pop() if _unused else next(_numbers)}"


async def drop_database(url: str, transport: Transport) -> None:
    """Empty a database of `new_database`, over any connection to it, and let others use it."""
    await transport.call("FLUSHDB", "ASYNC")
    _unused.append(int(url.removeprefix(MEMORY)))


async def private_server(url: str = MEMORY) -> str:
    """Return the address of this process's server, with the database of `url`. The first call starts the server.

    Raises ConfigurationError if there is no server for this platform, or it does not start or has exited.
    """
    try:
        server = _started()
    except OSError as error:
        raise ConfigurationError(
            f"memory://: no folder for its server's socket ({error}); set TMPDIR to one"
        ) from error
    load_redis()  # here: the client loads while the server starts

    address = await asyncio.wrap_future(server.ready)
    if server.why_lost:
        raise ConfigurationError(server.why_lost)
    return f"{address}?db={url.removeprefix(MEMORY) or 0}"


def why_lost() -> str:
    """Why the server of this process has ended on its own; empty while it runs."""
    return "" if _server is None else _server.why_lost


def _started() -> PrivateServer:
    global _server
    with _lock:
        if _server is None or _server.failed:
            _server = PrivateServer()
        return _server


@atexit.register
def _end() -> None:
    if _server is not None:
        _server.end()


def _forked() -> None:
    """Reset in a forked child: the server belongs to the parent, one of whose threads may hold the lock."""
    global _lock, _server
    if _server is not None:
        _server.disown()
    _lock, _server = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _socket_path() -> Path:
    name = f"weft-{os.getpid()}-{secrets.token_hex(8)}.sock"
    path = Path(tempfile.gettempdir(), name)
    return path if len(os.fsencode(path)) <= LONGEST_PATH else Path("/tmp", name)  # noqa: S108  # the name is random


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def _last_line(log: BinaryIO) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
