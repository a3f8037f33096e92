"""Start services by forking a process that has imported them, since an import takes longer than most tests wait.

A fork has what `python -m services.<name>` has: its environment, a session and a log of its own, and the module as its
`__main__`. The app is imported in the fork, except the one that most tests use. All forks end with the process that
starts them, as other children do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime_core.base.lifeline import tie, tied
from runtime_core.bus.library import library
from runtime_core.telemetry.secret_search import candidate_pattern
from tests.mcp_servers.ledger import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
SOURCES = os.pathsep.join((str(ROOT / "libs" / "runtime_core" / "src"), str(ROOT)))
"""The PYTHONPATH of processes that a test starts: in a copy of the tree, they run the copy."""
IMPORTED = (
    "runtime_core.integrations.aworld.runner",
    "runtime_core.host.app_services",
    "runtime_core.host.service",
    "runtime_core.host.state_manager",
    "runtime_core.runs.hooks.around",
    "runtime_core.runs.hooks.pipeline",
    "runtime_core.trajectory.recorder",
    "aiosqlite",
    "pydantic.dataclasses",
    "redis.asyncio.cluster",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "tests.apps.fleet_app",
    "uvloop",
)
COMMAND = "runtime_core.cli.main"
MCP_SERVER = "tests.mcp_servers.desk"
STDIO_SERVERS = "tests.mcp_servers.stdio"
IMPORTED_FOR = {
    "services.gateway": (
        "anyio._backends._asyncio",
        "runtime_core.gateway.server",
        "uvicorn.lifespan.off",
        "uvicorn.protocols.http.httptools_impl",
    ),
    COMMAND: tuple(f"runtime_core.cli.{name}" for name in ("admin", "dead", "monitor", "schedule", "submit", "task")),
    STDIO_SERVERS: ("anyio._backends._asyncio", "mcp.server", "rich.console"),
    MCP_SERVER: ("anyio._backends._asyncio", "mcp.server", "rich.console", "uvicorn.protocols.http.httptools_impl"),
    "OPENAI_BASE_URL": (
        "genai_prices.data",
        "openai.resources.chat",
        "pydantic_ai.models.openai",
        "runtime_core.llm.pydantic_ai.definition",
    ),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "requests"),
    "tests.integration.integrations.actors.worker": (
        "runtime_core.integrations.actors.runtime",
        "tests.integration.integrations.actors.agents",
    ),
    "tests.openai_server": ("tests.openai_server.control", "tests.openai_server.serving"),
    VARIABLE: ("anyio._backends._asyncio", "runtime_core.calls.mcp.transport"),
}
"""Imported for the first process that runs this module, or that has this variable: each takes longer than its test."""
FORKED = (
    "services.",
    COMMAND,
    MCP_SERVER,
    STDIO_SERVERS,
    "tests.chaos.next_release",
    "tests.engine_backends.gateway",
    "tests.integration.integrations.actors.worker",
    "tests.openai_server",
)
TAKEN_OVER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Variables of Python that a fork takes over."""
LARGEST = 1 << 17
"""Bytes of a request: the environment is most of it."""


class Fork:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None  # as Popen's type has it
        self._forks = forks

    def poll(self) -> int | None:
        if self.returncode is None:
            self._forks.look(0)
        return None if self.returncode is None else int(self.returncode)

    def wait(self, timeout: float | None = None) -> int:
        end_at = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if end_at is None else end_at - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._forks.look(left)
        return int(self.returncode)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks, as the process of the tests sees it."""

    def __init__(self) -> None:
        self._forks: dict[int, Fork] = {}
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "tests.service_forks", str(theirs.fileno())], signal.SIGKILL),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": SOURCES},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path, errors: Path | None = None) -> Fork:
        """Run a module with its arguments in a new process that appends to `log`; its errors may go to a file apart."""
        request = {"command": command, "environ": dict(environ), "log": str(log), "errors": str(errors or log)}
        self._end.send(json.dumps(request).encode())
        while (pid := self._receive()) is None:
            pass
        fork = self._forks[pid] = Fork(self, pid)
        return fork

    def look(self, seconds: float | None) -> None:
        """Record each process that has ended. Wait this long for one; with None, until there is one."""
        while select.select([self._end], [], [], seconds)[0]:
            self._receive()
            seconds = 0

    def close(self) -> None:
        self._end.close()
        self._process.wait()

    def _receive(self) -> int | None:
        """Return the id of a process that was started, or note the status of one that has ended."""
        message = self._end.recv(LARGEST)
        if not message:
            raise RuntimeError(f"the process that forks services ended with {self._process.wait()}")
        pid, *ended = json.loads(message)
        if not ended:
            return int(pid)
        if fork := self._forks.pop(pid, None):
            [fork.returncode] = ended
        return None


def forks() -> Forks:
    """Return the forks of this process."""
    return _forks_of(os.getpid())


@functools.cache
def _forks_of(process: int) -> Forks:
    made = Forks()
    atexit.register(made.close)
    return made


def can_fork(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a fork does the same as a new process: it is a service, and no variable matters only at the start.

    The command, a gateway over a folder of `tests.engine_backends`, a process with agents as objects, a service of the
    next release, and the stand-ins for a model provider and an MCP server are services here. A PYTHONPATH may have more
    folders than ours.
    """
    special = {name: value for name, value in environ.items() if name.startswith("PYTHON") and name not in TAKEN_OVER}
    return (
        sys.platform == "linux"
        and command[0].startswith(FORKED)
        and set(SOURCES.split(os.pathsep)) <= set(environ.get("PYTHONPATH", "").split(os.pathsep))
        and all(os.environ.get(name) == value for name, value in special.items())
    )


def start(
    command: Sequence[str], environ: Mapping[str, str], log: Path, errors: Path | None = None
) -> Fork | subprocess.Popen[bytes]:
    """Start a module with its arguments, as a fork where that does the same.

    What it prints is appended to `log`, or its errors to `errors`.
    """
    if can_fork(command, environ):
        return forks().start(command, environ, log, errors)
    with log.open("ab") as output, (errors or log).open("ab") as apart:
        return subprocess.Popen(
            tied([sys.executable, "-m", *command], signal.SIGKILL),
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=apart,
            start_new_session=True,
        )


def serve(end: socket.socket) -> list[str]:
    """Fork for each request until the other end is closed. Return the command in each fork."""
    import_all(IMPORTED)
    library()
    candidate_pattern(())  # re2 remembers it: without secrets in its environment, a fork has the same one
    me = os.getpid()
    imported: set[str] = set()
    children: dict[int, int] = {}
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if child := children.pop(ready, 0):
                waiting.unregister(ready)
                os.close(ready)
                end.send(json.dumps([child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]).encode())
                continue
            message = end.recv(LARGEST)
            if not message:
                sys.exit()
            request = json.loads(message)
            if wanted := needed(request) - imported:
                imported |= wanted
                import_all(module for name in wanted for module in IMPORTED_FOR[name])
            child = os.fork()
            if child == 0:
                tie(me, signal.SIGKILL)
                for descriptor in children:
                    os.close(descriptor)
                return _become(request)
            descriptor = os.pidfd_open(child)
            children[descriptor] = child
            waiting.register(descriptor, select.POLLIN)
            end.send(json.dumps([child]).encode())


def needed(request: Mapping[str, Any]) -> set[str]:
    """Return the keys of `IMPORTED_FOR` that a request has."""
    return IMPORTED_FOR.keys() & {request["command"][0], *request["environ"]}


def import_all(modules: Iterable[str]) -> None:
    """Import modules for all forks that follow."""
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a process with threads must not fork"
    gc.freeze()


def _become(request: dict[str, Any]) -> list[str]:
    """Take over what a new process would be given. Return the command."""
    os.setsid()
    for descriptor, path in ((1, request["log"]), (2, request["errors"])):
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, descriptor)
        os.close(log)
    os.environ.clear()
    os.environ.update(request["environ"])
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [sys.path[0], *own, *(folder for folder in sys.path[1:] if folder not in SOURCES.split(os.pathsep))]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    return list(request["command"])


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as end:
        module, *sys.argv[1:] = serve(end)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
