"""Output on the record: what a fork inherits of it, even from a run whose pieces took places."""

from __future__ import annotations

import json

import msgspec
import pytest

from runtime_core.app.app import App
from runtime_core.client.fork import runs_of
from runtime_core.client.replay import ReplayRun
from runtime_core.consumer.effects import Completed
from runtime_core.runs.context import AgentContext
from runtime_core.runs.ports import Meta
from runtime_core.trajectory.reading import TaskTrajectory, in_order
from runtime_core.wire.step import PIECES, Step


def row(run: str, kind: str, name: str, output: object, step: str = "", **attributes: int) -> Step:
    raw = msgspec.Raw(json.dumps(output).encode())
    made = Step(run=run, step=step, kind=kind, name=name, status="completed", started=1.0, ended=2.0)
    made.output, made.attributes = raw, dict(attributes)
    return made


def recorded(first: str, tool: str, part: str, last: str) -> TaskTrajectory:
    rows = [
        row("r", "emit", "emit", ["a", "b", "c"], first, **{PIECES: 3}),
        row(f"r/{tool}", "tool", "search", "found"),
        row("r", "emit", "emit", ["x", "y"], part, **{PIECES: 2}),
        row("r", "emit", "emit", "d", last),
        row("r", "agent", "writer", "found"),
    ]
    rows[1].input = msgspec.Raw(b"{}")
    rows[-1].input = msgspec.Raw(b"null")
    return TaskTrajectory("weft", "t", None, sorted(rows, key=in_order))


OWN = recorded("0e1", "1", "2.0.0e1", "2e4")
WITH_PLACES = recorded("1", "4", "5.0.1", "6")


@pytest.mark.parametrize(
    ("trajectory", "at", "emitted"),
    [
        (OWN, "1", {"e": 3}),
        (OWN, "2.0.1", {"e": 3, "2.0.e": 2}),
        (OWN, "3", {"e": 4, "2.0.e": 2}),
        (OWN, None, {"e": 4, "2.0.e": 2}),
        (WITH_PLACES, "3", {"": 2}),
        (WITH_PLACES, "5.0.2", {"": 3, "5.0.": 1}),
        (WITH_PLACES, "6", {"": 3, "5.0.": 2}),
        (WITH_PLACES, None, {"": 4, "5.0.": 2}),
    ],
)
def test_a_fork_inherits_the_output_before_its_step(
    trajectory: TaskTrajectory, at: str | None, emitted: dict[str, int]
) -> None:
    run = runs_of(trajectory)["r"]
    assert run.emitted_before(at) == emitted
    assert {name for name in run.journal(at) if name.startswith("@")} == {f"@{branch}" for branch in emitted}


def test_output_is_between_the_steps_before_and_after_it() -> None:
    assert [step.id for step in runs_of(OWN)["r"].before(None)] == ["0e1", "1", "2.0.0e1", "2e4"]
    assert runs_of(OWN)["r"].last_place == 2
    assert runs_of(WITH_PLACES)["r"].last_place == 6


@pytest.mark.parametrize("trajectory", [OWN, WITH_PLACES])
async def test_a_replay_finds_the_steps_between_output(trajectory: TaskTrajectory) -> None:
    app = App("streams")

    @app.tool
    def search() -> str:
        raise AssertionError("a replay calls nothing")

    @app.agent("writer")
    async def writer(ctx: AgentContext, _: object) -> object:
        async def part() -> None:
            for text in ("x", "y"):
                await ctx.emit(text)

        for text in ("a", "b", "c"):
            await ctx.emit(text)
        found = await ctx.tool(search)
        await ctx.gather(part())
        await ctx.emit("d")
        return found

    run = ReplayRun(runs_of(trajectory)["r"], app.agents["writer"], app.functions, task_id="t", meta=Meta())
    result = await run.advance()
    assert isinstance(result, Completed), result
    assert run.emitted == ["a", "b", "c", "x", "y", "d"]
