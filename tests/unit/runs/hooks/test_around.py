"""Hooks are steps of their run: each runs once despite crashes, and a replay gets the same verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime_core.app.app import App
from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.declare.manifest import HookPoint
from runtime_core.errors import Denied
from runtime_core.runs.context import AgentContext
from runtime_core.runs.hooks.around import DeclaredRunHooks
from runtime_core.runs.hooks.declared import (
    Ask,
    CallbackResult,
    CallbackResultType,
    Change,
    HookEvent,
    ToolResult,
)
from runtime_core.runs.run import Run
from tests.unit.runs.run_world import Program, World

POLICY = RetryPolicy(attempts=3)


@dataclass
class HookedWorld(World):
    """A world whose runs have the hooks of an app."""

    app: App = field(default_factory=lambda: App("hooked"))
    named: Mapping[str, Iterable[str]] = field(default_factory=dict)
    entry: str = "1-0"
    failures: list[str] = field(default_factory=list)

    def new_run(self, program: Program, input: object = None, **more: Any) -> Run:  # Any: Run's own parameters
        run = super().new_run(program, input, **more)
        run.hooks = DeclaredRunHooks(
            run,
            self.app.hooks,
            self.named,
            retry=POLICY,
            entry=lambda: self.entry,
            failed=self.failures.append,
        )
        return run


def watched(executed: list[tuple[str, str]]) -> App:
    """Return an app with a hook or callback at several points, which record their events."""
    app = App("watched")

    def note(event: HookEvent) -> None:
        executed.append((event.idempotency_key, str(event.payload)))

    for point in HookPoint:

        @app.hook(point, name="sees", always=True)
        def sees(event: HookEvent) -> None:
            note(event)

    @app.hook("before_tool_call", name="asks", always=True, guard=True)
    def asks(event: HookEvent) -> Ask | None:
        return Ask("may it?") if event.name == "second" else None

    @app.hook("after_tool_call", name="counts", always=True)
    async def counts(event: HookEvent) -> Change:
        note(event)
        await asyncio.sleep(0)
        return Change({**event.payload, "seen": True})

    @app.callback("third")
    def replaces(result: ToolResult) -> CallbackResult:
        executed.append((result.run_id, str(result.content)))
        return CallbackResult(True, {"replaced": result.content["of"]}, CallbackResultType.OVERRIDE)

    return app


async def agent(ctx: AgentContext, input: object) -> object:
    found = [await ctx.tool("first", x=input)]
    found += await ctx.gather(ctx.tool("second", x=1), ctx.tool("third", x=2), nested(ctx))
    await ctx.emit(found)
    said = await ctx.human("well?")
    try:
        await ctx.tool("bad tool")
    except Exception as error:
        found.append(str(error))
    model = await ctx.model("small", {"prompt": 1}, lambda request: {"text": request["prompt"]})
    return [found, said, model, await ctx.hook("after_context_compact", "a.txt")]


async def nested(ctx: AgentContext) -> object:
    await ctx.sleep(1)
    return await ctx.tool("fourth")


async def played(world: HookedWorld) -> object:
    result = await world.play(agent, "in")
    assert isinstance(result, Completed), result
    return json.loads(result.output)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("before", [False, True])
async def test_a_crash_at_any_write_changes_nothing(cold: bool, before: bool) -> None:
    executed: list[tuple[str, str]] = []
    clean = HookedWorld(app=watched(executed))
    expected = await played(clean)
    once = sorted(executed)
    assert len(once) == len(set(once)), "without a crash each runs once"
    assert clean.writes > 40
    for at in range(1, clean.writes + 1 if before else clean.writes):
        executed.clear()
        world = HookedWorld(app=watched(executed), crash_at=at, crash_before=before, cold=cold)
        assert await played(world) == expected, at
        assert sorted(set(executed)) == once, at
        # What ran when the process died, in each of three branches, runs again and under the same key.
        assert len(executed) - len(once) <= (3 if before else 2), at
        assert [value for _, value in world.emitted] == [value for _, value in clean.emitted], at


async def test_a_run_that_began_before_there_were_hooks_continues_without_them() -> None:
    world = HookedWorld()
    program = Program(lambda ctx, _: _tools(ctx))
    assert isinstance(await world.turn(program, None), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None

    @world.app.hook("before_tool_call", always=True, guard=True)
    def never(event: HookEvent) -> None:
        raise OSError("must not run")

    del world.journal["0"]  # as it was before the first release that had hooks
    world.answer_one()
    result = await world.play(program)
    assert isinstance(result, Completed)
    assert world.failures == []


async def test_a_newly_added_hook_waits_for_the_next_run() -> None:
    world = HookedWorld(cold=True)
    program = Program(lambda ctx, _: _tools(ctx))
    assert isinstance(await world.turn(program, None), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    added: list[str] = []
    world.app.hook("before_tool_call", name="new", always=True)(lambda event: added.append(event.name))
    world.answer_one()
    assert isinstance(await world.play(program), Completed)
    assert added == []
    assert isinstance(await HookedWorld(app=world.app).play(program), Completed)
    assert added == ["a", "b"]


@pytest.mark.parametrize("guard", [False, True])
async def test_a_removed_hook_counts_as_a_failing_one(guard: bool) -> None:
    world = HookedWorld(cold=True)
    world.app.hook("before_tool_call", name="old", always=True, guard=guard)(lambda event: None)
    program = Program(lambda ctx, _: _tools(ctx))
    assert isinstance(await world.turn(program, None), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    world.app = App("later")
    world.answer_one()
    result = await world.play(program)
    assert world.failures == ["before_tool_call"]
    if guard:
        assert isinstance(result, Failed)
        assert (result.type, result.rejected) == (Denied.__name__, True)
        assert "no app in this process declares hook 'old'" in result.message
    else:
        assert isinstance(result, Completed)


async def test_failure_hooks_get_each_permanently_failed_delivery() -> None:
    """A redriven run may fail at a place that other steps have taken, and must find its own steps."""
    told: list[str] = []
    world = HookedWorld()
    world.app.hook("agent_stopped", name="alert", always=True)(lambda event: told.append(event.error["message"]))
    for entry, message in (("5-0", "one"), ("9-1", "two")):
        world.entry = entry

        async def fails(ctx: AgentContext, _: object, message: str = message) -> None:
            if message == "two":
                await ctx.step(str)
            raise ValueError(message)

        program = Program(fails)
        for attempt in (1, POLICY.attempts):
            world.run = world.new_run(program, attempt=attempt)
            result = await world.run.advance()
            assert isinstance(result, Failed)
            assert (result.type, result.message) == ("ValueError", message)
        assert [row.kind for row in result.steps if row.status == "completed"] == ["hook"]
    assert told == ["one", "two"]


async def _tools(ctx: AgentContext) -> object:
    return [await ctx.tool("a"), await ctx.tool("b")]


async def test_a_task_started_by_a_step_runs_no_task_hooks() -> None:
    for asked in (False, True):
        seen: list[str] = []
        world = HookedWorld(app=App("asked"))
        for point in HookPoint:
            world.app.hook(point, name="note", always=True)(lambda event, seen=seen: seen.append(str(event.point)))

        async def tells(ctx: AgentContext, _: object) -> str:
            return "done"

        world.run = world.new_run(Program(tells))
        world.run.meta = {"asked": True} if asked else {}
        assert isinstance(await world.run.advance(), Completed)
        assert seen == (
            ["agent_started", "agent_stopped", "output_process"]
            if asked
            else [
                "task_created", "session_started", "user_input_received", "pre_task_call", "agent_started",
                "agent_stopped", "post_task_call", "output_process", "task_completed", "session_finished",
            ]
        )  # fmt: skip
