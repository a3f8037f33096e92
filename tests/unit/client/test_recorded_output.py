"""Output on the record: what a fork inherits of it."""

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


def recorded() -> TaskTrajectory:
    rows = [
        row("r", "emit", "emit", ["a", "b", "c"], "0e1", **{PIECES: 3}),
        row("r/1", "tool", "search", "found"),
        row("r", "emit", "emit", ["x", "y"], "2.0.0e1", **{PIECES: 2}),
        row("r", "emit", "emit", "d", "2e4"),
        row("r", "agent", "writer", "found"),
    ]
    rows[1].input = msgspec.Raw(b"{}")
    rows[-1].input = msgspec.Raw(b"null")
    return TaskTrajectory("weft", "t", None, sorted(rows, key=in_order))


TRAJECTORY = recorded()


@pytest.mark.parametrize(
    ("at", "emitted"),
    [
        ("1", {"e": 3}),
        ("2.0.1", {"e": 3, "2.0.e": 2}),
        ("3", {"e": 4, "2.0.e": 2}),
        (None, {"e": 4, "2.0.e": 2}),
    ],
)
def test_a_fork_inherits_the_output_before_its_step(at: str | None, emitted: dict[str, int]) -> None:
    run = runs_of(TRAJECTORY)["r"]
    assert run.emitted_before(at) == emitted
    assert {name for name in run.journal(at) if name.startswith("@")} == {f"@{branch}" for branch in emitted}


def test_output_is_between_the_steps_before_and_after_it() -> None:
    assert [step.id for step in runs_of(TRAJECTORY)["r"].before(None)] == ["0e1", "1", "2.0.0e1", "2e4"]
    assert runs_of(TRAJECTORY)["r"].last_place == 2


async def test_a_replay_finds_the_steps_between_output() -> None:
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

    run = ReplayRun(runs_of(TRAJECTORY)["r"], app.agents["writer"], app.functions, task_id="t", meta=Meta())
    result = await run.advance()
    assert isinstance(result, Completed), result
    assert run.emitted == ["a", "b", "c", "x", "y", "d"]
