"""The requests of a suspended run, and the results that wake it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from runtime_core.consumer.effects import Completed, Suspended
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Call, Question, Send, Timer
from tests.unit.runs.run_world import STARTED_MS, Code, Program, World, calls_of


async def suspended(world: World, code: Code) -> Suspended:
    result = await world.turn(Program(code))
    assert isinstance(result, Suspended), result
    return result


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


async def test_an_emit_that_is_awaited_twice_is_sent_once_and_counted() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        emit, send = ctx.emit("x"), ctx.send("audit")
        await emit
        await emit
        await send
        await ctx.gather(emit, send)
        return await ctx.tool("t")

    world = World()
    result = await suspended(world, code)
    assert world.emitted == [("0e1", "x")]
    assert len(result.sends) == 1
    assert len(result.steps) == 2
    assert world.run is not None
    assert len(world.run.journal.values) == len(world.journal) == 1, "the journal holds no output"
    await world.run.aclose()


async def test_now_is_the_time_of_the_latest_result_seen_and_never_goes_back() -> None:
    def at(ctx: AgentContext) -> float:
        return ctx.now().timestamp() - STARTED_MS / 1000

    async def code(ctx: AgentContext, _: object) -> object:
        async def helper() -> object:
            await ctx.tool("c")
            return at(ctx)

        seen = [at(ctx)]
        first, second = ctx.tool("a"), ctx.tool("b")
        for step in (second, first):
            await step
            seen.append(at(ctx))
        # The helper's time becomes that of the branch that waits for it.
        return [*seen, *await ctx.gather(helper()), at(ctx)]

    world = World()
    program = Program(code)
    for step in ("2", "1", "3.0.1"):
        await suspended(world, code)
        world.answer_one(step)
    warm = await world.turn(program)
    cold = await world.new_run(program).advance()
    assert isinstance(warm, Completed)
    assert isinstance(cold, Completed)
    assert warm.output == cold.output == b"[0.0,1.0,2.0,3.0,3.0]"

    # Step 2 was answered before step 1, so seeing it later does not turn the time back.
    async def other_way(ctx: AgentContext, _: object) -> object:
        first, second = ctx.tool("a"), ctx.tool("b")
        await first
        before = at(ctx)
        await second
        return [before, at(ctx)]

    result = await world.new_run(Program(other_way)).advance()
    assert isinstance(result, Completed)
    assert result.output == b"[2.0,2.0]"


async def test_sends_and_rows_belong_to_the_turn_that_made_them() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        await ctx.send("audit", {"n": 1}, key="k")
        await ctx.emit("one")
        await ctx.tool("t")
        await ctx.step(int, "7")
        await ctx.send("audit", {"n": 2})
        return None

    world = World()
    first = await suspended(world, code)
    assert first.sends == [Send("1", "audit", "k", b'{"n":1}', first.sends[0].digest)]
    assert [(row.kind, row.step) for row in first.steps] == [("send", "1"), ("emit", "1e1")]
    world.answer_one()
    last = await world.turn(Program(code))
    assert isinstance(last, Completed)
    assert [send.step for send in last.sends] == ["4"]
    assert [(row.kind, row.step, bytes(row.output)) for row in last.steps] == [
        ("step", "3", b"7"),
        ("send", "4", b""),
    ]


async def test_rows_lost_in_a_crash_are_rebuilt_from_the_journal() -> None:
    async def boom() -> None:
        raise ValueError("no")

    async def code(ctx: AgentContext, _: object) -> object:
        await ctx.note("one", 1)
        await ctx.step(int, "7")
        await ctx.gather(ctx.step(boom), return_exceptions=True)
        return await ctx.tool("t")

    world = World()
    await suspended(world, code)
    expected, world.rows = world.rows, []
    assert world.run is not None
    await world.run.aclose()

    for lost in ({"1", "2", "3"}, {"2"}, set[str]()):
        run = world.new_run(Program(code), unrecorded=lost)
        result = await run.advance()
        rows = [(row.kind, row.step, row.name, row.status) for row in result.steps]
        assert rows == [row for row in expected if row[1] in lost]
        await run.aclose()


async def test_state_is_what_it_was_at_the_start_and_written_when_it_changed() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        ctx.state["n"] = ctx.state["n"] + 1
        await ctx.tool("a")
        seen = ctx.state["n"]
        await ctx.tool("b")
        ctx.state["list"] = [seen]
        return seen

    for cold in (False, True):
        world = World(state=b'{"n": 1}', cold=cold)
        first = await suspended(world, code)
        assert first.working_state == b'{"n":2}'
        world.answer_one()
        second = await suspended(world, code)
        assert second.working_state is None, "it was reported already"
        world.answer_one()
        last = await world.turn(Program(code))
        assert isinstance(last, Completed)
        assert (last.output, last.state) == (b"2", b'{"n":2,"list":[2]}')


async def test_unchanged_state_is_not_written() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        ctx.state["n"] = 2
        ctx.state["n"] = 1
        return ctx.state["n"]

    result = await World(state=b'{"n": 1}').play(code)
    assert isinstance(result, Completed)
    assert result.state is None


async def test_the_context_knows_its_task() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return [
            ctx.task_id,
            ctx.run_id,
            ctx.agent_name,
            ctx.attempt,
            ctx.session_id,
            ctx.metadata,
            ctx.key,
            ctx.idempotency_key,
            ctx.cancelled,
            ctx.deadline,
        ]

    result = await World().play(code)
    assert isinstance(result, Completed)
    assert result.output == b'["t-1","r","agent-under-test",1,"s-1",{"tenant":"a"},"","t-1/r",false,null]'


async def test_a_result_that_the_broker_journals_twice_is_taken_once() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("a")

    world = World()
    await suspended(world, code)
    world.answer_one()
    run = world.run
    assert run is not None
    assert len(run.journal.values) == 1
    run.deliver("1", b"deadbeefK0000000000000null")
    result = await run.advance()
    assert isinstance(result, Completed)
    assert result.output == b'{"of":"a","got":{}}'
