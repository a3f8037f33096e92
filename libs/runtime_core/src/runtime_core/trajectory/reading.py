"""Reads recorded steps with the contents and message lists that they refer to, and the origin of forks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from runtime_core.trajectory import tables
from runtime_core.trajectory.tables import step_of
from runtime_core.wire.codec import readable
from runtime_core.wire.contents import REFERENCES, Contents, Node
from runtime_core.wire.model_call import logprobs_of, usage_of
from runtime_core.wire.step import NOTHING, Fork, Step, StepError, TaskEnd, before, place

_AFTER_ALL = "~"
"""Sorts after the places of all steps below."""
_AT_ONCE = 400
"""Digests per query: some builds of SQLite take at most 999 parameters."""


@dataclass(frozen=True, slots=True)
class TaskTrajectory:
    """The recorded steps and end of one task."""

    namespace: str
    task: str
    end: TaskEnd | None
    """None until the end of the task is recorded."""
    steps: list[Step]
    """Ordered by run path and step path. A run's own row comes first, and `r/2` before `r/10`.

    Of the rows of one step, the last one counts: a redriven step has a further row, which ended later and may have a
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
    """A step with its task."""

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
    error: StepError | None
    errors: list[StepError]
    usage: dict[str, float]
    """Tokens of a model call."""
    logprobs: object
    """Log-probabilities in the model's format, or null."""
    attributes: dict[str, Any]  # Any: texts, numbers, booleans and lists of them
    """Attributes of a model call by OpenTelemetry's conventions: provider, model, finish reason, tokens."""
    cause: str
    owner: str


def exported(namespace: str, stored: StoredStep) -> ExportedStep:
    """Return a step in the form of exports."""
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


def first_difference(one: TaskTrajectory, other: TaskTrajectory) -> Difference | None:
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
            return Difference(*at, ("missing",), mine, theirs)
        if is_end:
            names: tuple[str, ...] = ("status", "output", "error")
        else:
            # A fork that has replaced a result does not know what was called.
            names = () if "" in (mine.kind, theirs.kind) else ("kind", "name", "key", "input")
        found = tuple(name for name in names if _comparable(mine, name) != _comparable(theirs, name))
        if found:
            return Difference(*at, found, mine, theirs)
    return None


@dataclass(frozen=True, slots=True)
class Difference:
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
                    step, step=at, kind="", name="", input=NOTHING, output=given["result"], status="completed"
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
    if isinstance(value, StepError):
        return value.type, value.message
    return value


# Any: the columns of a row are read by name.
async def contents_of(connection: AsyncConnection, namespace: str, rows: Sequence[Row[Any]]) -> Contents:
    """Return the contents that rows of steps refer to."""
    digests: dict[bytes, None] = {}
    for row in rows:
        for references in (row.input_refs, row.output_refs):
            if references:
                for reference in REFERENCES.decode(references):
                    digests[bytes.fromhex(reference.digest)] = None
    contents = Contents()
    if digests:
        for part in in_parts(digests):
            await _read_lists(connection, namespace, part, contents)
            await _read_values(connection, namespace, part, contents)
    return contents


def in_parts(digests: Iterable[bytes]) -> Iterable[list[bytes]]:
    """Split digests into chunks for one query each."""
    every = list(digests)
    return (every[first : first + _AT_ONCE] for first in range(0, len(every), _AT_ONCE))


async def chains(
    connection: AsyncConnection, namespace: str, heads: Sequence[bytes]
) -> list[tuple[bytes, bytes | None, bytes, str]]:
    """Return (digest, parent, message, content) of these lists and all their prefixes, each once."""
    lists, contents = tables.LISTS, tables.CONTENTS
    chain = (
        select(lists.c.digest, lists.c.parent, lists.c.message)
        .where(lists.c.namespace == namespace, lists.c.digest.in_(heads))
        .cte("chain", recursive=True)
    )
    before = select(lists.c.digest, lists.c.parent, lists.c.message).join(
        chain, (lists.c.digest == chain.c.parent) & (lists.c.namespace == namespace)
    )
    # UNION without ALL: follow a shared node once.
    chain = chain.union(before)
    read = select(chain.c.digest, chain.c.parent, chain.c.message, contents.c.content).join(
        contents, (contents.c.digest == chain.c.message) & (contents.c.namespace == namespace)
    )
    rows = (await connection.execute(read)).all()
    return [(row.digest, row.parent, row.message, row.content) for row in rows]


async def _read_lists(connection: AsyncConnection, namespace: str, heads: Sequence[bytes], into: Contents) -> None:
    for digest, parent, message, content in await chains(connection, namespace, heads):
        into.nodes[digest] = Node(parent, message)
        into.values[message] = content


async def _read_values(connection: AsyncConnection, namespace: str, digests: Sequence[bytes], into: Contents) -> None:
    contents = tables.CONTENTS.c
    read = select(contents.digest, contents.content).where(
        contents.namespace == namespace, contents.digest.in_([each for each in digests if each not in into.nodes])
    )
    for digest, content in (await connection.execute(read)).all():
        into.values[digest] = content


async def fork_of(connection: AsyncConnection, namespace: str, task: str) -> Fork | None:
    """Return the origin of a fork; None if the task is not a fork."""
    forks = tables.FORKS.c
    read = select(forks.fork_of_task, forks.fork_of_step).where(forks.namespace == namespace, forks.task == task)
    found = (await connection.execute(read)).one_or_none()
    return Fork(found.fork_of_task, found.fork_of_step) if found is not None else None


async def inherited_by(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    """Return the steps before a fork, in order; for a fork of a fork, those of all origins."""
    inherited: list[Step] = []
    origin: Fork | None = fork
    seen: set[str] = set()
    while origin is not None and origin.step and origin.task not in seen:
        seen.add(origin.task)
        inherited += await _steps_before(connection, namespace, origin)
        further = await fork_of(connection, namespace, origin.task)
        # Of the steps that the origin has inherited, count only those before this fork.
        if further is not None and place("r", origin.step) < place("r", further.step):
            further = Fork(further.task, origin.step)
        origin = further
    inherited.sort(key=in_order)
    return inherited


async def _steps_before(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    steps = tables.STEPS.c
    read = (
        select(tables.STEPS)
        .where(steps.namespace == namespace, steps.task == fork.task)
        .order_by(steps.place, steps.ended, steps.attempt)
    )
    rows = [row for row in (await connection.execute(read)).all() if before(row.run, row.step, fork.step)]
    contents = await contents_of(connection, namespace, rows)
    return [step_of(row, contents) for row in rows]
