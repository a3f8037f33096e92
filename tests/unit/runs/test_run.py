"""What a run reports of its turns: its messages, rows, state and clock."""

from __future__ import annotations

from runtime_core.consumer.effects import Completed
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Send
from tests.unit.runs.run_world import STARTED_MS, Program, World, suspended


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
