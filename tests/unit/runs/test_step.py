"""Steps of a run's own process: their errors, results and retries, and a result that another process has journaled."""

from __future__ import annotations

import asyncio
import json
import threading

from runtime_core import errors
from runtime_core.app.app import App
from runtime_core.consumer.effects import Completed
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import World, failed


async def test_a_failed_step_ends_the_run_with_its_error() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("bad one")

    result = await failed(code)
    assert (result.type, result.message, result.retryable) == ("ValueError", "bad one is bad", False)


async def test_retry_and_reject_in_a_step_are_not_recorded() -> None:
    attempts = 0

    async def code(ctx: AgentContext, _: object) -> object:
        async def body() -> str:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                raise errors.Retry(after=1)
            return "done"

        return await ctx.gather(ctx.step(body)) if attempts else await ctx.step(body)

    world = World()
    for _ in range(2):
        result = await failed(code, world)
        assert (result.type, result.retry_after_seconds) == ("Retry", 1.0)
        assert world.journal == {}
    assert isinstance(await world.play(code), Completed)
    assert list(world.journal) == ["1"]


async def test_a_step_that_raised_retry_may_be_awaited_again() -> None:
    attempts: list[int] = []

    async def code(ctx: AgentContext, _: object) -> object:
        async def body() -> int:
            attempts.append(1)
            if len(attempts) < 2:
                raise errors.Retry
            return len(attempts)

        step = ctx.step(body)
        try:
            return await step
        except errors.Retry:
            return await step

    result = await World().play(code)
    assert isinstance(result, Completed)
    assert result.output == b"2"


async def test_a_step_result_that_cannot_be_json_fails_permanently_and_unrecorded() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        try:
            return await ctx.step(object)
        except Exception:
            return "caught"

    world = World()
    result = await failed(code, world)
    assert (result.type, result.retryable) == ("InvalidInput", False)
    assert world.recorded == []


async def body() -> int:
    return 1


async def test_another_process_ran_the_same_step_first() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.step(body)

    class Second(World):
        async def record(
            self,
            step: str,
            digest: str,
            status: bytes,
            payload: bytes,
            kind: str = "step",
            name: str = "",
            usage: bytes = b"",
        ) -> bytes:
            await super().record(step, digest, status, b'"theirs"')
            return await super().record(step, digest, status, payload)

    world = Second()
    result = await world.play(code)
    assert isinstance(result, Completed)
    assert result.output == b'"theirs"'
    assert [(row.step, bytes(row.output)) for row in result.steps] == [("1", b'"theirs"')], (
        "this commit writes the only row"
    )


async def test_sync_functions_run_off_the_loop() -> None:
    threads: list[object] = []

    def where() -> str:
        threads.append(threading.current_thread())
        return "ran"

    app = App("test")

    @app.engine_function
    def rank(passages: list[str], top: int = 1) -> list[str]:
        threads.append(threading.current_thread())
        return sorted(passages)[:top]

    @app.engine_function
    def breaks() -> None:
        raise ZeroDivisionError("0")

    async def code(ctx: AgentContext, _: object) -> object:
        one = await ctx.step(where)
        two = await ctx.engine("local").call(rank, passages=["b", "a"])
        three = await ctx.gather(
            ctx.engine("local").call("rank", passages=["d", "c"], top=2),
            ctx.engine("local").call(breaks),
            ctx.step(lambda: asyncio.sleep(0, "awaited")),
            ctx.step(next, iter(())),
            return_exceptions=True,
        )
        return [one, two, three[0], repr(three[1]), three[2], repr(three[3])]

    for cold in (False, True):
        world = World(functions=app.functions, cold=cold)
        result = await world.play(code)
        assert isinstance(result, Completed), result
        one, two, three, four, five, six = json.loads(result.output)
        assert (one, two, three, five) == ("ran", ["a"], ["c", "d"], "awaited")
        assert four == "EngineError('ZeroDivisionError: 0')"
        assert six == "LocalStepError('RuntimeError: the function raised StopIteration')"
        assert {row[:2] for row in world.rows} >= {("engine", "2"), ("engine", "4"), ("step", "1")}
    assert threading.current_thread() not in threads
