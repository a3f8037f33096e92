"""Values read from a trajectory store: tasks, steps and usage, and the first difference of two tasks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime_core.wire.codec import readable
from runtime_core.wire.model_call import logprobs_of, usage_of
from runtime_core.wire.step import NOTHING, Fork, Status, Step, StepFailure, TaskEnd, place

_AFTER_ALL = "~"
"""Sorts after the places of all steps below."""


@dataclass(frozen=True, slots=True)
class TaskTrajectory:
    """The recorded steps and end of one task."""

    namespace: str
    task: str
    end: TaskEnd | None
    """None until the end of the task is recorded."""
    steps: list[Step]
    """Ordered by run path and step path. A run's own row comes first, and `r/2` before `r/10`.

    Of the rows of one step, the last one counts: a redriven step has one more row, which ended later and may have a
    lower attempt.
    """
    fork: Fork | None = None
    """The origin of the task, if it is a fork."""
    inherited: list[Step] = field(default_factory=list)
    """The steps before the fork, which belong to other tasks; in the order of `steps`."""

    @property
    def complete(self) -> bool:
        """Whether the end and all steps that it counts are recorded."""
        return self.end is not None and len(self.steps) >= self.end.steps


@dataclass(frozen=True, slots=True)
class StoredStep:
    task: str
    end: TaskEnd | None
    step: Step


class ExportedStep(msgspec.Struct):
    """One exported step with its task. Times are epoch milliseconds.

    Members of the task's end are null until the task has ended.
    """

    namespace: str
    task: str
    agent: str | None
    session: str | None
    task_status: str | None
    task_created: float | None
    task_ended: float | None
    run: str
    step: str
    attempt: int
    kind: str
    name: str
    key: str
    status: str
    started: float
    ended: float
    input: msgspec.Raw
    output: msgspec.Raw
    error: StepFailure | None
    errors: list[StepFailure]
    usage: dict[str, float]
    """Tokens of a model call."""
    logprobs: object
    """Log-probabilities in the model's format, or null."""
    attributes: dict[str, Any]  # Any: texts, numbers, booleans and lists of them
    """Attributes of a model call by OpenTelemetry's conventions: provider, model, finish reason, tokens."""
    cause: str
    owner: str


def exported(namespace: str, stored: StoredStep) -> ExportedStep:
    end, step = stored.end, stored.step
    return ExportedStep(
        namespace=namespace,
        task=stored.task,
        agent=end.agent if end else None,
        session=end.session if end else None,
        task_status=end.status if end else None,
        task_created=end.created if end else None,
        task_ended=end.ended if end else None,
        run=step.run,
        step=step.step,
        attempt=step.attempt,
        kind=step.kind,
        name=step.name,
        key=step.key,
        status=step.status,
        started=step.started,
        ended=step.ended,
        input=_one_line(step.input),
        output=_one_line(step.output),
        error=step.error,
        errors=step.errors,
        usage=usage_of(step),
        logprobs=logprobs_of(step),
        attributes=step.attributes,
        cause=step.cause,
        owner=step.owner,
    )


def _one_line(raw: msgspec.Raw) -> msgspec.Raw:
    """Return JSON without line breaks, which can only occur between its tokens."""
    data = bytes(raw)
    if not data:
        return msgspec.Raw(b"null")
    if b"\n" not in data and b"\r" not in data:
        return raw
    return msgspec.Raw(data.replace(b"\n", b" ").replace(b"\r", b" "))


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record entry with undecodable steps, stored intact."""

    partition: int
    entry_id: str
    task: str
    reason: str
    steps: bytes


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What one step of an ended task has used."""

    task: str
    agent: str
    """The task's agent."""
    ended_ms: float
    """When the task ended."""
    model: str
    """Empty if the report names no model."""
    amounts: dict[str, float]


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The usage of some tasks together."""

    group: tuple[str, ...]
    """The values of the columns that the sums are by."""
    tasks: int
    """How many tasks reported usage."""
    amounts: dict[str, float]


def in_order(step: Step) -> tuple[str, float, int]:
    """Return the sort key of a trajectory's steps."""
    return place(step.run, step.step), step.ended, step.attempt


def first_difference(one: TaskTrajectory, other: TaskTrajectory) -> StepDifference | None:
    """Return the first place at which two tasks differ, in the order of the program; None if they are equal.

    A run's input comes first, then its steps with the runs that they started, then its result. Of a step with several
    attempts, the last one counts. Times, owners and usage do not.
    """
    left, right = _last_attempts(one), _last_attempts(other)
    for path, is_end in _in_program_order(left.keys() | right.keys()):
        mine, theirs = left.get(path), right.get(path)
        run, _, step = path.rpartition("/")
        at = (run, step) if run else (path, "")
        if mine is None or theirs is None:
            return StepDifference(*at, ("missing",), mine, theirs)
        if is_end:
            names: tuple[str, ...] = ("status", "output", "error")
        else:
            # A fork that has replaced a result does not know what was called.
            names = () if "" in (mine.kind, theirs.kind) else ("kind", "name", "key", "input")
        found = tuple(name for name in names if _comparable(mine, name) != _comparable(theirs, name))
        if found:
            return StepDifference(*at, found, mine, theirs)
    return None


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A step of which two tasks have different records."""

    run: str
    step: str
    """Empty for the first run as a whole."""
    members: tuple[str, ...]
    """What differs, as `input` or `output`; `missing` if one task has no such step."""
    one: Step | None
    other: Step | None


def _last_attempts(trajectory: TaskTrajectory) -> dict[str, Step]:
    """Return the last attempt of each step by its path, as `r/3.0.1`: that is also the id of the run it has started."""
    found: dict[str, Step] = {}
    for step in (*trajectory.inherited, *trajectory.steps):
        if step.kind != "fork":
            found[f"{step.run}/{step.step}" if step.step else step.run] = step
        elif step.input:
            given = msgspec.json.decode(bytes(step.input), type=dict[str, msgspec.Raw])
            if "result" in given:  # a result that the fork has replaced
                at = msgspec.json.decode(given["step"], type=str)
                found[f"{step.run}/{at}"] = msgspec.structs.replace(
                    step, step=at, kind="", name="", input=NOTHING, output=given["result"], status=Status.COMPLETED
                )
    return found


def _in_program_order(paths: Collection[str]) -> list[tuple[str, bool]]:
    """Return each path twice: where the step begins, and (True) where it ends, after all steps below it."""
    keyed: list[tuple[str, str, bool]] = []
    for path in paths:
        begin = place(path, "")
        keyed += [(begin, path, False), (begin.rstrip() + _AFTER_ALL, path, True)]
    return [(path, is_end) for _, path, is_end in sorted(keyed)]


def _comparable(step: Step, member: str) -> object:
    value = getattr(step, member)
    if isinstance(value, msgspec.Raw):
        return readable(bytes(value))
    if isinstance(value, StepFailure):
        return value.type, value.message
    return value
