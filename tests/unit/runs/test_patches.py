"""A run that began with other code finishes as it began, wherever its process dies and the code is replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Suspended
from runtime_core.errors import InvalidInput
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import Crash, Program, World, counting

done: list[str] = []
step = counting(done)


async def before(ctx: AgentContext, input: Any) -> object:
    async def part(name: str) -> object:
        await ctx.step(step, f"{name}-early")
        return await ctx.tool(f"{name}-late")

    first = await ctx.step(step, "first")
    await ctx.emit("working")
    found = await ctx.tool("old-search", query="x")
    last = await ctx.step(step, "last")
    return [first, found, last, await ctx.gather(part("a"), part("b"))]


async def after(ctx: AgentContext, input: Any) -> object:
    async def part(name: str) -> object:
        if ctx.patched("parts"):
            await ctx.step(step, f"{name}-new")
        await ctx.step(step, f"{name}-early")
        if ctx.patched("late"):
            return await ctx.agent(f"{name}-late")
        return await ctx.tool(f"{name}-late")

    taken = [ctx.patched("begin")]
    if taken[0]:
        await ctx.step(step, "new")
    first = await ctx.step(step, "first")
    await ctx.emit("working")
    if ctx.patched("search"):
        found = await ctx.tool("new-search", query="x")
        await ctx.note("searched", found)
    else:
        found = await ctx.tool("old-search", query="x")
    taken.append(ctx.patched("search"))
    if ctx.patched("end"):
        await ctx.tool("check", found=found)
    last = await ctx.step(step, "last")
    return [taken, first, found, last, await ctx.gather(part("a"), part("b"))]


async def replaced_at(at: int, *, died_before: bool, cold: bool) -> tuple[World, object]:
    """Run `before`, kill its process at this write, and go on with `after`."""
    world = World(crash_at=at, crash_before=died_before, cold=True)
    old = Program(before)
    while True:
        try:
            result = await world.turn(old)
        except Crash:
            break
        if not isinstance(result, Suspended):
            return world, None
        assert world.run is not None
        await world.run.aclose()
        world.run = None
        while not world.awake():
            world.answer_one()
    if world.run is None:
        return world, None  # it died after the commit of the end
    await world.run.aclose()
    world.run, world.crash_at, world.cold = None, 0, cold
    while not world.awake() and world.open:
        world.answer_one()
    return world, await world.play(Program(after))


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("died_before", [True, False])
async def test_a_run_continues_wherever_the_code_is_replaced(died_before: bool, cold: bool) -> None:
    seen = set()
    for at in range(1, 100):
        world, result = await replaced_at(at, died_before=died_before, cold=cold)
        if result is None:
            break
        assert isinstance(result, Completed), (at, result)
        taken = json.loads(result.output)[0]
        assert taken[0] is (not any(name.isdecimal() for name in world.journal) or "0.patched:begin" in world.journal)
        seen.add(tuple(taken))
        again = await world.new_run(Program(after)).advance()
        assert isinstance(again, Completed), (at, again)
        assert again.output == result.output
    assert {(False, False), (False, True)} <= seen


@pytest.mark.parametrize("died_before", [True, False])
async def test_a_new_run_takes_every_patch_wherever_it_dies(died_before: bool) -> None:
    clean = World()
    expected = await clean.play(after)
    assert isinstance(expected, Completed)
    assert json.loads(expected.output)[0] == [True, True]
    for at in range(1, clean.writes + 1):
        world = World(crash_at=at, crash_before=died_before, cold=True)
        result = await world.play(after) if died_before or at < clean.writes else expected
        assert isinstance(result, Completed), (at, result)
        assert result.output == expected.output, at


async def ends_at_once(ctx: AgentContext, input: Any) -> bool:
    return ctx.patched("x")


async def test_a_run_that_never_waits_writes_no_mark() -> None:
    world = World()
    result = await world.play(ends_at_once)
    assert isinstance(result, Completed)
    assert result.output == b"true"
    assert world.journal == {}
    assert world.writes == 1  # its end
    assert ("patch", "0.patched:x", "x", "completed") in world.rows


async def loops(ctx: AgentContext, input: Any) -> list[bool]:
    seen = []
    for number in range(3):
        seen.append(ctx.patched("loop"))
        await ctx.tool("turn", n=number)
    return seen


async def looped(ctx: AgentContext, input: Any) -> list[bool]:
    for number in range(3):
        await ctx.tool("turn", n=number)
    return []


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_the_first_answer_counts_for_the_whole_run(turns: int) -> None:
    world = World(cold=True)
    for _ in range(turns):
        await world.turn(Program(looped))
        assert world.run is not None
        await world.run.aclose()
        world.run = None
        world.answer_one()
    result = await world.play(loops)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == [not turns] * 3


async def jobs(ctx: AgentContext, input: Any) -> list[object]:
    async def work(name: str) -> bool:
        await ctx.tool(name)
        taken = ctx.patched("job")
        await ctx.tool(f"{name}-{taken}")
        return taken

    one, two = ctx.background(work("one")), ctx.background(work("two"))
    first = await one
    await ctx.step(step, "between")
    await ctx.tool("more")
    return [first, await two, ctx.patched("job")]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_job_does_not_count_concurrent_work(cold: bool) -> None:
    world = World(cold=cold, unanswered=frozenset({"2.1"}))
    with pytest.raises(AssertionError, match="nothing is left to answer"):
        await world.play(jobs)
    world.unanswered = frozenset()
    world.answer_one("2.1")
    result = await world.play(jobs)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == [True, True, True]


@pytest.mark.parametrize("name", ["", "a b", "x" * 101, "a.b", 7])
async def test_a_name_that_cannot_be_recorded_is_refused(name: Any) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        with pytest.raises(InvalidInput, match="letters, digits"):
            ctx.patched(name)
        return None

    assert isinstance(await World().play(code), Completed)
