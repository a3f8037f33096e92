"""A run against its journal: where its code differs from it, and how large it may become."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.runs import execution as execution_module
from runtime_core.runs import journal as journal_module
from runtime_core.runs.context import AgentContext
from runtime_core.runs.journal import pack
from runtime_core.wire.step import RESULT_OK
from tests.unit.runs.run_world import Code, Program, World, calls_of, failed


def diverging(first: Callable[[AgentContext], Awaitable[Any]], second: Callable[[AgentContext], Any]) -> Code:
    swallowed = False

    async def code(ctx: AgentContext, input: object) -> object:
        nonlocal swallowed
        make = second if input == "new" else first
        try:
            await make(ctx)
        except Exception:
            swallowed = True  # code that catches everything must not go on after a divergence
        assert not swallowed
        return await ctx.tool("next")

    return code


async def body() -> int:
    return 1


@pytest.mark.parametrize(
    "second",
    [
        lambda ctx: ctx.tool("search", query="b"),
        lambda ctx: ctx.tool("other", query="a"),
        lambda ctx: ctx.agent("search", {"query": "a"}),
        lambda ctx: ctx.step(body),
        lambda ctx: ctx.emit("x"),
        lambda ctx: ctx.send("x"),
        lambda ctx: ctx.sleep(1),
        lambda ctx: ctx.human("x"),
        lambda ctx: ctx.gather(ctx.tool("z"), ctx.tool("y")),
        lambda ctx: ctx.gather(body()),
        lambda ctx: asyncio.sleep(0, ctx.uuid()),
    ],
)
@pytest.mark.parametrize("answered", [False, True])
async def test_other_code_parks_the_run(second: Callable[[AgentContext], Any], answered: bool) -> None:
    code = diverging(lambda ctx: ctx.tool("search", query="a"), second)
    world = World()
    assert isinstance(await world.turn(Program(code)), Suspended)
    assert world.run is not None
    await world.run.aclose()
    if answered:
        world.answer_one()
    held = world.asked.copy(), world.journal.copy()
    result = await world.new_run(Program(code), "new").advance()
    assert isinstance(result, Failed)
    assert (result.type, result.parked, result.retryable) == ("Divergence", True, False)
    assert "step 1" in result.message
    assert (world.asked, world.journal) == held
    # After a rollback it goes on.
    world.run = world.new_run(Program(code))
    if answered:
        result = await world.turn(Program(code))
        assert isinstance(result, Suspended)
        assert [call.name for call in calls_of(result)] == ["next"]
        await world.run.aclose()
    else:
        world.run = None
        assert isinstance(await world.play(code), Completed)


async def test_a_divergence_names_both_sides() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("search", query="b")

    world = World(journal={"1": pack("0badf00d", RESULT_OK, 1, b"null")})
    result = await failed(code, world)
    assert 'the code now requests ctx.tool("search", query="b"):' in result.message
    assert re.match(r"step 1 of run r \(test_execution\.py:\d+ in code\): ", result.message)
    assert result.traceback.rstrip().endswith('return await ctx.tool("search", query="b")')
    assert result.divergence is not None
    named = str(result.divergence.beside('ctx.agent("writer", 1)'))
    assert 'the journal has ctx.agent("writer", 1), but the code now requests ctx.tool("search"' in named


async def test_a_divergence_in_a_gather_starts_none_of_its_branches() -> None:
    started = []

    async def code(ctx: AgentContext, _: object) -> object:
        async def branch() -> None:
            started.append(True)

        return await ctx.gather(ctx.tool("search"), branch(), ctx.gather(branch()))

    world = World(journal={"1": pack("0badf00d", RESULT_OK, 1, b"null")})
    assert (await failed(code, world)).parked
    gc.collect()
    assert started == []


async def test_the_order_of_a_dict_is_not_a_divergence() -> None:
    async def code(ctx: AgentContext, input: object) -> object:
        pairs = [("a", {"x": 1, "y": 2}), ("b", 2)]
        return await ctx.tool("t", **dict(pairs if input else reversed(pairs)))

    world = World()
    await world.turn(Program(code))
    world.answer_one()
    assert isinstance(await world.new_run(Program(code), 1).advance(), Completed)
    assert world.run is not None
    await world.run.aclose()


async def test_steps_that_the_code_no_longer_requests_are_fine() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("a")

    world = World(cold=True)
    await world.turn(Program(code))
    world.answer_one()
    world.run, world.pending["3"] = None, "0badf00d"
    world.journal["2"] = pack("0badf00d", RESULT_OK, 1, b"null")
    assert isinstance(await world.play(code), Completed)


async def test_another_process_ran_different_code_first() -> None:
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
            return await super().record(step, "0badf00d", status, payload)

    assert (await failed(code, Second())).parked


async def test_too_many_steps_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "JOURNAL_LIMIT", 20)

    async def code(ctx: AgentContext, _: object) -> object:
        while True:
            try:
                await ctx.send("x")
            except Exception:
                return "swallowed"

    world = World()
    result = await failed(code, world)
    assert (result.type, result.retryable) == ("LimitExceeded", False)
    assert "more than 20 steps" in result.message


async def test_a_journal_that_is_too_large_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert journal_module.MAX_JOURNAL_BYTES == 16 * 1024 * 1024
    monkeypatch.setattr(execution_module, "MAX_JOURNAL_BYTES", 60)

    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("search", query="a text that is echoed and too long")

    assert (await failed(code)).type == "LimitExceeded"
    world = World(journal={"1": bytes(100)})
    assert (await failed(code, world)).type == "LimitExceeded"
