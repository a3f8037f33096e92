"""A task's runs and the results of their steps, as its trajectory or the broker has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec

from runtime_core.bus.delivery import pairs
from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.consumer.effects import COMPLETED, FAILED
from runtime_core.errors import InvalidInput
from runtime_core.ids import ANY_DIGEST, ROOT_RUN, any_digest, step_digest
from runtime_core.record.step import DIGEST, Step, place
from runtime_core.runs.journal import pack, payload_of, status_of, time_of
from runtime_core.runs.step import canonical
from runtime_core.telemetry.redaction import HIDDEN
from runtime_core.trajectory.reading import TaskTrajectory

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus

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
    from runtime_core.record.step import STEPS
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
