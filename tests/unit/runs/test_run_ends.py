"""The ends of a run: errors of the code, misuse, limits, cancellation, drop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Container
from datetime import timedelta

import pytest

from runtime_core import errors
from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.runs.context import AgentContext
from runtime_core.runs.output import Piece
from tests.unit.runs.run_world import Code, Program, World, failed


def raising(error: BaseException) -> Code:
    async def code(ctx: AgentContext, _: object) -> object:
        await ctx.tool("before")
        raise error

    return code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.Retry(after=timedelta(seconds=2)), ("Retry", "asked for a retry", True, 2.0, False, False)),
        (errors.Reject("not approved"), ("Reject", "not approved", False, None, True, False)),
        (errors.ToolError("OSError", "gone"), ("OSError", "gone", False, None, True, False)),
        (errors.ConfigurationError("two names"), ("ConfigurationError", "two names", False, None, False, False)),
        (errors.InvalidInput("x", "wrong"), ("InvalidInput", "x: wrong", False, None, False, False)),
        (KeyError("k"), ("KeyError", "'k'", True, None, False, False)),
        (asyncio.CancelledError(), ("CancelledError", "by itself", True, None, False, False)),
        (SystemExit(3), ("RuntimeError", "sys.exit(3)", True, None, False, False)),
        (KeyboardInterrupt(), ("RuntimeError", "raised KeyboardInterrupt", True, None, False, False)),
    ],
)
async def test_an_exception_becomes_a_value(error: BaseException, expected: tuple[object, ...]) -> None:
    kind, message, *rest = expected
    for cold in (False, True):
        result = await failed(raising(error), World(cold=cold))
        assert result.type == kind
        assert str(message) in result.message
        assert [result.retryable, result.retry_after_seconds, result.rejected, result.parked] == rest


async def test_a_traceback_names_the_line() -> None:
    result = await failed(raising(ValueError("here")))
    assert "raise error" in result.traceback
    assert "ValueError: here" in result.traceback


@pytest.mark.parametrize("error", [errors.Reject("no"), KeyError("k")])
async def test_messages_of_a_turn_that_fails_never_leave_and_have_no_rows(error: Exception) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        await ctx.step(int, "1")
        await ctx.send("audit", "before")
        await ctx.tool("t")
        await ctx.send("audit", "lost")
        await ctx.publish("news", "lost")
        await ctx.step(int, "6")
        raise error

    result = await failed(code)
    assert [(row.kind, row.step) for row in result.steps] == [("step", "6")]


async def test_retry_in_a_branch_ends_the_attempt_even_where_exceptions_are_results() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def branch() -> None:
            raise errors.Retry(after=1)

        return await ctx.gather(branch(), ctx.tool("t"), return_exceptions=True)

    assert (await failed(code)).type == "Retry"


async def test_a_gather_waits_for_all_and_raises_the_first_in_order() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def late() -> None:
            await ctx.tool("x")
            await ctx.tool("bad late")

        async def early() -> None:
            raise RuntimeError("early")

        return await ctx.gather(late(), early(), ctx.tool("bad leaf"))

    assert (await failed(code)).message == "bad late is bad"


async def test_output_that_cannot_be_json_fails_permanently() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return object()

    result = await failed(code)
    assert (result.type, result.retryable) == ("InvalidInput", False)


async def test_state_that_cannot_be_json_fails_permanently() -> None:
    async def at_end(ctx: AgentContext, _: object) -> object:
        ctx.state["x"] = object()
        return None

    async def in_between(ctx: AgentContext, _: object) -> object:
        ctx.state["x"] = object()
        return await ctx.tool("t")

    for code in (at_end, in_between):
        result = await failed(code)
        assert (result.type, result.retryable) == ("InvalidInput", False)
        assert "state" in result.message


async def body() -> int:
    return 1


# ---- misuse


async def in_asyncio_gather(ctx: AgentContext) -> None:
    await asyncio.gather(ctx.tool("a"), ctx.tool("b"), return_exceptions=True)


async def in_wait_for(ctx: AgentContext) -> None:
    # Before Python 3.12 wait_for makes a task; since then it cancels the one that waits.
    await asyncio.wait_for(ctx.gather(ctx.step(asyncio.sleep, 60), ctx.tool("a")), 0.01)


async def in_timeout(ctx: AgentContext) -> None:
    async with asyncio.timeout(0.01):
        await ctx.gather(ctx.step(asyncio.sleep, 60), ctx.tool("t"))


async def in_timeout_of_a_step(ctx: AgentContext) -> None:
    async with asyncio.timeout(0.01):
        await ctx.step(asyncio.sleep, 60)


async def a_step_in_create_task(ctx: AgentContext) -> None:
    await asyncio.create_task(ctx.tool("a"))  # type: ignore[arg-type]  # the mistake that is meant


async def a_gather_in_create_task(ctx: AgentContext) -> None:
    await asyncio.create_task(ctx.gather(ctx.tool("a")))  # type: ignore[arg-type]  # as above


async def a_job_in_create_task(ctx: AgentContext) -> None:
    await asyncio.create_task(ctx.background(ctx.tool("a")))  # type: ignore[arg-type]  # as above


async def a_step_in_a_task_group(ctx: AgentContext) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.agent("a"))  # type: ignore[arg-type]  # as above


async def steps_as_completed(ctx: AgentContext) -> None:
    for each in asyncio.as_completed([ctx.tool("a"), ctx.agent("b")]):
        await each


async def a_step_shielded(ctx: AgentContext) -> None:
    await asyncio.shield(ctx.tool("a"))


async def in_create_task(ctx: AgentContext) -> None:
    async def other() -> None:
        await ctx.tool("a")

    await asyncio.create_task(other())


async def in_task_group(ctx: AgentContext) -> None:
    async def other() -> None:
        await ctx.tool("a")

    async with asyncio.TaskGroup() as group:
        group.create_task(other())


async def in_a_step(ctx: AgentContext) -> None:
    async def other() -> object:
        return await ctx.tool("a")

    await ctx.step(other)


async def in_a_step_of_a_gather(ctx: AgentContext) -> None:
    async def other() -> object:
        return await ctx.tool("a")

    await ctx.gather(ctx.step(other))


async def in_a_thread(ctx: AgentContext) -> None:
    await ctx.step(lambda: str(ctx.uuid()))


async def gather_of_a_task(ctx: AgentContext) -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    try:
        await ctx.gather(task)
    finally:
        await task


async def gather_outside(ctx: AgentContext) -> None:
    async def other() -> None:
        await ctx.tool("a")

    async def misplaced() -> object:
        return await ctx.gather(other())

    await asyncio.create_task(misplaced())


async def unregistered(ctx: AgentContext) -> None:
    await ctx.tool(body)


async def unregistered_engine_function(ctx: AgentContext) -> None:
    await ctx.engine("local").call(body)


async def local_step_twice(ctx: AgentContext) -> None:
    step = ctx.step(asyncio.sleep, 60)

    async def awaits() -> None:
        await step

    await ctx.gather(awaits(), awaits())


@pytest.mark.parametrize(
    ("misuse", "hint"),
    [
        (in_asyncio_gather, "ctx.gather"),
        (in_wait_for, "ctx.wait_for"),
        (in_timeout, "ctx.wait_for"),
        (in_timeout_of_a_step, "inside the function"),
        (in_create_task, "ctx.gather"),
        (a_step_in_create_task, "<step 1: tool a> outside the agent's own flow"),
        (a_gather_in_create_task, "<ctx.gather of 1> outside the agent's own flow"),
        (a_job_in_create_task, "<job 2> outside the agent's own flow"),
        (a_step_in_a_task_group, "<step 1: agent a> outside the agent's own flow"),
        (steps_as_completed, "ctx.background"),
        (a_step_shielded, "ctx.background"),
        (in_task_group, "ctx.gather"),
        (in_a_step, "ctx.step"),
        (in_a_step_of_a_gather, "ctx.step"),
        (in_a_thread, "thread"),
        (gather_of_a_task, "coroutine itself"),
        (gather_outside, "ctx.gather"),
        (unregistered, "register"),
        (unregistered_engine_function, "@app.engine_function"),
        (local_step_twice, "one of them"),
    ],
)
async def test_misuse_ends_the_run_with_a_hint(misuse: Callable[[AgentContext], Awaitable[None]], hint: str) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        try:
            await misuse(ctx)
        except Exception:
            await asyncio.sleep(0)
        return "swallowed"

    world = World()
    result = await failed(code, world)
    assert (result.type, result.retryable) == ("WeftError", False)
    assert hint in result.message
    assert world.asked == []
    assert world.recorded == []
    await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_timeout_that_goes_off_between_turns_fails_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        try:
            async with asyncio.timeout(0.01):
                return await ctx.tool("slow")
        except TimeoutError:
            return "not durable"

    world = World()
    run = world.new_run(Program(code))
    assert isinstance(await run.advance(), Suspended)
    async with asyncio.timeout(60):
        while run.awaited:
            await asyncio.sleep(0.002)
    assert "use ctx.wait_for" in caplog.text
    result = await run.advance()
    assert isinstance(result, Failed)
    assert "ctx.wait_for" in result.message


# ---- limits


async def test_a_turn_over_its_time_is_cancelled() -> None:
    cleaned = []

    async def code(ctx: AgentContext, _: object) -> object:
        try:
            return await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    result = await failed(Program(code, timeout_seconds=0.01))
    assert (result.type, result.retryable) == ("TimeLimit", True)
    assert "0.01 s" in result.message
    assert cleaned


async def test_code_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_core.runs.scheduler.CANCEL_GRACE_SECONDS", 0.01)
    release = asyncio.Event()

    async def code(ctx: AgentContext, _: object) -> object:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return None

    assert (await failed(Program(code, timeout_seconds=0.01))).type == "TimeLimit"
    release.set()
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)


async def test_waiting_does_not_count_against_a_turns_time() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        return await ctx.tool("slow")

    world = World()
    program = Program(code, timeout_seconds=1.0)
    await world.turn(program)
    await asyncio.sleep(1.1)  # what is tested is that this time does not matter
    world.answer_one()
    assert isinstance(await world.turn(program), Completed)


# ---- the port fails


async def test_a_fenced_owner_gets_no_result() -> None:
    seen = []

    async def with_record(ctx: AgentContext, _: object) -> object:
        try:
            await ctx.step(body)
        except Exception:
            seen.append("went on")
        return None

    async def with_emit(ctx: AgentContext, _: object) -> object:
        async def branch() -> None:
            try:
                await ctx.emit("x")
            except Exception:
                seen.append("went on")

        return await ctx.gather(branch(), ctx.tool("t"))

    class Dead(World):
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
            raise errors.Fenced("dead")

        def emit(self, piece: Piece, known: Container[str]) -> None:
            raise errors.Fenced("dead")

    for code in (with_record, with_emit):
        run = Dead().new_run(Program(code))
        with pytest.raises(errors.Fenced):
            await run.advance()
        assert run.over
    assert seen == []


# ---- cancel and drop


async def test_a_cancel_between_turns_reaches_the_waiting_code() -> None:
    heard: list[object] = []

    async def code(ctx: AgentContext, _: object) -> object:
        async def branch() -> None:
            try:
                await ctx.tool("b")
            finally:
                heard.append("branch")

        try:
            return await ctx.gather(ctx.tool("a"), branch())
        except asyncio.CancelledError:
            heard.append(ctx.cancelled)
            with pytest.raises(asyncio.CancelledError):
                await ctx.tool("clean up")  # a cancelled run asks for nothing more
            raise

    run = World().new_run(Program(code))
    assert isinstance(await run.advance(), Suspended)
    run.cancel("the user left")
    result = await run.advance()
    assert isinstance(result, Failed)
    assert (result.type, result.message, result.retryable) == ("Cancelled", "the user left", False)
    assert sorted(map(str, heard)) == ["True", "branch"]


async def test_a_cancel_interrupts_a_running_turn() -> None:
    started = asyncio.Event()

    async def code(ctx: AgentContext, _: object) -> object:
        async def forever() -> None:
            started.set()
            await asyncio.Event().wait()

        return await ctx.step(forever)

    world = World()
    run = world.new_run(Program(code))
    turn = asyncio.ensure_future(run.advance())
    await started.wait()
    run.cancel("stop")
    result = await turn
    assert isinstance(result, Failed)
    assert result.type == "Cancelled"
    assert world.recorded == []


async def test_cancel_before_the_first_turn_starts_nothing() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        raise AssertionError("started")

    run = World().new_run(Program(code))
    run.cancel("too late")
    result = await run.advance()
    assert isinstance(result, Failed)
    assert (result.type, result.message) == ("Cancelled", "too late")


async def test_code_may_end_in_its_own_way_when_it_is_cancelled() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        try:
            return await ctx.tool("a")
        except asyncio.CancelledError:
            return "what I have so far" if ctx.cancelled else None

    run = World().new_run(Program(code))
    await run.advance()
    run.cancel("enough")
    result = await run.advance()
    assert isinstance(result, Completed)
    assert result.output == b'"what I have so far"'


async def test_a_dropped_run_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[object] = []

    async def code(ctx: AgentContext, _: object) -> object:
        async def branch(n: int) -> object:
            try:
                return await ctx.tool("b", n=n)
            finally:
                ended.append(ctx.cancelled)
                if n:
                    raise RuntimeError("cleanup fails too")
                await ctx.emit("clean up")

        unused = ctx.gather(branch(9))
        result = await ctx.gather(branch(0), branch(1), ctx.gather(branch(2), ctx.tool("x")), ctx.step(body))
        return [result, await unused]

    world = World()
    for drop in (True, False):
        run = world.new_run(Program(code))
        assert isinstance(await run.advance(), Suspended)
        if drop:
            run.drop()
            run.drop()
        else:
            await run.aclose()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        assert run.over
        with pytest.raises(errors.WeftError, match="is over"):
            await run.advance()
    gc.collect()
    assert ended == [False] * 6
    assert world.emitted == []
    assert caplog.records == []


async def test_a_run_that_is_dropped_before_its_code_began() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        raise AssertionError("started")

    run = World().new_run(Program(code))
    turn = asyncio.ensure_future(run.advance())
    await asyncio.sleep(0)
    turn.cancel()
    await run.aclose()
    gc.collect()  # a coroutine that was never awaited would warn here
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_run_dropped_before_its_first_turn_leaves_no_task() -> None:
    run = World().new_run(Program(raising(KeyError())))
    run.drop()
    await run.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_worker_that_stops_in_the_middle_of_a_turn_drops_the_run() -> None:
    started = asyncio.Event()

    async def code(ctx: AgentContext, _: object) -> object:
        started.set()
        return await asyncio.Event().wait()

    run = World().new_run(Program(code))
    turn = asyncio.ensure_future(run.advance())
    await started.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await run.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
