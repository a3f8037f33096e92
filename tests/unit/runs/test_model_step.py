"""`ctx.model`: its function's arguments, its record, and the effects of a replay, a death or a limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime_core import errors
from runtime_core.bus.commits import CallBegun
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.runs.context import AgentContext
from runtime_core.runs.model_step import ModelCall, takes_call
from runtime_core.wire.step import total_usage
from tests.unit.runs.run_world import World


class Model:
    """Answers with the number of the request, and records its calls."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.calls: list[ModelCall] = []

    async def answer(self, request: dict[str, Any], call: ModelCall) -> object:
        self.requests.append(request)
        self.calls.append(call)
        call.stream("Re")
        call.stream({"dis": 1})
        call.spend(model="small", tokens=3, requests=1)
        call.spend(model="small", tokens=2)
        call.row(attributes={"gen_ai.request.model": "small"})
        return {"text": f"answer {len(self.requests)}"}


async def ask(ctx: AgentContext, model: Model, **more: Any) -> object:
    return await ctx.model("small", {"messages": ["hi"]}, model.answer, **more)


async def test_a_model_function_gets_its_call_and_its_outcome_is_recorded() -> None:
    model, world = Model(), World()

    async def code(ctx: AgentContext, _: object) -> object:
        return await ask(ctx, model, reserve={"tokens": (1, 8)})

    result = await world.play(code)
    assert isinstance(result, Completed)
    assert result.output == b'{"text":"answer 1"}'
    (call,) = model.calls
    assert (call.attempt, call.idempotency_key, call.granted) == (1, "t-1/r/1", {"tokens": 8})
    assert world.streamed == [("1", 1, "Re"), ("1", 1, {"dis": 1})]
    assert total_usage(world.used).amounts == {"tokens": 5, "requests": 1}
    (row,) = result.steps
    assert (row.kind, row.name, row.status, row.usage) == ("model", "small", "completed", {"tokens": 5, "requests": 1})
    assert json.loads(bytes(row.input)) == {"messages": ["hi"]}
    assert row.attributes == {"gen_ai.request.model": "small"}


@pytest.mark.parametrize("crash_at", range(1, 6))
@pytest.mark.parametrize("crash_before", [True, False])
async def test_an_answered_call_is_not_repeated(crash_at: int, crash_before: bool) -> None:
    """Wherever the process dies: a journaled answer is not requested again, and counts once."""
    model, world = Model(), World(crash_at=crash_at, crash_before=crash_before)

    async def code(ctx: AgentContext, _: object) -> object:
        first = await ask(ctx, model)
        await ctx.tool("search")
        return [first, await ask(ctx, model)]

    result = await world.play(code)
    assert isinstance(result, Completed)
    settled = [step for step in world.journal if step in ("1", "3")]
    assert settled == ["1", "3"]
    assert total_usage(world.used).amounts == {"tokens": 10, "requests": 2}
    assert len(model.requests) <= 3, "only a call that died before its answer was kept is made again"
    for step, begun in world.begun.items():
        attempts = [call.attempt for call in model.calls if call.idempotency_key == f"t-1/r/{step}"]
        assert attempts == sorted(set(attempts))
        assert attempts[-1] == begun


async def test_another_prompt_finds_the_answer_again_by_its_identity() -> None:
    """A deploy in the middle of a conversation must not park it."""
    model, world = Model(), World(cold=True)
    versions = iter(range(100))

    async def code(ctx: AgentContext, _: object) -> object:
        version = next(versions)
        first = await ctx.model(f"model-{version}", {"messages": [version]}, model.answer, identity={"call": 1})
        await ctx.tool("search")
        return first

    result = await world.play(code)
    assert isinstance(result, Completed)
    assert result.output == b'{"text":"answer 1"}'
    assert len(model.requests) == 1


async def test_another_identity_parks_the_run() -> None:
    model, world = Model(), World(cold=True)
    versions = iter(range(100))

    async def code(ctx: AgentContext, _: object) -> object:
        first = await ctx.model("m", {}, model.answer, identity={"call": next(versions)})
        await ctx.tool("search")
        return first

    result = await world.play(code)
    assert isinstance(result, Failed)
    assert result.parked


async def test_a_call_that_does_not_fit_now_raises_an_error_to_wait_for() -> None:
    class Busy(World):
        async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
            if self.turns == 1:
                raise errors.Reserved("others hold 7 tokens")
            return await super().begin_call(step, reserve)

    model, world = Model(), Busy()
    raised: list[tuple[str, str]] = []

    async def code(ctx: AgentContext, _: object) -> object:
        while True:
            try:
                return await ask(ctx, model, reserve={"tokens": (1, 2)})
            except errors.LocalStepError as error:
                raised.append((error.type, error.message))
                await ctx.sleep(1)

    result = await world.play(code)
    assert isinstance(result, Completed)
    assert raised == [("Reserved", "others hold 7 tokens")]
    assert len(model.requests) == 1


async def test_a_call_that_can_never_fit_the_limit_ends_the_task() -> None:
    class Spent(World):
        async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
            raise errors.LimitExceeded("needs 9 tokens, max_tokens=5")

    model, caught = Model(), []

    async def code(ctx: AgentContext, _: object) -> object:
        try:
            return await ask(ctx, model, reserve={"tokens": (9, 9)})
        except Exception as error:
            caught.append(error)
            return "went on"

    result = await Spent().play(code)
    assert isinstance(result, Failed)
    assert (result.type, result.message) == ("LimitExceeded", "needs 9 tokens, max_tokens=5")
    assert result.ends_task
    assert model.requests == caught == []


async def test_an_answer_that_cost_too_much_ends_the_task_and_is_on_record() -> None:
    class Over(World):
        async def settle_call(
            self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
        ) -> tuple[bytes, str]:
            value, _ = await super().settle_call(step, digest, status, payload, usage)
            return value, "the task has used 5 tokens, over its max_tokens=1"

    model = Model()

    async def code(ctx: AgentContext, _: object) -> object:
        await ask(ctx, model)
        return await ask(ctx, model)

    result = await Over().play(code)
    assert isinstance(result, Failed)
    assert (result.type, result.ends_task) == ("LimitExceeded", True)
    assert [row.step for row in result.steps] == ["1"]
    assert len(model.requests) == 1


async def test_the_row_of_an_unanswered_call_has_its_error() -> None:
    def refuse(request: object, call: ModelCall) -> object:
        call.row(error=("RateLimited", "try in 2 s"), input={"messages": "[redacted]"})
        return {"retry_after": 2}

    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.model("m", {"messages": ["secret"]}, refuse)

    result = await World().play(code)
    assert isinstance(result, Completed)
    (row,) = result.steps
    assert row.status == "failed"
    assert row.error is not None
    assert (row.error.type, row.error.message) == ("RateLimited", "try in 2 s")
    assert json.loads(bytes(row.input)) == {"messages": "[redacted]"}
    assert result.output == b'{"retry_after":2}'


async def test_an_error_of_the_function_keeps_its_usage() -> None:
    def fail(request: object, call: ModelCall) -> object:
        call.spend(tokens=4)
        raise ValueError("no answer")

    world = World()

    async def code(ctx: AgentContext, _: object) -> object:
        with pytest.raises(errors.LocalStepError, match="no answer"):
            await ctx.model("m", {}, fail)
        return True

    assert isinstance(await world.play(code), Completed)
    assert total_usage(world.used).amounts == {"tokens": 4}


@pytest.mark.parametrize("reserve", [{"tokens": 4}, {"tokens": (5, 4)}, {"tokens": (-1, 4)}, {"tokens": ("1", 4)}])
async def test_an_invalid_reservation_is_refused_by_name(reserve: Any) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.model("m", {}, dict, reserve=reserve)

    result = await World().play(code)
    assert isinstance(result, Failed)
    assert result.type == "InvalidInput"
    assert "reserve.tokens" in result.message


def test_a_function_with_two_arguments_gets_the_call() -> None:
    assert takes_call(lambda request, call: None)
    assert takes_call(Model().answer)
    assert not takes_call(lambda request: None)
    assert not takes_call(dict)
