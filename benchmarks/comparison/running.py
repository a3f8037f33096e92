"""The processes of one system during one round: broker or server, workers and driver, all on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.child import READY_SECONDS, Child, cpu_seconds
from benchmarks.comparison.environment import environment, restate_server
from benchmarks.comparison.systems import System
from benchmarks.stack import POLL_SECONDS
from runtime_core.bus.embedded import EmbeddedServer


class Running:
    """A started system. `driver` takes orders."""

    def __init__(self, driver: Child, others: list[Child], broker: EmbeddedServer | None) -> None:
        self.driver = driver
        self._others = others
        self._broker = broker

    def cpu_seconds(self) -> float:
        """The CPU time of all its processes so far."""
        used = sum(child.cpu_seconds() for child in (self.driver, *self._others))
        return used + (cpu_seconds(self._broker.pid) if self._broker is not None and self._broker.pid else 0.0)


@contextlib.asynccontextmanager
async def running(system: System) -> AsyncIterator[Running]:
    """Start a system in a fresh folder; end it and remove the folder afterwards."""
    programs = environment(system.lock)
    folder = Path(tempfile.mkdtemp(prefix="weft-bench-"))
    broker = EmbeddedServer(folder) if system.broker else None
    others: list[Child] = []
    try:
        environ = {"WEFT_BENCH_FOLDER": str(folder), "DBOS_TRACING_ENABLED": "false"}
        address = f"127.0.0.1:{_free_port()}"
        environ["WEFT_BENCH_ADDRESS"] = f"http://{address}" if system.restate else address
        if broker is not None:
            await broker.start()
            environ["WEFT_BENCH_REDIS_URL"] = broker.url
        if system.restate:
            others.append(await _restate(folder, environ))
        for name, (program, *rest) in system.workers.items():
            command = [str(programs / program), *(word.format(address=address) for word in rest)]
            # By this name it ends by a signal: a name that begins with `client` ends with its input.
            others.append(await Child.start(f"worker {name}", command, environ, folder / f"{name}.log"))
            if name == system.listens:
                await _until_open(address, others[-1])
        program, *rest = system.driver
        driver = await Child.start("client", [str(programs / program), *rest], environ, folder / "driver.log")
        try:
            await driver.ready()
            yield Running(driver, others, broker)
            await driver.stop()
        finally:
            await driver.kill()
    finally:
        for child in reversed(others):
            await child.kill()
        if broker is not None:
            await broker.stop()
        shutil.rmtree(folder)


async def _restate(folder: Path, environ: dict[str, str]) -> Child:
    ports = {name: _free_port() for name in ("ingress", "admin", "node")}
    environ["WEFT_BENCH_INGRESS"] = f"http://127.0.0.1:{ports['ingress']}"
    environ["WEFT_BENCH_ADMIN"] = f"http://127.0.0.1:{ports['admin']}"
    settings = {
        "RESTATE_BASE_DIR": str(folder / "restate"),
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ports['ingress']}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{ports['admin']}",
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{ports['node']}",
        "RESTATE_ADVERTISED_ADDRESS": f"http://127.0.0.1:{ports['node']}",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_LOG_FILTER": "error",
    }
    server = await Child.start(
        "server of Restate", [str(restate_server())], {**environ, **settings}, folder / "server.log"
    )
    for name in ("ingress", "admin"):
        await _until_open(f"127.0.0.1:{ports[name]}", server)
    return server


async def _until_open(address: str, child: Child) -> None:
    """Wait until somebody listens there. Raises RuntimeError with the end of the child's log."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{child.name} did not listen within {READY_SECONDS:g} s: {child.said()}") from None
            await asyncio.sleep(POLL_SECONDS)
        else:
            writer.close()
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
