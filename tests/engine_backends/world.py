"""A fleet with gateways, a client, and the folder that stands for their cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.wire.events import StreamingMode, TaskResponse
from tests.engine_backends.files import FOLDER, Files
from tests.engine_backends.folder import alive
from tests.fleet import Fleet
from tests.servers.process import Server
from tests.servers.users import documented_users

WAIT = 120.0
"""Patience of a test, which decides nothing."""


@dataclass
class World:
    """Services, a client, and the folder that stands for a cluster."""

    fleet: Fleet
    client: Client
    files: Files

    async def step(self, function: str, engine: str = "ray", **arguments: object) -> TaskHandle:
        """Submit a task of one step."""
        wanted = {"engine": engine, "function": function, "arguments": arguments}
        return await self.client.submit("step", wanted, stream=StreamingMode.ALL)

    async def held(self, name: str, engine: str = "ray") -> TaskHandle:
        """Submit a task whose step runs until `open_gate` is called."""
        task = await self.step("hold", engine, folder=str(self.files.folder), name=name)
        await self.until(lambda: self.lines("held", name), f"{name} runs")
        return task

    def open_gate(self) -> None:
        (self.files.folder / "gate").touch()

    def lines(self, file: str, begin: str = "") -> list[str]:
        """Return the lines of a file of the folder that begin like this."""
        path = self.files.folder / file
        return [line for line in path.read_text().splitlines() if line.startswith(begin)] if path.exists() else []

    def stopped(self, name: str) -> bool:
        """Whether a held step has stopped: it was told to, or its process has ended."""
        pid = int(self.lines("held", f"{name} ")[0].split()[2])
        return bool(self.lines("stopped", f"{name} ")) or not alive(pid)

    async def connected(self, service: str) -> None:
        """Wait until all gateways are connected to their engine: steps wait only a minute for it."""
        members = [self.fleet.members[name] for name in self.fleet.names(service)]
        await self.until(lambda: all("connected to" in member.text() for member in members), "all are connected")

    async def until(self, check: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT
        while not check():
            assert time.monotonic() < deadline, f"not within {WAIT:g} s: {what}; {self.files.journal()}"
            await asyncio.sleep(0.02)

    def drivers(self) -> list[int]:
        """Return the driver processes that have connected, in order."""
        return [int(line.split()[1]) for line in self.lines("journal", "connected")]

    async def result(self, task: TaskHandle) -> TaskResponse:
        return await task.result(timeout=WAIT)


@asynccontextmanager
async def world(
    server: Server,
    namespace: str,
    folder: Path,
    *,
    engine: str = "ray",
    gateways: int = 1,
    environ: dict[str, str] | None = None,
    up: bool = True,
    real: bool = False,
    lease_seconds: float | None = None,
) -> AsyncIterator[World]:
    """Everything runs as its own user. The engine is the folder, or with `real` what the gateway's own service takes.

    With one gateway the lease is long: nobody adopts, and a machine that is busy declares nobody dead."""
    files = Files(folder / "engine")
    files.folder.mkdir()
    if up:
        files.up()
    service = f"{engine}-gateway"
    replicas = {"agent-handler": 1, "state-manager": 1, service: gateways}
    try:
        async with documented_users(server, namespace, *replicas, "client") as urls:
            fleet = Fleet(
                server.url,
                namespace,
                folder / "fleet",
                replicas=replicas,
                lease_seconds=lease_seconds or (1.0 if gateways > 1 else 10.0),
                app="tests.apps.engines_app:app",
                environ={FOLDER: str(files.folder), **(environ or {})},
                commands={} if real else {service: ("tests.engine_backends.gateway", engine)},
                urls=urls,
            )
            async with fleet, Client.connect(urls["client"], namespace=namespace) as client:
                yield World(fleet, client, files)
    finally:
        # Whatever became of the test, no worker waits for it any more.
        (files.folder / "gate").touch()


def parent_of(pid: int) -> int:
    """Return the parent of a process; -1 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
