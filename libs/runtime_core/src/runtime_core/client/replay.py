"""Replays the code of a recorded task with the recorded results, and checks changed code against recorded tasks."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from runtime_core.bus.commits import JOURNAL_LIMIT, CallBegun
from runtime_core.bus.deliveries import RunFields
from runtime_core.bus.replies import Answer
from runtime_core.client.fork import RecordedRun, RecordedStep, runs_of
from runtime_core.consumer.effects import Completed, Effect, Failed, JournaledStep
from runtime_core.consumer.settle import place_in_code
from runtime_core.declare.manifest import END_AGENTS
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.runs.calls import RequestStep
from runtime_core.runs.definition import DeclaredApp
from runtime_core.runs.effects import Call
from runtime_core.runs.hooks.around import failed_entry
from runtime_core.runs.hooks.declared import STEP
from runtime_core.runs.journal import StepOfRun, canonical, from_json, pack
from runtime_core.runs.output import Piece, PieceStep
from runtime_core.runs.ports import Attempt, Functions, Meta, Workplace
from runtime_core.runs.run import Run, RunDefinition
from runtime_core.runs.scheduler import Branch
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.codec import quoted
from runtime_core.wire.events import TaskResponse
from runtime_core.wire.ids import ROOT_RUN, any_digest, attempt_in_digest, digest_in_attempt, step_digest
from runtime_core.wire.step import RESULT_OK, Status, Step, as_call

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore

_SAID = ("send", "publish", "message", "usage", "release")
"""Kinds of steps without a result, which a record need not have."""


@dataclass(frozen=True, slots=True)
class DivergedStep:
    """A step at which code and record differ."""

    run: str
    step: str
    recorded: str
    """The recorded step."""
    asked: str
    """The step that the code requests."""
    line: str = ""
    """The line of the user's code, as `app.py:12 in report`; empty if that is not known."""

    def __str__(self) -> str:
        where = f"step {self.step} of run {self.run}{f' ({self.line})' if self.line else ''}"
        return f"{where}: the record has {self.recorded}, but the code requests {self.asked}"


class _NoBroker:
    """A port that must not be called: an unrecorded step ends the replay first."""

    async def confirm(self, known: Container[str]) -> None:
        raise AssertionError("a replay must not start a step")

    async def record(self, step: str, *_: Any, **__: Any) -> bytes:  # Any: as in `RunPort`
        raise AssertionError(f"a replay must not execute step {step}")

    async def store_again(self, *_: Any) -> str:  # Any: as in `RunPort`
        raise AssertionError("a replay has stored nothing")

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        raise AssertionError(f"a replay must not call the model of step {step}")

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        raise AssertionError(f"a replay must not call the model of step {step}")

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        raise AssertionError(f"a replay must not call the model of step {step}")

    def progress(self, step: str, data: bytes) -> None:
        raise AssertionError(f"a replay must not execute step {step}")

    async def usage(self) -> bytes:
        return b""

    async def manifests(self) -> None:
        return None

    def emit(self, piece: Piece, known: Container[str]) -> None:
        raise AssertionError(f"a replay must not emit piece {piece.number}")

    def room(self) -> None:
        return None

    def note(self, step: str, digest: str, name: str = "") -> None:
        raise AssertionError(f"a replay must not store step {step}")

    def mark(self, mark: JournaledStep, known: Iterable[str]) -> None:
        """An open run reaches a patch: the replay ends at the next step."""

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b"", *, answered: str = ""
    ) -> Mapping[str, asyncio.Future[Answer]]:
        raise AssertionError("a replay must not send requests")


class ReplayRun(Run):
    """A run whose steps get their results from `recorded`, by place or by request.

    It ends before step `until`, at a step without a recorded result, and at a step that differs from the recorded
    one; then `stopped_at` or `diverged` is set. If `by_place` is False, a step gets the first unused result of an
    equal request, so that code that differs from the recorded code can run.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        definition: RunDefinition,
        functions: Functions,
        *,
        task_id: str,
        meta: Meta,
        until: str | None = None,
        by_place: bool = True,
    ) -> None:
        steps = recorded.steps.values() if by_place else ()
        journal = {step.id: step.wildcard for step in steps if step.kind != "emit"}
        super().__init__(
            definition,
            Attempt(task_id, recorded.id, recorded.key, recorded.attempt),
            RunFields(data=recorded.input, started_ms=recorded.started_ms, journal=journal),
            _NoBroker(),
            Workplace(functions),
            meta,
        )
        self.recorded = recorded
        self.until = until
        self.stopped_at: str | None = None
        self.unrecorded: DivergedStep | None = None
        """The step without a recorded result at which it stopped."""
        self.asked: set[str] = set()
        """The steps that the code has requested."""
        self.diverged_at: DivergedStep | None = None
        self.emitted: list[Any] = []
        """Values of `ctx.emit`, in order. Any: JSON."""
        self.notes: list[tuple[str, object]] = []
        """What `ctx.note` has written, in order: the step's id and the value."""
        self._pieces_left = sum(recorded.emitted_before(None).values()) + (0 if by_place else JOURNAL_LIMIT)
        """How many pieces of output the code may emit: as many as recorded, and changed code some more."""
        self._by_question: Mapping[str, deque[RecordedStep]] | None = None if by_place else _questions(recorded)

    def find(self, step: StepOfRun) -> bytes | None:
        first = step.id in self.unawaited
        self.unawaited.pop(step.id, None)
        if step.id == self.until:
            raise self._stop(step)
        if self._by_question is not None and step.id not in self.journal.values:
            self._answer(step, self._by_question)
        self.asked.add(step.id)
        value = self.journal.values.get(step.id)
        if value is None:
            if self.recorded.status and isinstance(step, RequestStep) and self._in_job():
                return None  # the run ended before the step did: the job waits until the run ends
            raise self._stop(step)
        there = self.recorded.steps.get(step.id)
        if self._by_question is None and there is not None and not _fits(step, there):
            raise self._diverge(step, there)
        if first:
            self._note_said(step)
        return value

    def patch(self, branch: Branch, name: str) -> str | None:
        """As `Run.patch`. Empty: the branch takes the patch, and there is no mark to look for."""
        if self._by_question is None:
            return super().patch(branch, name)
        taken = any(step.kind == "patch" and step.name == name for step in self.recorded.steps.values())
        return "" if taken else None

    def passed(self, branch: Branch) -> bool:
        """As `Run.passed`. A run that has ended has passed every place."""
        return bool(self.recorded.status) or super().passed(branch)

    def emit(self, step: PieceStep) -> None:
        there = self.recorded.steps.get(step.id)
        if step.id == self.until or not self._pieces_left:
            raise self._stop(step)
        self.asked.add(step.id)
        if self._by_question is None and there is not None and there.pieces == 1:
            step.digest = step_digest(step.kind, step.name, step.key, canonical(step.data))
            if not _fits(step, there):
                raise self._diverge(step, there)
        self._pieces_left -= 1
        self.emitted.append(from_json(step.data))

    def read_attempt(self) -> int:
        """Return `ctx.attempt` as the recorded run saw it; its last attempt if its record does not say."""
        branch, read = self.flow.here, self.recorded.attempts
        if branch is None or read is None:
            return self.attempt
        earlier = (read.get(f"{branch.prefix}{count}") for count in range(branch.count, -1, -1))
        return next((attempt for attempt in earlier if attempt is not None), 1)

    def _in_job(self) -> bool:
        branch = self.flow.here
        while branch is not None and not branch.beside:
            branch = branch.parent
        return branch is not None

    def _answer(self, step: StepOfRun, questions: Mapping[str, deque[RecordedStep]]) -> None:
        for digest in (step.digest, any_digest(step.kind, step.name)):
            if waiting := questions.get(digest):
                self.journal.add(step.id, waiting.popleft().wildcard)
                return
        if step.kind in _SAID:
            self.journal.add(step.id, pack(step.digest, RESULT_OK, self.recorded.started_ms, b"null"))

    def _stop(self, step: StepOfRun) -> asyncio.CancelledError:
        if self.stopped_at is None and self.diverged_at is None:
            self.stopped_at = step.id
            if step.id != self.until:
                self.unrecorded = DivergedStep(self.run_id, step.id, "", _asked(step), _line())
        why = f"step {step.id} of run {self.run_id} ({_asked(step)}) has no recorded result, or the replay ends there"
        return self.flow.end(Failed("ReplayStopped", why, retryable=False), why)

    def _diverge(self, step: StepOfRun, there: RecordedStep) -> asyncio.CancelledError:
        recorded = as_call(there.kind, there.name, there.key, there.request)
        diverged = DivergedStep(self.run_id, step.id, recorded, _asked(step), _line())
        if self.stopped_at is None and self.diverged_at is None:
            self.diverged_at = diverged
        return self.flow.end(Failed("Divergence", str(diverged), retryable=False), str(diverged))

    def _note_said(self, step: StepOfRun) -> None:
        if step.kind == "message":
            self.notes.append((step.id, from_json(step.data)))


def _questions(recorded: RecordedRun) -> dict[str, deque[RecordedStep]]:
    """Return the recorded steps by digest of their request, in program order."""
    found: dict[str, deque[RecordedStep]] = defaultdict(deque)
    for step in recorded.before(None):
        found[step.digest].append(step)
    return found


def _fits(step: StepOfRun, there: RecordedStep) -> bool:
    asked = step.digest
    if (attempt := attempt_in_digest(there.digest)) > 1:
        asked = digest_in_attempt(asked, attempt)
    return not there.kind or there.digest in (asked, any_digest(step.kind, step.name))


def _asked(step: StepOfRun) -> str:
    return as_call(step.kind, step.name, step.key, step.data)


def _line() -> str:
    return place_in_code(sys._getframe(1))[0]


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
    notes: Sequence[tuple[str, object]] = ()
    """What `ctx.note` wrote: the step's id and the value."""
    messages: Sequence[Any] = ()  # Any: `Message` of weft.aworld
    """The messages among them."""
    emitted: Sequence[Any] = ()  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay."""

    task_id: str
    messages: Sequence[Any] = ()  # Any: `Message` of weft.aworld
    """The messages passed to the sink or the handlers, or emitted by the code."""
    following: Sequence[Any] = ()  # Any: as `messages`
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


async def replay_code(trajectory: TaskTrajectory, app: DeclaredApp, until: str | None) -> Replayed:
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
    return Replayed(
        task_id=trajectory.task,
        runs=runs,
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


async def _replay_run(
    trajectory: TaskTrajectory, app: DeclaredApp, recorded: RecordedRun, until: str | None
) -> RunReplay:
    run = _replay_of(trajectory, app, recorded, until)
    if run is None:
        return RunReplay(run=recorded.id, agent=recorded.agent, status="unknown")
    return await _replayed(run)


def _replay_of(
    trajectory: TaskTrajectory, app: DeclaredApp, recorded: RecordedRun, until: str | None
) -> ReplayRun | None:
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
        run.hooks = app.hooks.of_run(
            run,
            of_end=False,
            retry=definition.retry,
            entry=lambda: failed_entry(recorded.steps),
            failed=_ignored,
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
        status, output = Status.COMPLETED, from_json(result.output)
    elif run.stopped_at is None and isinstance(result, Failed):
        status, error = Status.FAILED, {"type": result.type, "message": result.message}
    same = status == recorded.status and (
        output == from_json(recorded.output) if status == Status.COMPLETED else error == recorded.error
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
        notes=run.notes,
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
    further: list[Difference] = field(default_factory=list)
    """Steps that the code adds after the last one of an ended run: running tasks can take them."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Runs that could not be compared, by reason."""

    @property
    def ok(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        lines = [str(difference) for difference in self.differences]
        for (agent, line), count in Counter((each.agent, each.line) for each in self.further).items():
            first = next(each for each in self.further if (each.agent, each.line) == (agent, line))
            lines.append(
                f"note: {count} {'run' if count == 1 else 'runs'} of agent {agent!r} ended, and the code goes on"
                f"{f' at {line}' if line else ''}, such as {first.now} in task {first.task}; running tasks will do so"
            )
        lines += [f"runs not compared: {count}, since {reason}" for reason, count in self.skipped.items()]
        return "\n".join([*lines, f"tasks: {self.tasks}, runs: {self.runs}, differences: {len(self.differences)}"])


async def check(
    source: TrajectoryStore,
    app: DeclaredApp,
    *,
    namespace: str = "weft",
    since: datetime | timedelta | None = None,
    agent: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Check:
    """Run the code of an app on recorded tasks, and report where it would request different steps.

    It calls no tool, agent or model. A changed result of a run is not a difference, since no running task has it yet.

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
        if any(step.kind == "fork" for step in trajectory.steps):
            trajectory = await source.task(namespace, trajectory.task) or trajectory  # with the steps that it inherited
        await check_task(trajectory, app, found)
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


async def check_task(trajectory: TaskTrajectory, app: DeclaredApp, found: Check) -> None:
    """Check the code of an app against one task, up to the first difference, and add the result to `found`."""
    found.tasks += 1
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
        difference = Difference(trajectory.task, recorded.agent, recorded.id, *what)
        if run.unrecorded is None or any(_is_left(step, run) for step in recorded.steps.values()):
            found.differences.append(difference)
            return
        found.further.append(difference)


def _difference(run: ReplayRun, replayed: RunReplay | None) -> tuple[str, str, str, str] | None:
    """Return the step, the recorded side, the side of the code, and its line; None if they do not differ."""
    if replayed is None:
        return "", f"it {run.recorded.status}", f"it does not end within {RUN_SECONDS:g} s of a replay", ""
    if (at := run.diverged_at) is not None:
        return at.step, at.recorded, at.asked, at.line
    if run.recorded.status != Status.COMPLETED:
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
