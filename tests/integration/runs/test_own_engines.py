"""Engines of the user's own, in `ctx.engine` and `conf.engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from weft import AgentContext, App, RetryPolicy, SubmitOptions
from weft.aworld import Runners, Task
from weft.engines import EngineCall, LocalEngine, RunConfig, RuntimeEngine
from weft.errors import ConfigurationError, InvalidInput
from weft.testing import LocalApp

pytestmark = pytest.mark.usefixtures("data_folder")


class Counting(LocalEngine):
    """Counts its calls and objects."""

    made: list[Counting] = []  # noqa: RUF012  # what the test reads

    def __init__(self, config: RunConfig | None = None) -> None:
        super().__init__(config)
        self.called: list[str] = []
        self.closed = False
        self.made.append(self)

    def func_wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.called.append("call")
        return function

    async def close(self) -> None:
        self.closed = True
        await super().close()


class Overriding(RuntimeEngine):
    """Overrides `execute`, as AWorld's documents show it."""

    async def execute(self, funcs: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]  # the documents' own signature
        return [func(*args, **kwargs) for func in funcs]

    def _prepare(self, call: EngineCall) -> object:
        raise AssertionError("execute is overridden")

    async def _run(self, prepared: Any, timeout_seconds: float | None) -> object:
        raise AssertionError("execute is overridden")


COUNTING, OVERRIDING = f"{__name__}:Counting", f"{__name__}:Overriding"


def built() -> App:
    app = App("computes")

    @app.engine_function(retry=RetryPolicy(attempts=1))
    def double(number: int) -> int:
        if number < 0:
            raise ValueError(f"{number} is negative")
        return 2 * number

    @app.agent("by-name", retry=RetryPolicy(attempts=1))
    async def by_name(ctx: AgentContext, engine: str) -> object:
        return [
            await ctx.engine(engine).call(double, number=2),
            [str(each) for each in await ctx.engine(engine).map(double, [1, -1], return_exceptions=True)],
            ctx.engine(engine).name,
        ]

    @app.agent("by-default", retry=RetryPolicy(attempts=1))
    async def by_default(ctx: AgentContext, number: int) -> object:
        return [ctx.engine().name, await ctx.engine().call("double", number=number)]

    return app


@pytest.mark.parametrize("engine", [COUNTING, OVERRIDING])
async def test_an_agent_names_an_engine_that_its_app_has_declared(engine: str) -> None:
    app = built()
    app.add_engine(Counting)
    app.add_engine(Overriding)
    async with LocalApp(app) as client:
        answer = (await (await client.submit("by-name", engine)).result(timeout=60)).value()
    assert answer[0] == 4
    assert answer[1][0] == "2"
    assert "-1 is negative" in answer[1][1]
    assert answer[2] == engine


async def test_one_object_of_the_engine_serves_a_process_and_is_closed_with_it() -> None:
    Counting.made.clear()
    app = built()
    app.add_engine(Counting, RunConfig(worker_num=2))
    async with LocalApp(app) as client:
        for number in (1, 2):
            task = await client.submit("by-default", number, options=SubmitOptions(engine=COUNTING))
            assert (await task.result(timeout=60)).value() == [COUNTING, 2 * number]
    [engine] = Counting.made
    assert (engine.called, engine.config.worker_num, engine.closed) == (["call", "call"], 2, True)


async def test_an_error_of_the_function_is_that_of_every_engine() -> None:
    app = built()
    app.add_engine(Overriding)
    async with LocalApp(app) as client:
        task = await client.submit("by-default", -1, options=SubmitOptions(engine=OVERRIDING))
        response = await task.result(timeout=60)
    assert "-1 is negative" in response.msg


async def test_a_task_of_this_process_brings_its_engine() -> None:
    response = await Runners.run(3, agent="by-default", app=built(), conf={"engine": COUNTING})
    assert response.value() == [COUNTING, 6]


@pytest.mark.parametrize(
    ("engine", "told"),
    [("tests.nowhere:Engine", "cannot be loaded"), (f"{__name__}:RetryPolicy", "a subclass of RuntimeEngine")],
)
async def test_a_wrong_engine_of_a_task_is_refused_at_the_call(engine: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as refused:
        await Runners.run_task(Task(agent="by-default", conf={"engine": engine}), app=built())
    assert refused.value.field == "conf.engine"


async def test_an_engine_that_is_not_declared_is_refused_with_the_known_ones() -> None:
    app = built()
    app.add_engine(Counting)
    async with LocalApp(app) as client:
        with pytest.raises(InvalidInput, match="choose from local, ray, spark"):
            await client.submit("by-default", 1, options=SubmitOptions(engine="rray"))
        task = await client.submit("by-name", "os:path")
        assert f"there are local, ray, spark, {COUNTING}" in (await task.result(timeout=60)).msg


def test_an_object_that_is_not_an_engine_cannot_be_declared() -> None:
    app = built()
    with pytest.raises(ConfigurationError, match="a subclass of RuntimeEngine"):
        app.add_engine(RetryPolicy)  # type: ignore[arg-type]  # what a program may do wrong
    app.add_engine(Counting)
    app.add_engine(Counting)
    with pytest.raises(ConfigurationError, match="another config"):
        app.add_engine(Counting, RunConfig(worker_num=3))
