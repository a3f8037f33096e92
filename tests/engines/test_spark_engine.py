"""SparkEngine keeps the promises of every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from runtime_core.engines.driver.driver import Driver, SparkEngine
from runtime_core.engines.runtime_engine import CallFailed
from runtime_core.errors import ConfigurationError
from tests.contracts.engine import functions
from tests.contracts.engine.promises import EnginePromises
from tests.engines.conftest import SparkServer
from tests.servers.process import free_port
from weft.engines import EngineCall, RunConfig, RuntimeEngine, engine_named

# The first of them starts a JVM, which takes minutes on a machine that is busy enough.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


class Borrowing(SparkEngine):
    """Uses the driver of the whole session, since another one would take seconds to start."""

    def __init__(self, config: RunConfig, driver: Driver) -> None:
        super().__init__(config)
        self._driver = driver

    async def _start(self) -> None:
        """It already runs."""

    async def _stop(self) -> None:
        """Other tests use it."""


class TestSparkEngine(EnginePromises):
    @pytest_asyncio.fixture(loop_scope="session")
    async def engine(self, spark_driver: Driver) -> AsyncIterator[RuntimeEngine]:
        async with Borrowing(RunConfig(worker_num=self.workers), spark_driver) as made:
            yield made


async def test_a_worker_that_dies_fails_only_its_call(spark_driver: Driver) -> None:
    three = 3
    async with Borrowing(RunConfig(worker_num=2), spark_driver) as engine:
        died, lived, local = await engine.agather(
            functions.die, EngineCall(functions.add, (1,)), lambda: three, return_exceptions=True
        )
    assert isinstance(died, CallFailed)
    assert died.type == "WorkerDied"
    assert (lived, local) == (1, 3)


async def test_it_finds_its_server_by_address_and_takes_its_size(spark: SparkServer) -> None:
    async with engine_named("spark", RunConfig(address=spark.url)) as engine:
        assert await engine.map(functions.add, range(8)) == list(range(8))


async def test_a_missing_server_is_reported_in_one_line() -> None:
    address = f"sc://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError, match=r"^SparkEngine: no Spark Connect server listens at 127") as error:
        await engine_named("spark", RunConfig(address=address)).start()
    assert "\n" not in str(error.value)
