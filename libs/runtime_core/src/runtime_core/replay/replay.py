"""Replays a recorded task: its code with the recorded results, or its messages to handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, cast

from runtime_core.app.app import App
from runtime_core.aworld.events.handlers import HandlerTable
from runtime_core.aworld.events.manager import EventManager
from runtime_core.aworld.events.message import Message, events_of
from runtime_core.client.client import Client
from runtime_core.client.fork import ForkPlan, RecordedRun, RecordedStep, from_record, runs_of
from runtime_core.codec import quoted
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.declare.manifest import END_AGENTS
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.hooks.around import RunHooks, failed_entry
from runtime_core.hooks.declared import STEP
from runtime_core.ids import ROOT_RUN
from runtime_core.record.step import Step, as_call
from runtime_core.replay.run import DivergedStep, ReplayRun
from runtime_core.runs.journal import from_json
from runtime_core.runs.ports import Meta
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.commands import Begun
from runtime_core.wire.events import TaskResponse

if TYPE_CHECKING:
    from runtime_core.host.local import LocalApp
    from runtime_core.runs.context import AgentContext
    from runtime_core.trajectory.store import TrajectoryStore

Sleep: TypeAlias = Callable[[float], Awaitable[object]]
Source: TypeAlias = "TaskTrajectory | TrajectoryStore | Client"
Into: TypeAlias = "App | LocalApp | HandlerTable | Sink | Callable[[Message], Awaitable[object] | object]"


class Pace:
    """Keeps the recorded time between messages, divided by `speed`."""

    def __init__(self, speed: float | None, sleep: Sleep) -> None:
        self._speed = speed
        self._sleep = sleep
        self._last: float | None = None

    async def before(self, message: Message) -> None:
        last, self._last = self._last, message.timestamp
        if self._speed is not None and last is not None and message.timestamp > last:
            await self._sleep((message.timestamp - last) / self._speed)


class _ReplayManager(EventManager):
    """Collects what handlers emit and delivers nothing: the record already has what followed."""

    def __init__(self, ctx: AgentContext, table: HandlerTable) -> None:
        super().__init__(ctx, table)
        self.following: list[Message] = []

    async def emit_message(self, message: Message) -> Message:
        self.following.append(message)
        return message


class _Handlers:
    """The code of a run that passes recorded messages to handlers."""

    name = "replay"
    timeout_seconds = 86_400.0 * 365
    own_tools: Sequence[object] = ()

    def __init__(self, table: HandlerTable, messages: Sequence[Message], pace: Pace) -> None:
        self._table = table
        self._messages = messages
        self._pace = pace
        self.following: list[Message] = []

    def decode_input(self, data: bytes, /) -> object:
        return None

    def encode_output(self, value: Any, /) -> bytes:  # Any: the protocol's
        return b"null"

    def start(self, ctx: AgentContext, value: Any, /) -> Coroutine[Any, Any, object]:  # Any: the protocol's
        return self._run(ctx)

    async def _run(self, ctx: AgentContext) -> None:
        manager = _ReplayManager(ctx, self._table)
        for message in self._messages:
            await self._pace.before(message)
            if message.category in self._table:
                await manager.dispatch(message)
        self.following = manager.following


async def replay_handlers(
    trajectory: TaskTrajectory, table: HandlerTable, messages: Sequence[Message], pace: Pace
) -> Sequence[Message]:
    """Return what the handlers yield. Raises WeftError if one fails or requests an unrecorded step."""
    recorded = runs_of(trajectory).get(ROOT_RUN, RecordedRun(ROOT_RUN))
    code = _Handlers(table, messages, pace)
    run = ReplayRun(
        recorded, code, App("replay").functions, task_id=trajectory.task, meta=Meta(metadata={}), by_place=False
    )
    try:
        result = await run.advance()
    finally:
        await run.aclose()
    if isinstance(result, Failed):
        raise WeftError(f"the replay of task {trajectory.task} failed in a handler: {result.type}: {result.message}")
    return code.following


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """The replay of one run."""

    run: str
    agent: str
    status: str
    """`completed`, `failed`, `stopped` (at a step without a result, or before `until`), `diverged`, or `unknown`: the
    app has no such agent."""
    output: Any = None  # Any: JSON
    error: dict[str, str] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """The instance's state at the end of the replay, which starts with an empty state."""
    stopped_at: str | None = None
    diverged: DivergedStep | None = None
    same: bool = False
    """Whether it ended as recorded."""
    messages: Sequence[Message] = ()
    emitted: Sequence[Any] = ()  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay."""

    task_id: str
    messages: Sequence[Message] = ()
    """The messages passed to the sink or the handlers, or emitted by the code."""
    following: Sequence[Message] = ()
    """The messages that handlers yielded, which no handler has received."""
    runs: Mapping[str, RunReplay] = field(default_factory=dict)
    """The replayed runs by id; empty for messages."""
    stopped_at: str | None = None
    """The message or step before which the replay stopped."""
    response: TaskResponse | None = None
    """The end of the task in the LocalApp, if it ran there."""

    @property
    def run(self) -> RunReplay:
        """The task's first run. Raises WeftError if no code was replayed."""
        if ROOT_RUN not in self.runs:
            raise WeftError(f"only the messages of task {self.task_id} were replayed; pass an App to replay its code")
        return self.runs[ROOT_RUN]

    @property
    def divergences(self) -> list[DivergedStep]:
        """The steps at which code and record differ, at most one per run."""
        return [run.diverged for run in self.runs.values() if run.diverged is not None]


async def replay_code(trajectory: TaskTrajectory, app: App, until: str | None) -> Replayed:
    """Replay each run whose agent the app has. Raises InvalidInput until the first run has ended."""
    runs: dict[str, RunReplay] = {}
    recorded = runs_of(trajectory)
    if ROOT_RUN not in recorded or not recorded[ROOT_RUN].agent:
        # The end of a run records its agent and input.
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
    """Return the run and step of `until`: `step`, `run:step` or a message id. Raises InvalidInput if not recorded."""
    if until.startswith(f"{task}/"):
        run, _, step = until.removeprefix(f"{task}/").rpartition("/")
    else:
        run, _, step = until.rpartition(":")
    run = run or ROOT_RUN
    if run not in recorded or step not in recorded[run].steps:
        raise InvalidInput(
            "until",
            f"{quoted(until)} is not a recorded step, such as 3, 3.0.1, r/2:1 or the id of a message; "
            "`weft trajectory show` lists them",
        )
    return run, step


def _ignored(point: str) -> None:
    """Ignore a failed hook: it was counted in the original run."""


async def _replay_run(trajectory: TaskTrajectory, app: App, recorded: RecordedRun, until: str | None) -> RunReplay:
    run = _replay_of(trajectory, app, recorded, until)
    if run is None:
        return RunReplay(run=recorded.id, agent=recorded.agent, status="unknown")
    return await _replayed(run)


def _replay_of(trajectory: TaskTrajectory, app: App, recorded: RecordedRun, until: str | None) -> ReplayRun | None:
    """Return a run with the code of the app; None if the app has no such agent."""
    definition = app.agents.get(recorded.agent)
    if definition is None:
        return None
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
    return run


async def _replayed(run: ReplayRun) -> RunReplay:
    recorded = run.recorded
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


RUN_SECONDS = 10.0
"""How long the code of one run may take in a check. A replay waits for nothing."""
_UNRECORDED_STATE = "the state of an agent with a key is not recorded"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a recorded task and the code of an app differ."""

    task: str
    agent: str
    run: str
    step: str
    """Empty if the run as a whole differs."""
    recorded: str
    """What the task has done, in words: `ctx.tool("search", query="x")`."""
    now: str
    """What the code does now."""
    line: str = ""
    """The line of the code, as `app.py:12 in report`; empty if that is not known."""

    def __str__(self) -> str:
        step = f"step {self.step} of " if self.step else ""
        line = f" ({self.line})" if self.line else ""
        return f"task {self.task}: {step}run {self.run} of agent {self.agent!r}{line}: {self.recorded}; now {self.now}"


@dataclass(slots=True)
class Check:
    """The result of `check`."""

    tasks: int = 0
    runs: int = 0
    """The runs that were replayed."""
    differences: list[Difference] = field(default_factory=list)
    """At most one per task."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Runs that could not be compared, by reason."""

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        lines = [str(difference) for difference in self.differences]
        lines += [f"{count} runs were not compared: {reason}" for reason, count in self.skipped.items()]
        return "\n".join([*lines, f"{self.tasks} tasks, {self.runs} runs, {len(self.differences)} differ"])


async def check(
    source: TrajectoryStore,
    app: App,
    *,
    namespace: str = "weft",
    since: datetime | timedelta | None = None,
    agent: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Check:
    """Run the code of an app on recorded tasks, and report where it would request other steps than they did.

    It calls no tool, agent or model. A changed result of a run is no difference, since no running task has it yet.

    Args:
        since: Only tasks that ended at or after this time (with a time zone), or that long ago; None: all.
        agent: Only tasks of this agent.
        limit: At most this many tasks; None: all.
        progress: Called with the number of tasks after each task.
    """
    found = Check()
    after = datetime.now(UTC) - since if isinstance(since, timedelta) else since
    async for trajectory in _ended_tasks(source, namespace, after, agent):
        if limit is not None and found.tasks >= limit:
            break
        found.tasks += 1
        if trajectory.steps and any(step.fork is not None for step in trajectory.steps):
            trajectory = await source.task(namespace, trajectory.task) or trajectory  # with the steps that it inherited
        difference = await _first_difference(trajectory, app, found)
        if difference is not None:
            found.differences.append(difference)
        if progress is not None:
            progress(found.tasks)
    return found


async def _ended_tasks(
    source: TrajectoryStore, namespace: str, since: datetime | None, agent: str | None
) -> AsyncIterator[TaskTrajectory]:
    task, end, steps = "", None, list[Step]()
    async for stored in source.steps(namespace, since=since, agent=agent):
        if stored.task != task:
            if end is not None:
                yield TaskTrajectory(namespace, task, end, steps)
            task, end, steps = stored.task, stored.end, []
        steps.append(stored.step)
    if end is not None:
        yield TaskTrajectory(namespace, task, end, steps)


async def _first_difference(trajectory: TaskTrajectory, app: App, found: Check) -> Difference | None:
    for recorded in runs_of(trajectory).values():
        if not recorded.agent or recorded.agent.startswith(END_AGENTS):
            continue
        run = _replay_of(trajectory, app, recorded, None)
        if run is None:
            found.skipped[f"this app has no agent {recorded.agent!r}"] += 1
            continue
        found.runs += 1
        try:
            async with asyncio.timeout(RUN_SECONDS):
                replayed = await _replayed(run)
        except TimeoutError:
            replayed = None
        what = _difference(run, replayed)
        if what is None:
            continue
        if recorded.key and run.state.used:
            found.skipped[_UNRECORDED_STATE] += 1
            continue
        return Difference(trajectory.task, recorded.agent, recorded.id, *what)
    return None


def _difference(run: ReplayRun, replayed: RunReplay | None) -> tuple[str, str, str, str] | None:
    """Return the step, the recorded side, the side of the code, and its line; None if they do not differ."""
    if replayed is None:
        return "", f"it {run.recorded.status}", f"it does not end within {RUN_SECONDS:g} s of a replay", ""
    if (at := run.diverged_at) is not None:
        return at.step, at.recorded, at.asked, at.line
    if run.recorded.status != "completed":
        return None  # what it requested last may have no result
    if (at := run.unrecorded) is not None:
        return at.step, "it ended without another step", at.asked, at.line
    if replayed.error is not None:
        error = f"{replayed.error['type']}: {replayed.error['message']}"
        return "", "it completed", f"it fails with {quoted(error, 200)}", ""
    left = next((step for step in run.recorded.before(None) if _is_left(step, run)), None)
    if left is None:
        return None
    return left.id, as_call(left.kind, left.name, left.key, left.request), "it ends without this step", ""


_COMPARED = (
    "tool", "agent", "engine", "ray", "spark", "human", "receive", "timer", "step", "model", "send", "publish",
    "release", "acquire",
)  # fmt: skip


def _is_left(step: RecordedStep, run: ReplayRun) -> bool:
    """Return whether the code has not requested a recorded step. How far a job gets depends on timing."""
    in_job = any(step.id.startswith(f"{job.id}.") for job in run.jobs)
    return step.kind in _COMPARED and step.id not in run.asked and not in_job


async def replay_whole(trajectory: TaskTrajectory, local: LocalApp, until: str | None) -> Replayed:
    """Replay the code. If it behaves as recorded, also run the whole task in the LocalApp."""
    replayed = await replay_code(trajectory, local.app, until)
    if until is not None or not replayed.run.same:
        return replayed
    run = runs_of(trajectory)[ROOT_RUN]
    # The journal has all results, so nothing runs again. Keep the id: some values derive from it.
    begun = Begun(trajectory.task, "", run.journal(), started_ms=run.started_ms)
    session = trajectory.end.session if trajectory.end is not None else ""
    plan = ForkPlan(run, run.input, {"session_id": session}, begun)
    task = await local.client.start(plan.submission(task_id=trajectory.task))
    return replace(replayed, response=await task.result())


class Sink(Protocol):
    """Receives messages, like an EventManager."""

    async def emit_message(self, message: Message) -> object: ...


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
    """Replay a task as far as it is recorded. Tools and models are not called again.

    Args:
        source: A trajectory, a store with its `namespace`, or a client (while the record is still on the broker).
        into: Receives the replay.
            An App: the code of its agents runs in this process with the recorded results, run by run.
            A running LocalApp: the same. If the code behaves as recorded, the whole task then runs in the LocalApp,
            under its id and with its journal filled.
            A HandlerTable: its handlers get the recorded messages, and their requests get the recorded results.
            A function of a message, or an object with `emit_message`: it gets the messages in their original order.
            If the task emitted none, they are built from its steps.
        speed: Keeps the original time between messages: 1 as recorded, 2 twice as fast; None: no pauses.
        until: Stop before this message or step: the id of a message, a step of the first run (`3.0.1`), or a step of
            another run (`r/2:1`).
        sleep: Awaited for the pauses.

    Raises:
        InvalidInput: Nothing is recorded of the task, or `until` is not recorded.
    """
    if speed is not None and not (isinstance(speed, (int, float)) and speed > 0):
        raise InvalidInput("speed", f"{quoted(speed)} is not a number above 0; None replays without pauses")
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
    from runtime_core.host.local import LocalApp  # imported here: most replays do not need it

    return isinstance(into, LocalApp)


def _give(into: object) -> Callable[[Message], object]:
    emit = getattr(into, "emit_message", into)
    if not callable(emit):
        raise InvalidInput("into", f"{quoted(into)} cannot receive messages: pass an App, a HandlerTable or a function")
    return cast("Callable[[Message], object]", emit)


def _until(messages: list[Message], until: str | None) -> tuple[list[Message], str | None]:
    """Return the messages before the one with this id or step. Raises InvalidInput if there is no such message."""
    if until is None:
        return messages, None
    for at, message in enumerate(messages):
        if until in (message.id, message.id.rpartition("/")[2]):
            return messages[:at], message.id
    raise InvalidInput("until", f"{until!r} is neither the id nor the step of a message of this task")
