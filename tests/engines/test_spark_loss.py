"""How steps end when a Spark Connect server dies, is absent, or has forgotten its client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from runtime_core.engines.driver.driver import Driver
from runtime_core.engines.protocol import Away, ConnectionState, Error, Registered, Value, Work
from runtime_core.engines.spark import backend as module
from runtime_core.engines.spark.backend import SparkBackend
from tests.conftest import ROOT
from tests.contracts.engine.functions import count_begun
from tests.engines.conftest import SparkServer, spark_server
from tests.engines.patience import PATIENCE_SECONDS, until
from tests.servers.process import free_port

# A JVM takes minutes to start on a machine that is busy enough, and these start three.
pytestmark = pytest.mark.timeout(900)


def work(name: str, /, **arguments: object) -> Work:
    call = Registered("tests.engines.spark_app:app", str(ROOT), name, json.dumps(arguments).encode())
    return Work(call, name, key=f"weft/t1/{uuid.uuid4().hex}", driver_side=name.endswith("_job"))


async def connected(driver: Driver) -> ConnectionState:
    async with asyncio.timeout(PATIENCE_SECONDS):
        state = driver.state
        while not state.connected:
            state = await driver.changed(state)
    return state


def gone(pid: int | str) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def server_of(driver: Driver) -> int:
    """Return the JVM that a driver has started."""
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    [java] = [pid for pid in children if Path("/proc", pid, "comm").read_text().strip() == "java"]
    return int(java)


async def test_a_server_killed_during_steps_is_lost_and_replaced(tmp_path: Path) -> None:
    folder = str(tmp_path)
    environment = os.environ | {"WEFT_SPARK_LOCAL_MASTER": "local[2]"}
    environment.pop("WEFT_SPARK_REMOTE", None)
    driver = Driver("spark", environment)
    await driver.start()
    try:
        state = await connected(driver)
        assert state.info["version"].startswith("4.")
        assert state.info["cpus"] == "2"
        steps = [
            asyncio.create_task(driver.run(work("asleep", folder=folder, name="call"))),
            asyncio.create_task(driver.run(work("slow_job", folder=folder, name="job"))),
        ]
        await until(lambda: count_begun(folder) == 2, "both run")
        workers = [path.read_text() for path in tmp_path.glob("begun-*")]
        os.kill(server_of(driver), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            for outcome in await asyncio.gather(*steps):
                assert isinstance(outcome, Error)
                assert (outcome.cause, outcome.type) == ("lost", "EngineLost")
        await until(lambda: all(gone(pid) for pid in workers), "the workers of the dead server are gone")
        await connected(driver)
        assert await driver.run(work("doubled", number=21)) == Value(b"42")
        server, pid = server_of(driver), driver.pid
    finally:
        await driver.stop()
    await until(lambda: gone(server), "the server ended with its driver")
    assert not list(Path(tempfile.gettempdir()).glob(f"weft-spark-{pid}-*"))


async def test_a_server_dies_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with suppress(BrokenPipeError), spark_server(2, "512m") as server:
        backend = SparkBackend({"WEFT_SPARK_REMOTE": server.url})
        await backend.connect()
        losing = asyncio.create_task(backend.lost())
        running = asyncio.create_task(backend.run(work("asleep", folder=folder, name="call"), lambda _: None))
        await until(lambda: count_begun(folder) == 1, "the call runs")
        worker = (tmp_path / "begun-call").read_text()
        os.kill(server.starter, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert "no server listens" in await losing
            outcome = await running
        assert isinstance(outcome, Error)
        assert outcome.cause == "lost"
        await until(lambda: gone(server.pid), "the server is gone")
        await until(lambda: gone(worker), "its worker is gone")
        await backend.close()


async def test_a_session_that_the_server_has_forgotten_is_a_loss(spark: SparkServer) -> None:
    remote = f"{spark.url}/;session_id={uuid.uuid4()}"
    backend, other = SparkBackend({"WEFT_SPARK_REMOTE": remote}), SparkBackend({"WEFT_SPARK_REMOTE": remote})
    await backend.connect()
    await other.connect()
    losing = asyncio.create_task(backend.lost())
    await other.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert "SESSION" in await losing
        outcome = await backend.run(work("doubled", number=1), lambda _: None)
    assert isinstance(outcome, Error)
    assert outcome.cause == "lost"
    await backend.close()


async def test_a_missing_server_is_reported_in_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    remote = f"sc://127.0.0.1:{port}"
    with pytest.raises(Away, match=rf"^no Spark Connect server listens at 127.0.0.1:{port} \(WEFT_SPARK_REMOTE="):
        await SparkBackend({"WEFT_SPARK_REMOTE": remote}).connect()
    monkeypatch.setattr(module, "CONNECT_SECONDS", 1.0)
    line = rf"127.0.0.1:{port} (does not answer as|cannot be used)"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Away, match=line):
        await SparkBackend({"WEFT_SPARK_REMOTE": remote}).connect()
