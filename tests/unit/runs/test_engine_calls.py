"""The requests of `ctx.engine(...)`, and the results for the code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.engines.local import EngineCompute, LocalEngine
from runtime_core.engines.protocol import StepInfo
from runtime_core.engines.results import Results
from runtime_core.engines.runtime_engine import RunConfig
from runtime_core.errors import ConfigurationError
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Call
from runtime_core.runs.journal import pack
from runtime_core.runs.ports import Meta
from runtime_core.wire.step import RESULT_ERROR, RESULT_OK
from tests.apps import remote_app
from tests.apps.remote_app import app as functions
from tests.unit.runs.run_world import Program, World, calls_of
from weft import App
from weft.engines import EngineContext, Reference
from weft.errors import EngineError, InvalidInput

REFERENCE = {"weft.reference": "file:///blobs/a/b.json", "bytes": 9}


async def asked(
    code: Callable[[AgentContext, object], Coroutine[Any, Any, object]], answer: object, status: bytes
) -> tuple[Call, Any]:  # Any: JSON
    """Run until the code makes a call, answer it, and return the code's result and its calls."""
    world = World(functions=functions.functions)
    program = Program(code)
    turn = await world.turn(program)
    assert isinstance(turn, Suspended), turn
    [call] = calls_of(turn)
    assert world.run is not None
    world.run.deliver(call.step, pack(call.digest, status, 1, json.dumps(answer).encode()))
    end = await world.run.advance()
    assert isinstance(end, Completed), end
    return call, json.loads(end.output)


async def test_a_call_of_a_cluster_is_its_name_and_arguments() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        given = Reference("file:///blobs/a/b.json", 9)
        found = await ctx.engine("ray").call(remote_app.rank_by_two, passages=[given, {"in": given}])
        assert isinstance(found["large"][0], Reference)
        return found

    call, seen = await asked(code, {"large": [REFERENCE], "n": 1}, RESULT_OK)
    assert (call.kind, call.name, call.key, call.pool) == ("ray", "rank@2", "", "")
    passages = json.loads(call.data)["passages"]
    assert [Reference.from_value(passages[0]), Reference.from_value(passages[1]["in"])] == [
        Reference("file:///blobs/a/b.json", 9)
    ] * 2
    assert seen["large"][0]["weft.reference"] == "file:///blobs/a/b.json"


async def test_a_map_is_one_call() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        step = ctx.engine("spark").map("add", iter([1, 2, 3]), in_flight=2, return_exceptions=True, right=5)
        one, two, three = await step
        assert isinstance(two, EngineError)
        assert isinstance(three, Reference)
        return [one, two.type, two.message]

    answer = [6, {"weft.error": {"type": "ValueError", "message": "no"}}, REFERENCE]
    call, seen = await asked(code, answer, RESULT_OK)
    assert (call.kind, call.name, call.key) == ("spark", "add", "map")
    assert json.loads(call.data) == {
        "over": "left", "items": [1, 2, 3], "arguments": {"right": 5}, "in_flight": 2, "return_exceptions": True,
    }  # fmt: skip
    assert seen == [6, "ValueError", "no"]


async def test_a_function_of_another_app_is_requested_by_its_name() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        try:
            return await ctx.engine("ray").map("theirs", [1])
        except EngineError as error:
            return [error.type, error.message]

    call, seen = await asked(code, {"type": "KeyError", "message": "item 0: 'x'"}, RESULT_ERROR)
    assert (call.name, json.loads(call.data)["over"]) == ("theirs", "")
    assert seen == ["KeyError", "item 0: 'x'"]


@pytest.mark.parametrize(("conf", "kind"), [("ray", "ray"), ("spark", "spark")])
async def test_the_task_may_choose_the_engine(conf: str, kind: str) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        assert ctx.engine().name == conf
        return await ctx.engine().call("theirs")

    world = World(functions=functions.functions)
    run = world.new_run(Program(code))
    run.meta = Meta(engine=conf)
    turn = await run.advance()
    assert isinstance(turn, Suspended)
    assert [call.kind for call in calls_of(turn)] == [kind]
    await run.aclose()


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda ctx: ctx.engine("local").call(remote_app.job, table="t"), InvalidInput, "is a Spark job"),
        (lambda ctx: ctx.engine("ray").call("job", table="t"), InvalidInput, "is a Spark job"),
        (lambda ctx: ctx.engine("spark").call(remote_app.train, epochs=1), InvalidInput, "is a batch job of Ray"),
        (lambda ctx: ctx.engine("ray").map(remote_app.train, [1]), InvalidInput, "takes no items"),
        (lambda ctx: ctx.engine("spark").map("job", [1]), InvalidInput, "takes no items"),
        (lambda ctx: ctx.engine("ray").call("rank", passages=[]), ConfigurationError, "has several versions"),
        (lambda ctx: ctx.engine("ray").call("rank@3", passages=[]), ConfigurationError, "has no version '3'"),
        (lambda ctx: ctx.engine("local").call("rank@3"), ConfigurationError, "has no version '3'"),
        (lambda ctx: ctx.engine("mars").call("add"), InvalidInput, "'mars' is not an engine; there are local, ray"),
        (lambda ctx: ctx.engine("ray").map("add", "text"), InvalidInput, "a str has no items to map over"),
        (lambda ctx: ctx.engine("ray").map("add", 7), InvalidInput, "a int has no items to map over"),
        (lambda ctx: ctx.engine("ray").map("add", [1], in_flight=-1), InvalidInput, "-1 is not a whole number from 0"),
        (lambda ctx: ctx.engine("ray").map("add", [1], left=1, right=1), InvalidInput, "leave none for the items"),
        (lambda ctx: ctx.engine("ray").map("add", [object()]), InvalidInput, "cannot be written as JSON"),
    ],
)
async def test_an_engine_refuses_an_unsupported_function_before_sending_it(
    use: Callable[[AgentContext], Awaitable[object]], kind: type[Exception], message: str
) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        await use(ctx)
        return None

    world = World(functions=functions.functions)
    end = await world.play(code)
    assert isinstance(end, Failed)
    assert (end.type, end.retryable) == (kind.__name__, False)
    assert message in end.message
    assert world.asked == []
    assert world.recorded == []


async def test_a_local_map_is_one_step_with_progress_and_the_same_when_it_is_replayed() -> None:
    app = App("maps")
    calls: list[int] = []

    @app.engine_function
    def tenfold(number: int, ctx: EngineContext, factor: int = 10) -> dict[str, object]:
        calls.append(number)
        if number == 2:
            raise ValueError("not two")
        return {"value": number * factor, "key": ctx.idempotency_key, "run": ctx.run_id}

    async def code(ctx: AgentContext, _: object) -> object:
        mapped = await ctx.engine("local").map(tenfold, range(4), return_exceptions=True, factor=3)
        try:
            await ctx.engine("local").map(tenfold, [1, 2, 2])
        except EngineError as error:
            failed = str(error)
        empty = await ctx.engine("local").map(tenfold, [])
        await ctx.sleep(1)
        return [repr(each) if isinstance(each, EngineError) else each for each in mapped] + [failed, empty]

    for cold in (False, True):
        calls.clear()
        world = World(functions=app.functions, cold=cold)
        end = await world.play(code)
        assert isinstance(end, Completed), end
        first, second, third, fourth, failed, empty = json.loads(end.output)
        assert first == {"value": 0, "key": "t-1/r/1", "run": "r/1"}
        assert (second["value"], fourth["value"]) == (3, 9)
        assert third == "EngineError('ValueError: not two')"
        assert failed == "ValueError: item 1: not two (2 of 3 failed)"
        assert empty == []
        assert sorted(calls) == [0, 1, 1, 2, 2, 2, 3]
        assert [row[1] for row in world.rows if row[0] == "engine"] == ["1", "2", "3"]
        assert ("1", {"done": 4, "failed": 1, "total": 4}) in world.progressed


class Counting(EngineCompute):
    """Five processes that count their concurrent calls."""

    def __init__(self) -> None:
        super().__init__(LocalEngine(RunConfig(worker_num=5)))
        self.running = self.most = 0

    async def run(self, function: object, arguments: bytes, step: StepInfo, results: Results, /) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)  # lets all begin that may
        self.running -= 1
        return arguments


@pytest.mark.parametrize(("in_flight", "items", "most"), [(0, 20, 5), (2, 20, 2), (9, 20, 5), (0, 3, 3), (0, 0, 0)])
async def test_a_local_map_is_bounded(in_flight: int, items: int, most: int) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.engine("local").map("echo", range(items), in_flight=in_flight)

    world = World(functions=functions.functions)
    run = world.new_run(Program(code))
    counting = run.compute = Counting()
    end = await run.advance()
    assert isinstance(end, Completed), end
    assert json.loads(end.output) == [{"value": number} for number in range(items)]
    assert counting.most == most
