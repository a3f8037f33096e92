"""A program gives the same result whether it runs through, replays at each turn, or crashes anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import timedelta
from typing import Any

import pytest

from runtime_core import errors
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import Code, Program, World

bodies: list[str] = []


async def body(name: str) -> dict[str, str]:
    bodies.append(name)
    return {"made": name}


def sync_body() -> dict[str, bool]:
    bodies.append("sync")
    return {"sync": True}


async def one_tool(ctx: AgentContext, input: Any) -> object:
    return await ctx.tool("search", query=input)


async def nothing(ctx: AgentContext, input: Any) -> object:
    return {"input": input}


async def sequence(ctx: AgentContext, input: Any) -> object:
    first = await ctx.tool("a", x=1, y={"b": 2, "a": [1, 2]})
    second = await ctx.agent("writer", {"from": first}, key="k")
    third = await ctx.engine("ray").call("rank", items=[second])
    await ctx.sleep(timedelta(days=3))
    ok = await ctx.human("Publish?", data=third, timeout=60, default=False)
    return [first, second, third, ok]


async def fan_out(ctx: AgentContext, input: Any) -> object:
    return await ctx.gather(*(ctx.tool("search", query=n) for n in range(4)))


async def in_background(ctx: AgentContext, input: Any) -> object:
    async def work(name: str) -> object:
        found = await ctx.tool(name, n=1)
        await ctx.spend(tokens=2, model=name)
        return [found, await ctx.step(body, name), await ctx.gather(ctx.tool("x"), ctx.agent("y", name))]

    jobs = [ctx.background(work("one")), ctx.background(ctx.agent("alone", 1)), ctx.background(work("two"))]
    joined = ctx.background(work("joined"))
    between = await ctx.tool("between")
    await ctx.spend(tokens=1)
    sent = await ctx.send("note", "hi")
    results = [await job for job in reversed(jobs)]
    assert not joined.seen
    return [between, sent, results]


async def helpers(ctx: AgentContext, input: Any) -> object:
    async def helper(name: str, depth: int) -> object:
        found = []
        for place in range(depth):
            found.append(await ctx.tool(f"{name}{place}", n=place))
            found.append(await ctx.step(body, f"{name}{place}"))
        return found

    return await ctx.gather(helper("x", 3), helper("y", 1), helper("z", 0))


async def mixed(ctx: AgentContext, input: Any) -> object:
    async def chain() -> object:
        one = await ctx.tool("one")
        return await ctx.tool("two", after=one)

    results = await ctx.gather(
        ctx.human("ok?"), chain(), ctx.tool("leaf"), ctx.step(body, "beside"), ctx.sleep(5), ctx.emit("mid")
    )
    return [results, await ctx.tool("last", seen=results)]


async def nested(ctx: AgentContext, input: Any) -> object:
    async def inner(name: str) -> object:
        async def leaf(n: int) -> object:
            await ctx.emit(f"{name}{n}")
            return await ctx.tool(name, n=n)

        return await ctx.gather(leaf(0), ctx.gather(ctx.tool("p"), ctx.tool("q")), leaf(1))

    both = await ctx.gather(inner("a"), ctx.gather(inner("b"), ctx.tool("flat")), ctx.agent("c", None))
    return both


async def effects(ctx: AgentContext, input: Any) -> object:
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    await ctx.emit({"n": ctx.state["n"]})
    await ctx.send("audit", {"n": ctx.state["n"]}, key="log")
    found = await ctx.tool("search", n=ctx.state["n"])
    await ctx.emit("found")
    made = await ctx.step(body, "one")
    ctx.state["n"] += 1
    await ctx.emit("made")
    again = await ctx.step(sync_body, name="sync")
    await ctx.send("audit", "done")
    return [found, made, again, ctx.state["n"]]


async def derived(ctx: AgentContext, input: Any) -> object:
    delay = ctx.random() * 10
    seen: list[object] = [ctx.now().isoformat(), str(ctx.uuid()), ctx.random()]
    await ctx.tool("a", at=seen)
    seen += [ctx.now().isoformat(), str(ctx.uuid()), ctx.random()]

    async def branch(name: str) -> object:
        before = [str(ctx.uuid()), ctx.random()]
        await ctx.tool(name, before=before)
        return [before, ctx.random()]

    seen += await ctx.gather(branch("x"), branch("y"))
    await ctx.sleep(delay)
    return seen


async def failures(ctx: AgentContext, input: Any) -> object:
    seen: list[object] = []

    async def boom(n: int) -> None:
        raise KeyError(n)

    for make in (
        lambda: ctx.tool("bad tool"),
        lambda: ctx.agent("bad agent"),
        lambda: ctx.engine("spark").call("bad job"),
        lambda: ctx.human("bad question"),
        lambda: ctx.step(boom, 7),
        lambda: ctx.gather(ctx.tool("fine"), ctx.tool("bad leaf"), ctx.step(boom, 8)),
    ):
        try:
            await make()
        except errors.StepError as error:
            seen.append([type(error).__name__, error.type, error.message, list(error.args)])

    async def raises() -> None:
        await ctx.tool("bad helper")

    results = await ctx.gather(raises(), ctx.step(boom, 9), ctx.tool("t"), return_exceptions=True)
    return [*seen, *map(repr, results)]


async def loop_of_steps(ctx: AgentContext, input: Any) -> object:
    total = 0
    for n in range(30):
        made = await ctx.step(body, f"s{n}")
        total += len(made["made"])
        if n % 10 == 9:
            await ctx.tool("checkpoint", total=total)
    return total


async def reused(ctx: AgentContext, input: Any) -> object:
    early = ctx.tool("early")
    late = ctx.tool("late")
    second = await late
    first = await early
    assert first == await early
    shared = ctx.tool("shared")

    async def uses(n: int) -> object:
        got = await shared
        return [n, got, await ctx.tool("own", n=n)]

    return [first, second, await ctx.gather(uses(0), uses(1), shared)]


PROGRAMS: list[Code] = [
    nothing,
    one_tool,
    sequence,
    fan_out,
    helpers,
    in_background,
    mixed,
    nested,
    effects,
    derived,
    failures,
    loop_of_steps,
    reused,
]


def effects_of(world: World, result: Completed | Failed) -> dict[str, object]:
    assert isinstance(result, Completed), result
    return {
        "output": result.output,
        "state": result.state,
        # Branches are independent of each other: what is fixed is what each step asks.
        "asked": sorted(world.asked, key=lambda asked: asked[0]),
        "emitted": sorted(world.emitted, key=lambda emitted: emitted[0]),
        "sent": world.sent,
        "journal": {step: value[:9] + value[22:] for step, value in world.journal.items()},
    }


async def reference(code: Code) -> tuple[dict[str, object], World]:
    world = World()
    result = await world.play(code, "in")
    return effects_of(world, result), world


def timeless(effects: dict[str, object], code: Code) -> dict[str, object]:
    # `ctx.now()` is the broker's time of the last result, and that differs with the order of the answers.
    return {} if code is derived else effects


@pytest.mark.parametrize("code", PROGRAMS)
async def test_a_run_that_replays_each_turn_is_the_same_as_a_warm_one(code: Code) -> None:
    expected, warm = await reference(code)
    bodies.clear()
    world = World(cold=True)
    assert effects_of(world, await world.play(code, "in")) == expected
    assert world.rows == warm.rows
    assert len(bodies) == len(set(bodies)), "a body ran twice"


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("code", PROGRAMS)
async def test_the_order_of_results_changes_nothing(code: Code, cold: bool) -> None:
    """A step's id is its place in the program, not the order in which results come."""
    expected, _ = await reference(code)
    for seed in range(12):
        world = World(cold=cold, order=random.Random(seed))
        assert timeless(effects_of(world, await world.play(code, "in")), code) == timeless(expected, code)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("code", PROGRAMS)
async def test_a_crash_at_any_write_changes_nothing(code: Code, before: bool) -> None:
    expected, clean = await reference(code)
    assert clean.writes >= 1
    for at in range(1, clean.writes + 1):
        bodies.clear()
        world = World(crash_at=at, crash_before=before)
        result = await world.play(code, "in") if before or at < clean.writes else None
        if result is None:
            continue  # the commit of the end was done: there is nothing left to run
        got = effects_of(world, result)
        assert got == expected, at
        again = len(bodies) - len(set(bodies))
        # Work whose record did not reach the broker is done again; parallel bodies may be under way with it.
        assert again <= (2 if before else 1), at


async def test_each_branch_keeps_the_changes_of_others_after_a_nested_run() -> None:
    """All of them continue after the nested run, whichever comes first in the replay."""

    async def code(ctx: AgentContext, _: object) -> object:
        async def branch(name: str) -> None:
            await ctx.tool(name)
            ctx.state["seen"].append(name)

        ctx.state["seen"] = []
        await ctx.gather(branch("a"), branch("b"))
        return ctx.state["seen"]

    world = World()
    await world.turn(Program(code))
    for _ in range(2):
        world.answer_one()
    replay = world.new_run(Program(code))
    replay.overrides = dict.fromkeys(world.journal, b'2 {"seen":["nested"]}')
    result = await replay.advance()
    assert isinstance(result, Completed)
    assert json.loads(result.output) == ["nested", "a", "b"]


async def test_no_task_is_left_behind() -> None:
    for code in PROGRAMS:
        await World(cold=True).play(code, "in")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def attempts_of(code: Code, *, failures: int, cold: bool) -> tuple[World, Completed | Failed]:
    """Run the code, again from the top with the next attempt after each failure, as the consumer does."""
    world = World(cold=cold)
    program = Program(code)
    for attempt in range(1, failures + 2):
        world.run = world.new_run(program, attempt=attempt)
        result = await world.play(program)
        if isinstance(result, Completed):
            break
        world.run = None
    return world, result


async def told_once(ctx: AgentContext, input: Any) -> object:
    first = ctx.attempt
    await ctx.step(body, "charge")
    if ctx.attempt == 1:
        raise RuntimeError("the first attempt fails")
    second = ctx.attempt
    if second == 2:
        await ctx.sleep(60)
        await ctx.gather(ctx.tool("a"), ctx.tool("b"))
    return [first, second, ctx.attempt]


@pytest.mark.parametrize("cold", [False, True])
async def test_ctx_attempt_is_the_same_at_each_replay(cold: bool) -> None:
    bodies.clear()
    _, result = await attempts_of(told_once, failures=1, cold=cold)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == [1, 2, 2]
    assert bodies == ["charge"]


async def fails_between(ctx: AgentContext, input: Any) -> object:
    seen = []

    async def branch(name: str) -> list[int]:
        before = ctx.attempt
        await ctx.tool(name)
        return [before, ctx.attempt]

    for number in range(3):
        seen.append(ctx.attempt)
        seen += await ctx.gather(branch(f"a{number}"), branch(f"b{number}"))
        await ctx.step(body, f"s{number}")
        if ctx.attempt == number + 1:
            raise RuntimeError(f"attempt {ctx.attempt} fails")
    return seen


@pytest.mark.parametrize("cold", [False, True])
async def test_each_place_keeps_the_attempt_that_went_on_from_it(cold: bool) -> None:
    world, result = await attempts_of(fails_between, failures=3, cold=cold)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == [1, [1, 1], [1, 1], 2, [2, 2], [2, 2], 3, [3, 3], [3, 3]]
    world.run = world.new_run(Program(fails_between), attempt=4)
    again = await world.run.advance()
    assert isinstance(again, Completed), again
    assert again.output == result.output


async def counts_up(ctx: AgentContext, input: Any) -> object:
    async def flaky(attempt: int) -> int:
        if attempt < 4:
            raise errors.Retry(0)
        return attempt

    return await ctx.step(flaky, ctx.attempt)


async def test_a_retried_step_that_was_not_recorded_sees_the_next_attempt() -> None:
    _, result = await attempts_of(counts_up, failures=3, cold=False)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == 4


async def in_a_step(ctx: AgentContext, input: Any) -> object:
    async def inside() -> int:
        return ctx.attempt

    return await ctx.step(inside)


async def test_the_function_of_a_step_sees_the_attempt_that_runs_it() -> None:
    world = World()
    world.run = world.new_run(Program(in_a_step), attempt=7)
    result = await world.play(Program(in_a_step))
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == 7


async def inside(ctx: AgentContext) -> object:
    return await ctx.tool("inside")


async def pays_after(ctx: AgentContext, places: int) -> object:
    for _ in range(places):
        ctx.uuid()
    paid = await ctx.tool("pay")
    await ctx.step(body, "alone")
    await ctx.gather(ctx.tool("mail"), ctx.step(body, "gathered"))
    await ctx.gather(inside(ctx))
    return [paid, await ctx.human("Go?")]


@pytest.mark.parametrize("later", ["pay", "alone", "gathered", "inside", "Go?"])
@pytest.mark.parametrize("places", [0, 1, 3, 8])
async def test_finished_work_does_not_run_again_at_another_place(places: int, later: str) -> None:
    """`ctx.uuid` takes a place in the program, and the journal does not hold it: a later number may be free."""

    async def before(ctx: AgentContext, input: Any) -> object:
        return await pays_after(ctx, 2)

    async def after(ctx: AgentContext, input: Any) -> object:
        """As the former code, from another step on."""
        for _ in range(places):
            ctx.uuid()
        match later:
            case "pay":
                await ctx.tool("pay")
            case "alone":
                await ctx.step(body, "alone")
            case "gathered":
                await ctx.gather(ctx.step(body, "gathered"), ctx.tool("mail"))
            case "inside":
                await ctx.gather(inside(ctx))
            case _:
                await ctx.human("Go?")
        return None

    bodies.clear()
    world = World(cold=True)
    turns = 0
    while "human" not in [kind for _, kind, _, _ in world.asked]:
        await world.turn(Program(before))
        turns += 1
        assert turns < 10
        if world.run is not None:
            await world.run.aclose()
            world.run = None
        while world.waits and not world.awake() and "human" not in [kind for _, kind, _, _ in world.asked]:
            world.answer_one()
    asked, done = list(world.asked), list(bodies)
    assert done == ["alone", "gathered"]
    result = await world.turn(Program(after))
    assert isinstance(result, Failed), result
    assert result.type == "Divergence"
    assert (world.asked, bodies) == (asked, done)


async def test_a_step_that_is_awaited_after_later_ones_is_new_and_no_divergence() -> None:
    async def out_of_order(ctx: AgentContext, input: Any) -> object:
        first, second = ctx.tool("first"), ctx.tool("second")
        beside = ctx.background(late(first))
        await second
        await ctx.send("note", "sent with the turn, after a step that is journaled at once")
        await ctx.step(body, "third")
        await ctx.tool("fourth")
        return await beside

    async def late(step: Any) -> object:
        await asyncio.sleep(0)
        return await step

    world = World(cold=True)
    assert isinstance(await world.play(out_of_order), Completed)
    for crash_at in range(1, world.writes + 1):
        crashed = World(cold=True, crash_at=crash_at, crash_before=True)
        assert isinstance(await crashed.play(out_of_order), Completed)
