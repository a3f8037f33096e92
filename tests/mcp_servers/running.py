"""A server that listens on a port, as a process that a test may kill and start again."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.process import free_port
from tests.service_forks import MCP_SERVER, SOURCES, Fork, start

START_SECONDS = 60.0


class ListeningServer:
    """`tests.mcp_servers.desk` on 127.0.0.1. The port stays the same when it is started again."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._log = folder / "desk.log"
        self._env = {**os.environ, "PYTHONPATH": SOURCES, **env}
        self.port = free_port()
        self._process: Fork | subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until the port is open."""
        self._process = start((MCP_SERVER, str(self.port)), self._env, self._log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
