"""RayEngine keeps the promises of every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from runtime_core.engines.driver.driver import Driver, RayEngine
from runtime_core.engines.runtime_engine import CallFailed
from runtime_core.errors import ConfigurationError
from tests.contracts.engine import functions
from tests.contracts.engine.promises import EnginePromises
from tests.engines.ray_cluster import RayCluster
from weft.engines import EngineCall, RunConfig, RuntimeEngine, engine_named

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Borrowing(RayEngine):
    """Uses the driver of the whole session, since another one would take seconds to start."""

    def __init__(self, config: RunConfig, driver: Driver) -> None:
        super().__init__(config)
        self._driver = driver

    async def _start(self) -> None:
        """It already runs."""

    async def _stop(self) -> None:
        """Other tests use it."""


class TestRayEngine(EnginePromises):
    @pytest_asyncio.fixture(loop_scope="session")
    async def engine(self, ray_driver: Driver) -> AsyncIterator[RuntimeEngine]:
        async with Borrowing(RunConfig(worker_num=self.workers), ray_driver) as made:
            yield made


async def test_a_worker_that_dies_fails_only_its_call(ray_driver: Driver) -> None:
    async with Borrowing(RunConfig(worker_num=2), ray_driver) as engine:
        died, lived = await engine.agather(functions.die, EngineCall(functions.add, (1,)), return_exceptions=True)
    assert isinstance(died, CallFailed)
    assert died.type == "WorkerDied"
    assert lived == 1


async def test_functions_outside_any_module_can_be_mapped(ray_driver: Driver) -> None:
    three = 3
    async with Borrowing(RunConfig(worker_num=2), ray_driver) as engine:
        assert await engine.map(lambda item: item * three, [1, 2]) == [3, 6]


async def test_it_finds_its_cluster_by_address_and_takes_its_size(ray_cluster: RayCluster) -> None:
    async with engine_named("ray", RunConfig(address=ray_cluster.address)) as engine:
        assert await engine.map(functions.add, range(8)) == list(range(8))
        with pytest.raises(CallFailed) as failed:
            await engine.map(functions.fail, ["why"])
    assert any("in fail" in note for note in failed.value.__cause__.__notes__)  # type: ignore[union-attr]


async def test_a_missing_cluster_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"RayEngine: no Ray at WEFT_RAY_ADDRESS=127\.0\.0\.1:1") as error:
        await engine_named("ray", RunConfig(address="127.0.0.1:1")).start()
    assert "\n" not in str(error.value)
