"""The local engine in its three modes keeps the promises of every engine."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.contracts.engine import functions
from tests.contracts.engine.promises import EnginePromises
from weft.engines import LocalEngine, RunConfig, RuntimeEngine

MODES = ("threads", "processes", "async")


def local(mode: str) -> LocalEngine:
    return LocalEngine(RunConfig(mode=mode, worker_num=EnginePromises.workers))


class TestLocalEngine(EnginePromises):
    @pytest.fixture(params=MODES)
    async def engine(self, request: pytest.FixtureRequest) -> AsyncIterator[RuntimeEngine]:
        async with local(request.param) as made:
            yield made


@pytest.mark.parametrize("mode", MODES)
async def test_an_engine_starts_by_itself(mode: str) -> None:
    engine = local(mode)
    assert await engine.map(functions.add, [1]) == [1]
    await engine.close()
    await engine.close()


class Doubling(LocalEngine):
    def func_wrapper(self, function: Callable[..., int]) -> Callable[..., int]:
        return functools.partial(twice, function)


def twice(function: Callable[..., int], *args: int) -> int:
    return 2 * function(*args)


@pytest.mark.parametrize("mode", MODES)
async def test_a_custom_engine_may_wrap_functions(mode: str) -> None:
    async with Doubling(RunConfig(mode=mode, worker_num=1)) as engine:
        assert await engine.map(functions.add, [1, 2]) == [2, 4]


async def test_a_thread_sees_the_context_of_its_caller() -> None:
    async with local("threads") as engine:
        [name] = await engine.agather(lambda: threading.current_thread().name)
    assert name == "weft engine call"
