"""Which steps a suspended run requests and waits for, and which results wake it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from runtime_core.consumer.effects import Completed, Suspended
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Call, Question, Timer
from tests.unit.runs.run_world import Program, World, calls_of, suspended


def waits(result: Suspended) -> dict[str, str]:
    return {asked.step: asked.wait for asked in result.requests} | dict(result.again)


async def test_a_single_step_wakes_the_run() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("search", query="x")

    world = World()
    result = await suspended(world, code)
    [call] = calls_of(result)
    assert (call.kind, call.step, call.name, call.data, call.wait) == (
        "tool",
        "1",
        "search",
        b'{"query":"x"}',
        "!",
    )
    assert world.run is not None
    assert world.run.awaited == {"1"}
    await world.run.aclose()


async def test_a_gather_of_steps_is_one_group_in_program_order() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.gather(ctx.sleep(timedelta(seconds=2)), ctx.tool("b"), ctx.human("c?"), ctx.tool("a"))

    world = World()
    result = await suspended(world, code)
    assert waits(result) == dict.fromkeys("1234", "g0")
    assert [type(asked) for asked in result.requests] == [Timer, Call, Question, Call]
    assert [call.name for call in calls_of(result)] == ["b", "a"]
    for step in "214":
        world.answer_one(step)
        assert not world.awake()
    # A turn all the same (a spurious resume): only one step is missing now, so it wakes by itself.
    result = await suspended(world, code)
    assert result.again == [("3", "!")]
    assert not result.requests
    world.answer_one("3")
    assert world.awake()
    assert isinstance(await world.turn(Program(code)), Completed)


async def test_a_helper_continues_while_a_human_thinks() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def chain() -> object:
            await ctx.tool("first")
            return await ctx.tool("second")

        return await ctx.gather(ctx.human("three days?"), ctx.tool("leaf"), chain())

    world = World()
    assert waits(await suspended(world, code)) == {"1": "0", "2": "0", "3.2.1": "!"}
    world.answer_one("3.2.1")
    assert world.awake()
    result = await suspended(world, code)
    assert waits(result) == {"1": "0", "2": "0", "3.2.2": "!"}
    assert [call.step for call in result.requests] == ["3.2.2"]
    world.answer_one("3.2.2")
    # The helper has ended: the leaves are waited for as a plain gather's.
    assert waits(await suspended(world, code)) == {"1": "g0", "2": "g0"}
    world.answer_one("1")
    assert not world.awake()
    world.answer_one("2")
    assert world.awake()
    assert isinstance(await world.turn(Program(code)), Completed)


async def test_each_blocked_branch_has_its_own_group() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def pair(name: str) -> object:
            return await ctx.gather(ctx.tool(name), ctx.tool(name))

        return await ctx.gather(pair("a"), pair("b"), ctx.gather(pair("c"), ctx.tool("d")))

    world = World()
    result = await suspended(world, code)
    # The inner gather with a coroutine is made before the outer one, so it has the place before it.
    assert waits(result) == {
        "3.0.1": "g0",
        "3.0.2": "g0",
        "3.1.1": "g1",
        "3.1.2": "g1",
        "2.0.1": "g2",
        "2.0.2": "g2",
        "1": "0",
    }
    assert world.run is not None
    await world.run.aclose()


async def test_a_step_that_two_branches_wait_for_wakes_the_run() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        shared = ctx.tool("shared")

        async def pair() -> object:
            return await ctx.gather(shared, ctx.tool("own"))

        return await ctx.gather(pair(), pair(), shared)

    world = World()
    result = await suspended(world, code)
    assert waits(result)["1"] == "!"
    assert [call.step for call in result.requests].count("1") == 1
    assert isinstance(await world.play(code), Completed)


async def test_steps_that_are_never_awaited_do_nothing_and_are_named(caplog: Any) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def branch() -> None:
            await ctx.tool("never")

        ctx.emit("lost")
        ctx.gather(branch())
        return await ctx.tool("asked")

    world = World()
    assert isinstance(await world.play(code), Completed)
    assert [name for _, _, name, _ in world.asked] == ["asked"]
    assert world.emitted == []
    assert "never awaited" in caplog.text
    assert "step 0e1: emit" in caplog.text


async def test_a_branch_that_awaits_something_else_keeps_the_turn_going() -> None:
    entered = asyncio.Event()
    release = asyncio.Event()

    async def code(ctx: AgentContext, _: object) -> object:
        async def slow() -> object:
            entered.set()
            await release.wait()
            return await ctx.tool("after")

        return await ctx.gather(slow(), ctx.tool("at once"))

    world = World()
    turn = asyncio.ensure_future(suspended(world, code))
    await entered.wait()
    assert not turn.done()
    release.set()
    # Program order is the order in which the steps were made.
    assert [call.name for call in calls_of(await turn)] == ["at once", "after"]
    assert world.run is not None
    await world.run.aclose()


async def test_calls_are_in_program_order_and_not_in_that_of_the_waits() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def first() -> object:
            step = ctx.tool("made first")
            for _ in range(5):
                await asyncio.sleep(0)
            return await step

        async def second() -> object:
            return await ctx.tool("waited for first")

        return await ctx.gather(first(), second())

    world = World()
    assert [call.name for call in calls_of(await suspended(world, code))] == ["made first", "waited for first"]
    assert world.run is not None
    await world.run.aclose()
