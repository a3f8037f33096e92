"""The life of one server process that speaks the Redis protocol."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from runtime_core.base.lifeline import tied

Append = Literal["always", "everysec", "no"]

HOST = "127.0.0.1"
START_SECONDS = 60.0
"""How long a server may take until it answers, on a machine that is busy with other tests."""
STOP_SECONDS = 10.0
ATTEMPTS = 8
"""Ports that are tried, since another process may take one between our look and the server's bind."""


class StartError(RuntimeError):
    """A server did not start; the message holds the end of its log."""


class Server:
    """One server on 127.0.0.1 that belongs to this process.

    The port and the data directory stay the same over `restart()`, so clients find it again and an
    append-only file is read again. Start it from the main thread: on Linux its life is tied to the thread
    that started it. As a context manager it starts on entry and is killed on exit.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        append: Append | None = "everysec",
        options: Sequence[str] = (),
    ) -> None:
        """`append` is the fsync policy of the append-only file, None for no file. `options` are further
        settings as on the server's command line, as in `("--maxmemory", "64mb")`.
        """
        self.command = tuple(command)
        self.directory = directory
        self.append = append
        self.options = tuple(options)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id. Raises RuntimeError when it is not running."""
        if self._process is None:
            raise RuntimeError(f"the server on port {self.port} is not running: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers PING. Raises StartError with the end of its log."""
        if self.running:
            raise RuntimeError(f"the server on port {self.port} runs already")
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.port:
            self._spawn()
            self._wait_ready()
            return
        for attempt in range(ATTEMPTS):
            self.port = free_port()
            self._spawn()
            try:
                self._wait_ready()
            except StartError as error:
                self.kill()
                if "in use" not in str(error) or attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    def kill(self) -> None:
        """Send SIGKILL, as a crash: nothing is flushed. Returns when the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGTERM, as an orderly shutdown; SIGKILL if it takes longer than ten seconds."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self) -> None:
        """Kill it (if it still runs) and start it on the same port and directory."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open and nothing answers. Returns when the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT: what was sent during the pause is now handled."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        """Return the server's standard output and error so far."""
        path = self.directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _spawn(self) -> None:
        settings = {
            "--bind": HOST,
            "--port": str(self.port),
            "--dir": str(self.directory),
            "--save": "",
            "--appendonly": "no" if self.append is None else "yes",
            "--appendfsync": self.append or "no",
            "--maxmemory-policy": "noeviction",
            "--daemonize": "no",
            "--loglevel": "notice",
        }
        arguments = [part for pair in settings.items() for part in pair]
        with (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                tied([*self.command, *arguments, *self.options], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for pytest, which then ends the servers in its own order.
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if not self.running:
                raise StartError(f"the server on port {self.port} ended at start; its log ends: {self._tail()}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"the server on port {self.port} did not answer within {START_SECONDS:.0f} s; "
                    f"its log ends: {self._tail()}"
                )
            time.sleep(0.005)
        if not self.running:
            # Another process answered on this port while ours failed to bind it.
            raise StartError(f"port {self.port} is in use by another server")

    def _tail(self) -> str:
        return " | ".join(self.log().splitlines()[-5:])


def free_port() -> int:
    """A port that nobody listens on, below the range that outgoing connections use.

    A port of that range could be taken by any client while our server is down between kill and restart.
    """
    while True:
        port = random.randint(10_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


def _answers(port: int) -> bool:
    """Whether a server there handles commands: it answers PING, or demands a password."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False
