"""A fork: a new task that begins with another task's recorded results and continues on its own from one step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.bus.values import pairs
from runtime_core.codec import quoted
from runtime_core.consumer.effects import COMPLETED, FAILED
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput
from runtime_core.hooks.declared import STEP, named_before
from runtime_core.ids import ANY_DIGEST, ROOT_RUN, any_digest, step_digest
from runtime_core.record.step import DIGEST, STEPS, Step, place
from runtime_core.runs.journal import MAX_JOURNAL_BYTES, pack, payload_of, status_of, time_of
from runtime_core.runs.step import canonical
from runtime_core.telemetry.redaction import HIDDEN
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.commands import NO_OPTIONS, SUBMIT, Begun, Submission, SubmitOptions, digest, new_submission
from runtime_core.wire.envelope import ANONYMOUS
from runtime_core.wire.results import StreamingMode

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.trajectory.store import TrajectoryStore


_PAGE = 1000
_HIDDEN = HIDDEN.encode()
_OUTGOING = ("emit", "send", "publish", "message", "usage")
"""Steps without a result: what they said is their input, or an emit's output."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One finished step of a run."""

    id: str
    kind: str
    """As in the trajectory; empty where only the broker's journal knows the step."""
    name: str
    key: str
    asked: bytes
    """JSON of what was asked; empty where that is not recorded."""
    status: bytes
    """`K` or `E`, as in a journal value."""
    payload: bytes
    """JSON of the result or of the error."""
    ended_ms: int
    told_digest: str = ""
    """The step's own digest, where it is not made of what was asked."""

    @property
    def wildcard(self) -> bytes:
        """The journal value that fits any arguments."""
        digest = any_digest(self.kind, self.name) if self.kind else ANY_DIGEST
        return pack(digest, self.status, self.ended_ms, self.payload)

    @property
    def digest(self) -> str:
        """The digest of what was asked; a wildcard where that is not recorded."""
        if self.told_digest:
            return self.told_digest
        # What was redacted is not known either.
        if not self.asked or self.kind in ("human", "timer", "ray", "spark") or _HIDDEN in self.asked:
            return any_digest(self.kind, self.name) if self.kind else ANY_DIGEST
        return step_digest(self.kind, self.name, self.key, canonical(self.asked))


@dataclass(slots=True)
class RecordedRun:
    """One run of an agent, with the steps that are known to have ended."""

    id: str
    agent: str = ""
    key: str = ""
    input: bytes = b""
    started_ms: int = 0
    attempt: int = 1
    status: str = ""
    """Empty while it goes on."""
    output: bytes = b""
    error: dict[str, str] | None = None
    steps: dict[str, RecordedStep] = field(default_factory=dict)

    def before(self, step: str | None) -> list[RecordedStep]:
        """The steps whose path is smaller, in the program's order; None: all."""
        limit = None if step is None else place("", step)
        ordered = sorted((place("", each.id), each) for each in self.steps.values())
        return [each for where, each in ordered if limit is None or where < limit]


def runs_of(trajectory: TaskTrajectory) -> dict[str, RecordedRun]:
    """The runs of agents by run id; of several attempts the last one counts.

    A fork's first run has the results that it took over, whoever's runs gave them.
    """
    runs: dict[str, RecordedRun] = {}
    last: dict[tuple[str, str], Step] = {}
    for row in trajectory.steps:
        last[row.run, row.step] = row
    for row in trajectory.inherited:
        run, step = (row.run, row.step) if row.step else _asked_by(row.run)
        if run == ROOT_RUN and step:
            _run(runs, run).steps[step] = _step(step, row)
    for (run, step), row in last.items():
        if row.kind == "fork":
            _take_over(_run(runs, run), row)
            continue
        if step:
            _run(runs, run).steps[step] = _step(step, row)
            continue
        if row.kind == "agent":
            _fill(_run(runs, run), row)
        parent, asked_by = _asked_by(run)
        if parent:
            _run(runs, parent).steps[asked_by] = _step(asked_by, row)
    return runs


def _asked_by(run: str) -> tuple[str, str]:
    """The run and the step that started a run; both empty for a task's first."""
    parent, _, step = run.rpartition("/")
    return (parent, step) if parent else ("", "")


def _take_over(run: RecordedRun, row: Step) -> None:
    """The result that was given in the place of a recorded one."""
    told = msgspec.json.decode(bytes(row.input), type=dict[str, msgspec.Raw]) if row.input else {}
    if "step" in told and "result" in told:
        step, payload = msgspec.json.decode(told["step"], type=str), bytes(told["result"])
        run.steps[step] = RecordedStep(step, "", "", "", b"", COMPLETED, payload, int(row.ended))


def _run(runs: dict[str, RecordedRun], run: str) -> RecordedRun:
    return runs.setdefault(run, RecordedRun(run))


def _fill(run: RecordedRun, row: Step) -> None:
    run.agent, run.key, run.attempt, run.status = row.name, row.key, row.attempt, row.status
    run.input, run.output, run.started_ms = bytes(row.input), bytes(row.output), int(row.started)
    run.error = None if row.error is None else {"type": row.error.type, "message": row.error.message}


def _step(step: str, row: Step) -> RecordedStep:
    if row.kind in _OUTGOING:
        asked = bytes(row.output) if row.kind == "emit" else bytes(row.input)
        told = str(row.attributes.get(DIGEST, ""))
        return RecordedStep(step, row.kind, row.name, row.key, asked, COMPLETED, b"null", int(row.ended), told)
    if row.status == "completed":
        status, payload = COMPLETED, bytes(row.output) or b"null"
    else:
        error = {"type": row.status.capitalize(), "message": ""}
        if row.error is not None:
            error = {"type": row.error.type, "message": row.error.message}
        status, payload = FAILED, msgspec.json.encode(error)
    if row.input_after:  # read from the record stream: it has the end of its messages only
        return RecordedStep(step, row.kind, row.name, row.key, b"", status, payload, int(row.ended))
    told = str(row.attributes.get(DIGEST, ""))
    return RecordedStep(step, row.kind, row.name, row.key, bytes(row.input), status, payload, int(row.ended), told)


# -- what the broker has -------------------------------------------------------------------------------------------


async def on_broker(
    bus: EventBus, namespace: str, task: str, known: TaskTrajectory | None
) -> tuple[RecordedRun, dict[str, object]]:
    """The first run of a task, and its context (session, metadata), from the broker and what is `known` besides.

    While a task goes on its own journal is on the broker; of an ended task its record is, until that is trimmed.
    Raises InvalidInput, field `task_id`, where neither knows the task.
    """
    if known is None:
        known = await from_record(bus, namespace, task)
    flat = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.task(task)))
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    runs = runs_of(known) if known is not None else {}
    run = runs.get(ROOT_RUN) or RecordedRun(ROOT_RUN)
    header = [*fields.get(b"h", b"").decode().split("\n"), *[""] * 10]
    run.agent, run.key = run.agent or header[1], run.key or header[2]
    run.input = run.input or fields.get(b"d", b"")
    if not run.agent and known is not None and known.end is not None:
        run.agent = known.end.agent
    if not run.agent:
        raise InvalidInput(
            "task_id", f"of task {task!r} nothing is on the broker (any more): give the store of its trajectory"
        )
    for name, value in fields.items():
        if name.startswith(b"j:"):
            step = name[2:].decode()
            run.steps.setdefault(
                step, RecordedStep(step, "", "", "", b"", status_of(value), payload_of(value), time_of(value))
            )
    context: dict[str, object] = msgspec.json.decode(fields[b"x"]) if fields.get(b"x") else {}
    if header[9]:
        context.setdefault("session_id", header[9])
    elif known is not None and known.end is not None and known.end.session:
        context.setdefault("session_id", known.end.session)
    return run, context


async def from_record(bus: EventBus, namespace: str, task: str) -> TaskTrajectory | None:
    """What the record stream of a partition still holds of a task; None: nothing. Reads the whole stream."""
    from runtime_core.trajectory.recorder import record_entry  # the tables' library: half a second

    await bus.make_group(bus.keys.record, TRAJECTORY_RECORDER)
    steps: list[Step] = []
    end = None
    start = "-"
    while True:
        page = pairs(await bus.transport.call("XRANGE", bus.keys.record, start, "+", "COUNT", _PAGE))
        for entry, fields in page:
            if fields[1].decode() != task:
                continue
            read = record_entry(entry, fields)
            end = read.end or end
            if read.steps:
                steps += STEPS.decode(read.steps)
        if len(page) < _PAGE:
            break
        start = "(" + page[-1][0].decode()
    if end is None and not steps:
        return None
    return TaskTrajectory(namespace, task, end, in_place(steps))


def in_place(steps: Iterable[Step]) -> list[Step]:
    """Rows in the order of a trajectory."""
    return sorted(steps, key=lambda step: (place(step.run, step.step), step.attempt))


_STEP = re.compile(r"[1-9][0-9]*(\.(0|[1-9][0-9]*))*")


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork takes over."""

    run: RecordedRun
    input: bytes
    context: dict[str, object]
    begun: Begun

    def submission(
        self,
        *,
        task_id: str,
        session_id: str | None = None,
        stream: bool | StreamingMode | str = False,
        options: SubmitOptions = NO_OPTIONS,
    ) -> Submission:
        """The submit of the fork: session, tenant, hooks and metadata are the origin's where known and not given.

        Raises InvalidInput.
        """
        metadata: Any = self.context.get("metadata")  # Any: as the origin's submit has said
        hooks = named_before(self.run.steps[STEP].payload) if STEP in self.run.steps else None
        new = new_submission(
            self.run.agent,
            msgspec.json.decode(self.input),
            source=ANONYMOUS,
            event_id=task_id,
            key=self.run.key or None,
            task_id=task_id,
            session_id=(self.context.get("session_id") if session_id is None else session_id) or None,
            stream=stream,
            options=replace(
                options,
                tenant=options.tenant or str(self.context.get("tenant", "")),
                hooks=hooks if options.hooks is None else options.hooks,
                metadata=metadata if options.metadata is None else options.metadata,
            ),
        )
        # Two forks are equal where what they begin with is.
        values = {step: value.decode(errors="replace") for step, value in self.begun.journal.items()}
        new.digest = digest(SUBMIT, [new.digest, self.begun.task, self.begun.step, values])
        new.begun = self.begun
        return new


async def plan_fork(
    bus: EventBus,
    namespace: str,
    origin: str,
    *,
    at: str | None,
    input: object,
    store: TrajectoryStore | None,
) -> ForkPlan:
    """See `Client.fork`; `bus` is the origin's partition."""
    if at is not None and not (isinstance(at, str) and _STEP.fullmatch(at)):
        raise InvalidInput(
            "at",
            f"{quoted(at)} is not a step of the task's first run, as 3 or 3.0.1; `weft trajectory show` lists them",
        )
    known = await store.task(namespace, origin) if store is not None else None
    run, context = await on_broker(bus, namespace, origin, known)
    new_input = run.input
    journal: dict[str, bytes] = {}
    result = b""
    if at is None:
        if not isinstance(input, EllipsisType):
            new_input = encode(input, "input")
    else:
        last = max((int(first) for step in run.steps if (first := step.partition(".")[0]).isdigit()), default=0)
        if int(at.partition(".")[0]) > last + 1:
            raise InvalidInput(
                "at", f"step {at} does not follow from what task {origin!r} has done: its last is {last}"
            )
        journal = {step.id: step.wildcard for step in run.before(at)}
        if not isinstance(input, EllipsisType):
            result = encode(input, "input")
            journal[at] = _replaced(run, at, result).wildcard
    if not new_input:
        # A run's row, which has its input, is written when it ends by itself.
        raise InvalidInput(
            "input", f"of task {origin!r} is not recorded, since it was cancelled or ran out of time: give it"
        )
    if sum(map(len, journal.values())) > MAX_JOURNAL_BYTES:
        raise InvalidInput("at", f"the results before step {at} are more than {MAX_JOURNAL_BYTES} bytes together")
    return ForkPlan(run, new_input, context, Begun(origin, at or "", journal, result))


def _replaced(run: RecordedRun, at: str, result: bytes) -> RecordedStep:
    there = run.steps.get(at)
    if there is None:
        raise InvalidInput(
            "at",
            f"step {at} has no recorded result that `input` could replace: name one that `weft trajectory show` lists",
        )
    return RecordedStep(at, there.kind, there.name, there.key, b"", COMPLETED, result, there.ended_ms)
