"""A broker and services, as separate processes on a fresh folder."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

from benchmarks.child import READY_SECONDS, ROOT, Child, cpu_seconds
from runtime_core.bus.connection import Transport
from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect

SERVICES = ("agent_handler", "tool_handler", "state_manager", "trajectory_recorder")
BROKER = "broker"
NAMESPACE = "weft"
POLL_SECONDS = 0.02


class Stack:
    """The processes that `started` has started."""

    def __init__(self, folder: Path, broker: EmbeddedServer, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.services: dict[str, Child] = {}
        self._broker = broker
        self._environ = {
            "WEFT_APP": "benchmarks.app:app",
            "WEFT_LOG_LEVEL": "warning",
            **settings,
            "WEFT_DATA_DIR": str(folder),
            "WEFT_REDIS_URL": broker.url,
        }

    @property
    def url(self) -> str:
        return self._broker.url

    @property
    def trajectories(self) -> Path:
        """The store, a SQLite file."""
        return self.folder / "trajectory.db"

    def cpu_seconds(self) -> dict[str, float]:
        """Return what each process has used so far, by name."""
        assert self._broker.pid is not None
        used = {name: service.cpu_seconds() for name, service in self.services.items()}
        return {**used, BROKER: cpu_seconds(self._broker.pid)}

    async def start_service(
        self, service: str, name: str = "", *, profile: Path | None = None, counted: bool = False
    ) -> Child:
        """Start another process; `profile` is the file for its cProfile data. On `counted`, see `counted_process`."""
        run = [f"services.{service}"] if profile is None else ["benchmarks.profiled_service", service, str(profile)]
        child = await self._start(name or service, self._counted(service) if counted else run)
        self.services[child.name] = child
        return child

    async def start_client(self, profile: Path | None = None, *, counted: bool = False) -> Child:
        """Start a driver on Weft's client and wait until it is ready for orders."""
        run = ["benchmarks.client_process", *([str(profile)] if profile else [])]
        client = await self._start("client", self._counted("client") if counted else run)
        await client.ready()
        return client

    def _counted(self, process: str) -> list[str]:
        return ["benchmarks.counted_process", process, str(self.folder / f"{process}.counts")]

    async def until_alive(self) -> None:
        """Wait until the broker knows every service. Raises RuntimeError with the end of a missing one's log."""
        transport = await connect(self.url)
        deadline = time.monotonic() + READY_SECONDS
        try:
            while missing := await self._missing(transport):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{missing[0].name} was not there within {READY_SECONDS:g} s: {missing[0].said()}"
                    )
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await transport.close()

    async def _missing(self, transport: Transport) -> list[Child]:
        """An owner's name holds its process id."""
        owners = cast(list[bytes], await transport.call("ZRANGE", Keys(NAMESPACE, 0).alive, 0, -1))
        names = b" ".join(owners).decode()
        return [child for child in self.services.values() if f".{child.pid}." not in names]

    async def _start(self, name: str, run: list[str]) -> Child:
        return await Child.start(name, [sys.executable, "-m", *run], self._environ, self.folder / f"{name}.log")


@contextlib.asynccontextmanager
async def started(
    settings: Mapping[str, str] | None = None,
    *,
    but: tuple[str, ...] = (),
    profiled: Mapping[str, Path] | None = None,
    counted: bool = False,
) -> AsyncIterator[Stack]:
    """Everything that Weft needs, one replica of each service, stopped and removed at the end.

    `settings` are variables of the environment, `but` names services to leave out, `profiled` those to run under a
    profiler; `counted` services count their calls. Where the block fails the services are killed, and the error is the
    block's own.
    """
    folder = Path(tempfile.mkdtemp(prefix="weft-bench-"))
    broker = EmbeddedServer(folder)
    await broker.start()
    stack = Stack(folder, broker, settings or {})
    try:
        for service in SERVICES:
            if service not in but:
                await stack.start_service(service, profile=(profiled or {}).get(service), counted=counted)
        await stack.until_alive()
        yield stack
        for child in stack.services.values():
            await child.stop()
    finally:
        for child in stack.services.values():
            await child.kill()
        await broker.stop()
        shutil.rmtree(folder)


def where(path: Path) -> str:
    """Return a path relative to the repository if it is inside it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
