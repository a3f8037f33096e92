"""Replays a recorded task: its code on the recorded results, or its messages to their handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, cast

from runtime_core.app.app import App
from runtime_core.aworld.events.manager import HandlerTable
from runtime_core.aworld.events.message import Message, events_of
from runtime_core.client.client import Client
from runtime_core.client.fork import ForkPlan, RecordedRun, from_record, runs_of
from runtime_core.codec import quoted
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.hooks.around import RunHooks, failed_entry
from runtime_core.hooks.declared import STEP
from runtime_core.ids import ROOT_RUN
from runtime_core.replay.handlers import Pace, Sleep, replay_handlers
from runtime_core.replay.run import DivergedStep, ReplayRun
from runtime_core.runs.ports import Meta
from runtime_core.runs.step import from_json
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.commands import Begun
from runtime_core.wire.results import TaskResponse

if TYPE_CHECKING:
    from runtime_core.host.local import LocalApp
    from runtime_core.trajectory.store import TrajectoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """One run, replayed."""

    run: str
    agent: str
    status: str
    """`completed`, `failed`, `stopped` (at a step without a result, or before `until`), `diverged`, or `unknown`: the
    app has no such agent."""
    output: Any = None  # Any: JSON
    error: dict[str, str] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """The instance's state when the replay ended; a replay begins with an empty one."""
    stopped_at: str | None = None
    diverged: DivergedStep | None = None
    same: bool = False
    """Whether it ended as the record says."""
    messages: Sequence[Message] = ()
    emitted: Sequence[Any] = ()  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay gave."""

    task_id: str
    messages: Sequence[Message] = ()
    """Those that were given to the sink or the handlers, or that the code has emitted."""
    following: Sequence[Message] = ()
    """What handlers have yielded; nobody has handled these."""
    runs: Mapping[str, RunReplay] = field(default_factory=dict)
    """By run id, where code was replayed."""
    stopped_at: str | None = None
    """The message or step before which the replay ended."""
    response: TaskResponse | None = None
    """How the task ended in the LocalApp, where it ran there."""

    @property
    def run(self) -> RunReplay:
        """The task's first run. Raises WeftError where no code was replayed."""
        if ROOT_RUN not in self.runs:
            raise WeftError(f"of task {self.task_id} only messages were replayed; give an App to replay its code")
        return self.runs[ROOT_RUN]

    @property
    def divergences(self) -> list[DivergedStep]:
        """Where code and record differ, by run."""
        return [run.diverged for run in self.runs.values() if run.diverged is not None]


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


class Sink(Protocol):
    """Takes messages, as an EventManager does."""

    async def emit_message(self, message: Message) -> object: ...


Source: TypeAlias = "TaskTrajectory | TrajectoryStore | Client"
Into: TypeAlias = "App | LocalApp | HandlerTable | Sink | Callable[[Message], Awaitable[object] | object]"


async def replay(
    source: Source,
    task_id: str,
    into: Into,
    *,
    namespace: str = "weft",
    speed: float | None = None,
    until: str | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Replayed:
    """Replay a task that has ended or goes on, as far as it is recorded. Nothing is called again.

    `into` an App: its agents' code runs on the recorded results, in this process, each run by itself. `until` is a
    step of the first run (`3.0.1`) or of another (`r/2:1`), or the id of a message. A LocalApp that runs: the same;
    where all is as it was, the whole task runs in it then, under its id and with its journal filled.

    `into` a HandlerTable: its handlers get the recorded messages, and what they ask for is answered from the record. A
    function of a message, or an object with `emit_message`: it gets the messages, in their original order; those of a
    task that emitted none are made from its steps. `until` is then the id of a message or its step.

    `speed` keeps the original spacing of messages: 1 as it was, 2 twice as fast; None: at once. `source` is a
    trajectory, a store with its `namespace`, or a client (while the record is still on the broker). Raises
    InvalidInput for a task of which nothing is recorded.
    """
    if speed is not None and not (isinstance(speed, (int, float)) and speed > 0):
        raise InvalidInput("speed", f"{quoted(speed)} is not a number above 0; None replays at once")
    trajectory = await _trajectory(source, task_id, namespace)
    if isinstance(into, App):
        return await replay_code(trajectory, into, until)
    if _is_local(into):
        return await replay_whole(trajectory, into, until)
    pace = Pace(speed, sleep)
    messages, stopped = _until(events_of(trajectory), until)
    if isinstance(into, HandlerTable):
        following = await replay_handlers(trajectory, into, messages, pace)
        return Replayed(task_id=task_id, messages=messages, following=following, stopped_at=stopped)
    give = _give(into)
    for message in messages:
        await pace.before(message)
        given = give(message)
        if inspect.isawaitable(given):
            await given
    return Replayed(task_id=task_id, messages=messages, stopped_at=stopped)


async def _trajectory(source: Source, task_id: str, namespace: str) -> TaskTrajectory:
    if isinstance(source, TaskTrajectory):
        found: TaskTrajectory | None = source
    elif isinstance(source, Client):
        found = await from_record((await source.task(task_id)).bus, source.namespace, task_id)
    else:
        found = await source.task(namespace, task_id)
    if found is None:
        raise InvalidInput("task_id", f"nothing is recorded of task {task_id!r}")
    return found


def _is_local(into: object) -> TypeGuard[LocalApp]:
    from runtime_core.host.local import LocalApp  # here, since most replays need none of what it stands on

    return isinstance(into, LocalApp)


def _give(into: object) -> Callable[[Message], object]:
    emit = getattr(into, "emit_message", into)
    if not callable(emit):
        raise InvalidInput("into", f"{quoted(into)} takes no messages: give an App, a HandlerTable or a function")
    return cast("Callable[[Message], object]", emit)


def _until(messages: list[Message], until: str | None) -> tuple[list[Message], str | None]:
    """The messages before that of this id or step. Raises InvalidInput where there is no such message."""
    if until is None:
        return messages, None
    for at, message in enumerate(messages):
        if until in (message.id, message.id.rpartition("/")[2]):
            return messages[:at], message.id
    raise InvalidInput("until", f"{until!r} is no message of this task: neither an id nor the step of one")
