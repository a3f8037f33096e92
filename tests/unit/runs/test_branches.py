"""Background jobs of a run: joined, cancelled, replayed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.errors import InvalidInput, JobCancelled, ToolError
from runtime_core.runs.context import AgentContext
from tests.unit.runs.run_world import Code, Program, World

events: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    events.clear()


async def play(code: Code, **world: Any) -> tuple[Completed | Failed, World]:  # Any: fields of World
    there = World(**world)
    return await there.play(code), there


async def value(code: Code, **world: Any) -> object:  # Any: fields of World
    result, _ = await play(code, **world)
    assert isinstance(result, Completed), result
    return json.loads(result.output)


@pytest.mark.parametrize("cold", [False, True])
async def test_the_function_continues_while_its_jobs_wait(cold: bool) -> None:
    """One turn requests everything, and each result arrives where it is awaited."""

    async def code(ctx: AgentContext, input: Any) -> object:
        job = ctx.background(ctx.tool("slow"))
        own = await ctx.tool("own")
        return [own["of"], (await job)["of"], (await job)["of"]]

    result, world = await play(code, cold=cold)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == ["own", "slow", "slow"]
    assert {name for _, _, name, _ in world.asked} == {"slow", "own"}


@pytest.mark.parametrize("cold", [False, True])
async def test_a_run_ends_after_its_jobs(cold: bool) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        async def work() -> None:
            await ctx.tool("one")
            await ctx.tool("two")
            await ctx.emit("done")

        ctx.background(work())
        return "at once"

    result, world = await play(code, cold=cold)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == "at once"
    assert [name for _, _, name, _ in world.asked] == ["one", "two"]
    assert [delta for _, delta in world.emitted] == ["done"]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_job_that_fails_unseen_fails_the_run(cold: bool) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        ctx.background(ctx.tool("bad"))
        return "at once"

    result, _ = await play(code, cold=cold)
    assert isinstance(result, Failed)
    assert (result.type, result.message) == ("ValueError", "bad is bad")


async def test_an_awaited_error_does_not_fail_the_run() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        job = ctx.background(ctx.tool("bad"))
        with pytest.raises(ToolError) as error:
            await job
        return str(error.value)

    assert await value(code) == "ValueError: bad is bad"


@pytest.mark.parametrize("cold", [False, True])
async def test_jobs_that_may_be_stopped_are_at_the_end(cold: bool) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        async def watch() -> None:
            try:
                await ctx.tool("never")
            except asyncio.CancelledError:
                events.append("stopped")
                raise

        ctx.background(watch(), at_end="cancel")
        joined = ctx.background(ctx.tool("joined"))
        await ctx.tool("own")
        assert not joined.seen
        return "done"

    assert await value(code, cold=cold, unanswered=frozenset({"1.1"})) == "done"
    assert events[-1] == "stopped"


async def test_a_function_that_fails_stops_its_jobs() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        async def watch() -> None:
            try:
                await ctx.tool("never")
            finally:
                events.append("stopped")

        ctx.background(watch())
        await ctx.tool("own")
        raise LookupError("own")

    result, _ = await play(code, unanswered=frozenset({"1.1"}))
    assert isinstance(result, Failed)
    assert result.type == "LookupError"
    assert events == ["stopped"]


async def cancelling(ctx: AgentContext, input: Any) -> object:
    async def work() -> str:
        await ctx.tool("first")
        events.append("went on")
        await ctx.tool("second")
        return "ended"

    async def own() -> None:
        await ctx.tool("own")

    job = ctx.background(work())
    await ctx.gather(own())  # a branch of its own: here a replay gives the job its turn
    stopped = await job.cancel()
    await ctx.tool("after")
    try:
        return [stopped, await job.cancel(), await job]
    except JobCancelled:
        return [stopped, "no result"]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_job_is_cancelled_where_it_waits(cold: bool) -> None:
    result, world = await play(cancelling, cold=cold, unanswered=frozenset({"1.1"}))
    assert isinstance(result, Completed)
    assert json.loads(result.output) == [True, "no result"]
    assert events == []
    assert "second" not in {name for _, _, name, _ in world.asked}


@pytest.mark.parametrize("cold", [False, True])
async def test_a_job_is_cancelled_without_an_await(cold: bool) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        async def work() -> None:
            await ctx.tool("first")
            events.append("went on")

        job = ctx.background(work())
        await ctx.tool("own")
        job.cancel()
        await ctx.tool("after")
        return "ended"

    result, world = await play(code, cold=cold, unanswered=frozenset({"1.1"}))
    assert isinstance(result, Completed)
    assert json.loads(result.output) == "ended"
    assert events == []
    assert "1.c.1" in world.journal


@pytest.mark.parametrize("dies", [False, True], ids=["", "the process dies before the commit"])
async def test_the_calls_of_a_cancelled_job_are_withdrawn_once(dies: bool) -> None:
    program = Program(cancelling)
    world = World(unanswered=frozenset({"1.1"}))
    assert isinstance(await world.turn(program), Suspended)
    world.answer_one("2.0.1")
    turn = await world.turn(program)
    assert world.run is not None
    if dies:
        await world.run.aclose()
        world.run = None
        turn = await world.turn(program)
    assert isinstance(turn, Suspended)
    assert turn.withdrawn == ["1.1"]
    world.pending.pop("1.1", None)
    result = await world.play(program)
    assert isinstance(result, Completed)
    assert result.withdrawn == []


async def test_a_step_that_another_branch_waits_for_is_not_withdrawn() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        step = ctx.tool("shared")
        job = ctx.background(step)

        async def cancels() -> None:
            await ctx.tool("own")
            job.cancel()

        return (await ctx.gather(step, cancels()))[0]["of"]

    program = Program(code)
    world = World(unanswered=frozenset({"1"}))
    assert isinstance(await world.turn(program), Suspended)
    world.answer_one("3.1.1")
    turn = await world.turn(program)
    assert isinstance(turn, Suspended)
    assert turn.withdrawn == []


@pytest.mark.parametrize("cold", [False, True])
async def test_a_job_that_had_ended_cannot_be_cancelled(cold: bool) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        job = ctx.background(ctx.tool("quick"))
        await job
        await ctx.tool("own")
        return [await job.cancel(), (await job)["of"]]

    assert await value(code, cold=cold) == [False, "quick"]


async def test_a_replay_does_not_start_cancelled_steps() -> None:
    """The cancelled job's call has its result by now, so a replay could continue to a step that was never requested."""
    program = Program(cancelling)
    world = World(unanswered=frozenset({"1.1"}))
    assert isinstance(await world.turn(program), Suspended)
    world.answer_one("2.0.1")
    assert isinstance(await world.turn(program), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    world.unanswered = frozenset()
    world.answer_one("1.1")
    result = await world.play(program)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == [True, "no result"]
    assert events == []


async def test_a_replay_does_not_warn_of_the_step_of_a_cancelled_job(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody awaits it in the replay, since the job does not begin."""

    async def code(ctx: AgentContext, input: Any) -> object:
        job = ctx.background(ctx.tool("slow"))
        stopped = await job.cancel()
        await ctx.tool("after")
        return stopped

    assert await value(code, cold=True, unanswered=frozenset({"1"})) is True
    assert "never awaited" not in caplog.text


@pytest.mark.parametrize("before", [False, True])
async def test_a_crash_around_a_cancel_changes_nothing(before: bool) -> None:
    _, clean = await play(cancelling, unanswered=frozenset({"1.1"}))
    for at in range(1, clean.writes):
        result, _ = await play(cancelling, unanswered=frozenset({"1.1"}), crash_at=at, crash_before=before)
        assert isinstance(result, Completed), at
        assert json.loads(result.output) == [True, "no result"], at


async def test_a_job_is_cancelled_in_the_middle_of_its_own_work() -> None:
    started = asyncio.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            events.append("stopped")

    async def code(ctx: AgentContext, input: Any) -> object:
        async def work() -> None:
            await ctx.gather(ctx.tool("never"), nested())

        async def nested() -> None:
            await ctx.step(endless)

        job = ctx.background(work())
        await ctx.step(started.wait)
        return await job.cancel()

    assert await value(code, unanswered=frozenset({"1.1"})) is True
    assert events == ["stopped"]


@pytest.mark.parametrize("wrong", ["a future", "another end", "two at once"])
async def test_wrong_usage_is_reported(wrong: str) -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        if wrong == "a future":
            ctx.background(asyncio.get_running_loop().create_future())
        if wrong == "another end":
            step = ctx.tool("own")
            with pytest.raises(InvalidInput, match="neither join nor cancel"):
                ctx.background(step, at_end="detach")  # type: ignore[arg-type]  # the mistake that is meant
            return await step

        async def wait(job: Any) -> object:
            return await job

        job = ctx.background(ctx.tool("own"))
        return await ctx.gather(wait(job), wait(job))

    result, _ = await play(code)
    if wrong == "another end":
        assert isinstance(result, Completed)
        return
    assert isinstance(result, Failed)
    assert ("future" if wrong == "a future" else "two branches await") in result.message.lower()


async def test_a_message_names_the_task_that_it_starts() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        first, both = await ctx.send("note", 1), await ctx.gather(ctx.send("note", 2), ctx.send("note", 3))
        await ctx.tool("own")
        return [first, *both]

    warm, cold = await value(code), await value(code, cold=True)
    assert warm == cold
    assert isinstance(warm, list)
    assert len(set(warm)) == 3


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("awaited", [True, False])
async def test_the_context_of_a_job_is_merged_and_excludes_concurrent_changes(cold: bool, awaited: bool) -> None:
    seen: list[object] = []

    async def code(ctx: AgentContext, input: Any) -> object:
        ctx.context.context_info["plan"] = "old"

        async def work() -> None:
            seen.append(ctx.context.context_info["plan"])
            await ctx.tool("one")
            seen.append(ctx.context.context_info["plan"])
            ctx.context.context_info["found"] = "by the job"

        job = ctx.background(work())
        ctx.context.context_info["plan"] = "new"
        await ctx.tool("own")
        if awaited:
            await job
            return ctx.context.context_info.get("found")
        contexts.append(ctx.context)
        return None

    contexts: list[Any] = []
    found = await value(code, cold=cold)
    assert set(seen) == {"old"}
    assert (found if awaited else contexts[-1].context_info.get("found")) == "by the job"


# ---- ctx.wait_for


async def limits(ctx: AgentContext, input: Any) -> object:
    async def work() -> object:
        await ctx.tool("first")
        return (await ctx.tool("second"))["of"]

    found = []
    for part in (lambda: ctx.tool("alone"), work):
        try:
            found.append(await ctx.wait_for(part(), 30))
        except TimeoutError as error:
            found.append(str(error).rpartition(".")[2])
        await ctx.tool("between")
    return [each if isinstance(each, str) else each["of"] for each in found]


IN_TIME = ["alone", "second"]
TOO_LATE = ["<step 1: tool alone> took longer than 30 s", "work took longer than 30 s"]
NO_ANSWERS = frozenset({"1", "5.1"})
NO_LIMITS = frozenset({"3.1", "6.1"})


@pytest.mark.parametrize("cold", [False, True])
async def test_a_wait_returns_a_result_that_arrives_in_time(cold: bool) -> None:
    assert await value(limits, cold=cold, unanswered=NO_LIMITS) == IN_TIME


@pytest.mark.parametrize("cold", [False, True])
async def test_a_wait_ends_at_its_limit_and_stops_its_part(cold: bool) -> None:
    result, world = await play(limits, cold=cold, unanswered=NO_ANSWERS)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == TOO_LATE
    assert "second" not in {name for _, _, name, _ in world.asked}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("unanswered", [NO_LIMITS, NO_ANSWERS], ids=["in time", "too late"])
async def test_a_wait_takes_the_same_path_after_a_crash(before: bool, unanswered: frozenset[str]) -> None:
    _, clean = await play(limits, unanswered=unanswered)
    for at in range(1, clean.writes):
        result, _ = await play(limits, unanswered=unanswered, crash_at=at, crash_before=before)
        assert isinstance(result, Completed), at
        assert json.loads(result.output) == (IN_TIME if unanswered is NO_LIMITS else TOO_LATE), at


@pytest.mark.parametrize("first", ["1", "3.1"], ids=["the result first", "the limit first"])
async def test_a_wait_remembers_what_came_first(first: str) -> None:
    """The other one comes before the replay, which then has both."""

    async def code(ctx: AgentContext, input: Any) -> object:
        try:
            await ctx.wait_for(ctx.tool("raced"), 30)
            found = "in time"
        except TimeoutError:
            found = "too late"
        await ctx.tool("after")
        return found

    program = Program(code)
    world = World()
    assert isinstance(await world.turn(program), Suspended)
    world.answer_one(first)
    assert isinstance(await world.turn(program), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    world.answer_one({"1": "3.1", "3.1": "1"}[first])
    result = await world.play(program)
    assert isinstance(result, Completed)
    assert json.loads(result.output) == {"1": "in time", "3.1": "too late"}[first]


async def test_a_wait_raises_the_error_of_its_part() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        with pytest.raises(ToolError, match="bad"):
            await ctx.wait_for(ctx.tool("bad"), 30)
        for limit in (0, -1, "soon", float("nan")):
            with pytest.raises(InvalidInput, match=r"timeout of ctx\.wait_for"):
                await ctx.wait_for(ctx.tool("never"), limit)  # type: ignore[arg-type]  # some are
        return "seen"

    assert await value(code) == "seen"


async def test_waits_run_concurrently() -> None:
    async def code(ctx: AgentContext, input: Any) -> object:
        parts = [ctx.wait_for(ctx.tool(name), 30) for name in ("one", "never", "two")]
        found = await ctx.gather(*parts, return_exceptions=True)
        return [each["of"] if isinstance(each, dict) else type(each).__name__ for each in found]

    assert await value(code, unanswered=frozenset({"2"})) == ["one", "TimeoutError", "two"]
