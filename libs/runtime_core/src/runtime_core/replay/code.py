"""Replays the code of a task's agents on the recorded results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime_core.app.app import App
from runtime_core.client.fork import ForkPlan
from runtime_core.client.recorded_runs import RecordedRun, runs_of
from runtime_core.codec import quoted
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.errors import InvalidInput
from runtime_core.hooks.around import RunHooks, failed_entry
from runtime_core.hooks.selection import STEP
from runtime_core.ids import ROOT_RUN
from runtime_core.replay.replayed import Replayed, RunReplay
from runtime_core.replay.run import ReplayRun
from runtime_core.runs.ports import Meta
from runtime_core.runs.step import from_json
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.commands import Begun

if TYPE_CHECKING:
    from runtime_core.host.local import LocalApp


async def replay_code(trajectory: TaskTrajectory, app: App, until: str | None) -> Replayed:
    """Replay each run of an agent that the app has. Raises InvalidInput while the first run goes on."""
    runs: dict[str, RunReplay] = {}
    recorded = runs_of(trajectory)
    if ROOT_RUN not in recorded or not recorded[ROOT_RUN].agent:
        # A run has its own row when it ends: of one that goes on, agent and input are not recorded yet.
        raise InvalidInput(
            "task_id",
            f"the first run of task {trajectory.task!r} has not ended, so its input is not recorded yet: replay its "
            "messages, or fork it",
        )
    run_of_until, step = (ROOT_RUN, None) if until is None else _step_of(until, trajectory.task, recorded)
    for run in recorded.values():
        if run.agent:
            runs[run.id] = await _replay_run(trajectory, app, run, step if run.id == run_of_until else None)
    first = runs.get(ROOT_RUN)
    return Replayed(
        task_id=trajectory.task,
        runs=runs,
        messages=first.messages if first is not None else (),
        stopped_at=runs[run_of_until].stopped_at if run_of_until in runs else None,
    )


def _step_of(until: str, task: str, recorded: Mapping[str, RecordedRun]) -> tuple[str, str]:
    """Run and step that `until` names: `step`, `run:step` or a message's id. Raises InvalidInput: none is recorded."""
    if until.startswith(f"{task}/"):
        run, _, step = until.removeprefix(f"{task}/").rpartition("/")
    else:
        run, _, step = until.rpartition(":")
    run = run or ROOT_RUN
    if run not in recorded or step not in recorded[run].steps:
        raise InvalidInput(
            "until",
            f"{quoted(until)} is no recorded step, as 3, 3.0.1, r/2:1 or the id of a message; "
            "`weft trajectory show` lists them",
        )
    return run, step


def _ignored(point: str) -> None:
    """A hook that failed was counted when it did."""


async def _replay_run(trajectory: TaskTrajectory, app: App, recorded: RecordedRun, until: str | None) -> RunReplay:
    definition = app.agents.get(recorded.agent)
    if definition is None:
        return RunReplay(run=recorded.id, agent=recorded.agent, status="unknown")
    session = trajectory.end.session if trajectory.end is not None else ""
    run = ReplayRun(
        recorded,
        definition,
        app.functions,
        task_id=trajectory.task,
        meta=Meta(session_id=session, metadata={}),
        until=until,
    )
    if STEP in recorded.steps:
        run.hooks = RunHooks(
            run, app.hooks, {}, retry=definition.retry, entry=lambda: failed_entry(recorded.steps), failed=_ignored
        )
    try:
        result = await run.advance()
        state = run.state.value()
    finally:
        await run.aclose()
    status, output, error = "stopped", None, None
    if run.diverged_at is not None:
        status = "diverged"
    elif run.stopped_at is None and isinstance(result, Completed):
        status, output = "completed", from_json(result.output)
    elif run.stopped_at is None and isinstance(result, Failed):
        status, error = "failed", {"type": result.type, "message": result.message}
    same = status == recorded.status and (
        output == from_json(recorded.output) if status == "completed" else error == recorded.error
    )
    return RunReplay(
        run=recorded.id,
        agent=recorded.agent,
        status=status,
        output=output,
        error=error,
        state=state,
        stopped_at=run.stopped_at,
        diverged=run.diverged_at,
        same=same,
        messages=run.messages,
        emitted=run.emitted,
    )


async def replay_whole(trajectory: TaskTrajectory, local: LocalApp, until: str | None) -> Replayed:
    """Replay the code, and where it does as it did, the whole task in an app of one process."""
    replayed = await replay_code(trajectory, local.app, until)
    if until is not None or not replayed.run.same:
        return replayed
    run = runs_of(trajectory)[ROOT_RUN]
    # With all its results there is nothing that it could ask for. The same id: some values derive from it.
    journal = {step.id: step.wildcard for step in run.steps.values()}
    begun = Begun(trajectory.task, "", journal, started_ms=run.started_ms)
    session = trajectory.end.session if trajectory.end is not None else ""
    plan = ForkPlan(run, run.input, {"session_id": session}, begun)
    task = await local.client.start(plan.submission(task_id=trajectory.task))
    return replace(replayed, response=await task.result())
