"""Fixtures of the tests that need Ray and Spark. Without both (in the usual environment) nothing is collected here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from runtime_core.engines.driver.driver import Driver
from tests.conftest import ROOT
from tests.engines.ray_cluster import RayCluster

# Spark lives for minutes here: code that is compiled once, by the quick compiler, takes a third less of the processors.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
collect_ignore_glob = [] if find_spec("ray") and find_spec("pyspark") else ["*"]


@dataclass(frozen=True)
class SparkServer:
    """A Spark Connect server on this machine."""

    url: str
    pid: int
    starter: int
    """The process that it is tied to."""


@contextmanager
def spark_server(tasks: int, memory: str) -> Iterator[SparkServer]:
    """Start one that runs this many tasks at once. It ends with the block."""
    environment = os.environ | {"WEFT_SPARK_LOCAL_MASTER": f"local[{tasks}]", "WEFT_SPARK_LOCAL_MEMORY": memory}
    # Not pytest's own import mode: as a user's program, from the folder of the repository.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.connect_server_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the Spark Connect server did not start"
        url, pid = line.split()
        yield SparkServer(url, int(pid), process.pid)
        process.communicate()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkServer]:
    """The Spark Connect server that tests share; it runs four tasks at once."""
    # All results of `SparkEngine` go through its heap, and some are large.
    with spark_server(4, "2g") as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def spark_driver(spark: SparkServer) -> AsyncIterator[Driver]:
    """A driver of that server. Its users run on the session's loop."""
    driver = Driver("spark", {**os.environ, "PYTHONPATH": str(ROOT), "WEFT_SPARK_REMOTE": spark.url})
    await driver.start()
    try:
        state = await driver.reached()
        assert state.connected, state.reason
        yield driver
    finally:
        await driver.stop()


@pytest.fixture(scope="session")
def ray_blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The blob store of the shared driver of Ray."""
    return tmp_path_factory.mktemp("blobs")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """The Ray cluster that tests share; it runs four calls at once."""
    with RayCluster(4) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ray_driver(ray_cluster: RayCluster, ray_blobs: Path) -> AsyncIterator[Driver]:
    """A driver of that cluster. Its users run on the session's loop."""
    environ = {**ray_cluster.environ, "PYTHONPATH": str(ROOT), "WEFT_BLOB_URL": ray_blobs.as_uri()}
    driver = Driver("ray", environ)
    await driver.start()
    try:
        state = await driver.reached()
        assert state.connected, state.reason
        yield driver
    finally:
        await driver.stop()
