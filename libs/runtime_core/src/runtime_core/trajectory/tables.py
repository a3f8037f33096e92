"""The tables of the trajectory store, and steps as rows; the same in SQLite and PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import copysign
from operator import itemgetter
from typing import Any, TypeAlias, cast

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.spans import RESPONSE_MODEL
from runtime_core.wire.contents import LARGE_BYTES, MESSAGES_IN, REFERENCES, Contents, text_of_json, without_nul
from runtime_core.wire.step import ENCODER, INCOMPLETE, NOTHING, Step, StepFailure, TaskEnd, place
from runtime_core.wire.step import STEPS as STEPS_DECODER

FORMAT = 5
"""Version of the tables. Increment it for a change that another release cannot read or write."""
METADATA = MetaData()
FORMATS = Table("weft_format", METADATA, Column("version", Integer, primary_key=True, autoincrement=False))
TASK_MAX = 500
"""Bytes of a task id."""
_NAME_MAX = 120
"""Characters of an agent, a model and an amount's name in the sums: an index of PostgreSQL takes 2,704 bytes."""
_AMOUNT_MAX = 1e290
"""A larger amount counts as this one: PostgreSQL refuses a sum that overflows."""
Value: TypeAlias = str | int | float | bytes | None
_ERROR = msgspec.json.Decoder(StepFailure)
_ERRORS = msgspec.json.Decoder(list[StepFailure])
_ATTRIBUTES = msgspec.json.Decoder(dict[str, Any])
_USAGE = msgspec.json.Decoder(dict[str, float])


def _key() -> Text:
    # Keys sort by bytes. SQLite does so by default; PostgreSQL would use the database's locale.
    return Text().with_variant(Text(collation="C"), "postgresql")


STEPS = Table(
    "weft_steps",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    # Encodes run and step, and sorts in their order.
    Column("place", _key(), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("run", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    # Epoch milliseconds.
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("key", Text, nullable=False),
    # The original JSON as text: a JSON type would rewrite it, and PostgreSQL's refuses \u0000.
    Column("input", Text),
    Column("output", Text),
    Column("error", Text),
    Column("errors", Text),
    Column("usage", Text),
    Column("cause", Text, nullable=False),
    Column("owner", Text, nullable=False),
    # Contents moved out of input and output (JSON of `contents.FormerPlace`), or null.
    Column("input_refs", Text),
    Column("output_refs", Text),
    # JSON object, or null.
    Column("attributes", Text),
    # Epoch milliseconds by the broker's clock, or null.
    Column("committed", Double),
    # In SQLite this is a rowid table with a unique index: rows are appended, and only the small index is updated at
    # random places.
    PrimaryKeyConstraint("namespace", "task", "place", "attempt"),
)

_STEP_COLUMNS = len(STEPS.c)
RARE = ("error", "errors", "usage", "input_refs", "output_refs", "attributes")
"""Columns that are null for most steps."""

TASKS = Table(
    "weft_tasks",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("status", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("steps", Integer, nullable=False),
    # Epoch milliseconds.
    Column("created", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("error", Text),
    Column("session", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "task"),
    Index("weft_tasks_by_end", "namespace", "ended", "task"),
    Index("weft_tasks_by_session", "namespace", "session", "ended", "task"),
    Index("weft_tasks_by_agent", "namespace", "agent", "ended", "task"),
    # Most tasks complete. People search for those that did not, so only those are in the index.
    Index(
        "weft_tasks_by_status",
        "namespace",
        "status",
        "ended",
        "task",
        postgresql_where=text("status <> 'completed'"),
        sqlite_where=text("status <> 'completed'"),
    ),
)

CONTENTS = Table(
    "weft_contents",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    # JSON: a message, or a large value.
    Column("content", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "digest"),
)

LISTS = Table(
    "weft_lists",
    METADATA,
    Column("namespace", _key(), nullable=False),
    # Identifies a list of messages: the list `parent` plus one message.
    Column("digest", LargeBinary, nullable=False),
    Column("parent", LargeBinary),
    Column("message", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "digest"),
    Index("weft_lists_by_parent", "namespace", "parent"),
    Index("weft_lists_by_message", "namespace", "message"),
)

USES = Table(
    "weft_uses",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    # A content or a list that a step of the task refers to.
    Column("digest", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "task", "digest"),
    Index("weft_uses_by_digest", "namespace", "digest"),
)

FORKS = Table(
    "weft_forks",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("fork_of_task", _key(), nullable=False),
    Column("fork_of_step", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "task"),
)

USAGE = Table(
    "weft_usage",
    METADATA,
    Column("namespace", _key(), nullable=False),
    # The day (UTC) on which the tasks ended, as in 2026-11-27.
    Column("day", _key(), nullable=False),
    Column("tenant", _key(), nullable=False),
    Column("agent", _key(), nullable=False),
    # Empty in rows of all models together, and if a report names none.
    Column("model", _key(), nullable=False),
    # "amount": the sum of what was reported under `name`. "tasks": how many tasks reported any usage; "model_tasks":
    # how many did for this model.
    Column("kind", _key(), nullable=False),
    Column("name", _key(), nullable=False),
    Column("amount", Double, nullable=False),
    PrimaryKeyConstraint("namespace", "day", "tenant", "agent", "model", "kind", "name"),
    sqlite_with_rowid=False,
)

CURSORS = Table(
    "weft_cursors",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("partition", Integer, nullable=False),
    # The highest epoch that has written; a lower one is fenced.
    Column("epoch", BigInteger, nullable=False),
    Column("entry", Text, nullable=False),
    PrimaryKeyConstraint("namespace", "partition"),
)

UNREADABLE = Table(
    "weft_unreadable",
    METADATA,
    Column("namespace", _key(), nullable=False),
    Column("partition", Integer, nullable=False),
    Column("entry", _key(), nullable=False),
    Column("task", _key(), nullable=False),
    Column("reason", Text, nullable=False),
    Column("steps", LargeBinary, nullable=False),
    PrimaryKeyConstraint("namespace", "partition", "entry"),
    Index("weft_unreadable_by_task", "namespace", "task"),
)


def check_format(stored: int) -> None:
    """Raise ConfigurationError unless the store has the tables of this release."""
    if stored != FORMAT:
        raise ConfigurationError(
            f"the trajectory store has format {stored}, but this release reads {FORMAT}: use the release that "
            "wrote it, or name another store in WEFT_TRAJECTORY_URL"
        )


# -- rows ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RecordEntry:
    entry_id: str
    """The stream's entry id, as in `1731240000000-3`."""
    task: str
    steps: bytes
    """JSON array of Step; may be empty."""
    end: TaskEnd | None
    """Set if the entry's commit ended the task."""
    trace: str = ""
    """The traceparent of an ended task, if its context has one."""


@dataclass(slots=True)
class BatchRows:
    """The rows of a batch of record entries, each in the order of its table's columns."""

    steps: list[tuple[Value, ...]] = field(default_factory=list)
    tasks: list[tuple[Value, ...]] = field(default_factory=list)
    forks: list[tuple[Value, ...]] = field(default_factory=list)
    uses: list[tuple[Value, ...]] = field(default_factory=list)
    contents: Contents = field(default_factory=Contents)
    unreadable: list[tuple[Value, ...]] = field(default_factory=list)


def entry_order(entry_id: str) -> tuple[int, int]:
    """Return the sort key of an entry id: milliseconds, then sequence number."""
    milliseconds, _, sequence = entry_id.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        raise InvalidInput("entry_id", f"{entry_id!r} is not a stream entry id, as in 1731240000000-0") from None


def rows_of(namespace: str, partition: int, entries: Sequence[RecordEntry]) -> BatchRows:
    """Decode a batch. An entry with undecodable steps is stored intact as an unreadable row.

    Bad bytes from one worker must neither block the record of others nor vanish.
    """
    rows = BatchRows()
    for entry in entries:
        task = without_nul(entry.task) if "\0" in entry.task else entry.task
        try:
            if len(task) * 4 > TASK_MAX:
                _check_task(task)
            # Record the end even if the steps are unreadable: the task then counts as incomplete.
            if entry.end is not None:
                rows.tasks.append(_end_row(namespace, task, entry.end))
            if entry.steps:
                _add_steps(rows, namespace, task, entry)
        except (msgspec.MsgspecError, ValueError, RecursionError, InvalidInput) as error:
            reason = without_nul(str(error))
            rows.unreadable.append((namespace, partition, entry.entry_id, task[:TASK_MAX], reason, entry.steps))
    return rows


def heads_of(rows: BatchRows) -> list[bytes]:
    """Return the digests of the message lists that a batch refers to."""
    return [digest for _, _, digest in rows.uses if isinstance(digest, bytes) and digest in rows.contents.nodes]


def rows_of_contents(
    namespace: str, rows: BatchRows, lacking: Sequence[bytes]
) -> tuple[list[tuple[Value, ...]], list[tuple[Value, ...]]]:
    """Return rows for the tables of contents and lists, for the lists that the store lacks, ordered by digest.

    The order prevents a deadlock of two writers that add the same rows.
    """
    nodes = {digest: rows.contents.nodes[digest] for digest in lacking}
    wanted = {node.message for node in nodes.values()}
    wanted.update(digest for _, _, digest in rows.uses if isinstance(digest, bytes) and digest in rows.contents.values)
    contents: list[tuple[Value, ...]] = [(namespace, digest, rows.contents.values[digest]) for digest in sorted(wanted)]
    lists: list[tuple[Value, ...]] = [
        (namespace, digest, node.parent, node.message) for digest, node in sorted(nodes.items(), key=lambda at: at[0])
    ]
    return contents, lists


def _check_task(task: str) -> None:
    if len(task.encode("utf-8", "surrogatepass")) > TASK_MAX:
        raise InvalidInput("task", f"the task id is longer than {TASK_MAX} bytes; submit with a shorter one")


def _add_steps(rows: BatchRows, namespace: str, task: str, entry: RecordEntry) -> None:
    encode, steps = ENCODER.encode, entry.steps
    committed = float(entry.entry_id.partition("-")[0])
    made: list[tuple[Value, ...]] = []
    heads: dict[bytes, None] = {}
    decoded = STEPS_DECODER.decode(steps)
    # Check all first: a refused entry must leave nothing in `rows`.
    places = list(map(_checked_place, decoded))
    for step, at in zip(decoded, places, strict=True):
        given, given_refs = _taken_out(rows.contents, bytes(step.input), heads, step.input_after)
        returned, returned_refs = _taken_out(rows.contents, bytes(step.output), heads)
        if step.fork is not None:
            rows.forks.append((namespace, task, without_nul(step.fork.task), without_nul(step.fork.step)))
        made.append(
            (
                namespace,
                task,
                at,
                step.attempt,
                step.run,
                step.step,
                step.kind,
                step.name,
                step.status,
                step.started,
                step.ended,
                step.key,
                given,
                returned,
                encode(step.error).decode() if step.error is not None else None,
                encode(step.errors).decode() if step.errors else None,
                encode(step.usage).decode() if step.usage else None,
                step.cause,
                step.owner,
                given_refs,
                returned_refs,
                encode(step.attributes).decode() if step.attributes else None,
                committed,
            )
        )
    if b"\\u0000" in steps:
        made = [tuple(without_nul(v) if isinstance(v, str) else v for v in row) for row in made]
    rows.steps += made
    if heads:
        rows.uses += [(namespace, task, digest) for digest in heads]


def _checked_place(step: Step) -> str:
    if not 0 <= step.attempt < 2**31:
        raise InvalidInput("attempt", f"{step.attempt} is not between 0 and 2147483647")
    return place(step.run, step.step)


def _taken_out(
    contents: Contents, data: bytes, heads: dict[bytes, None], after: str = ""
) -> tuple[str | None, str | None]:
    """Return the columns of an input or output: the remaining text, and references to the contents moved out."""
    if not data:
        return None, None
    whole = text_of_json(data)
    if len(data) < LARGE_BYTES and MESSAGES_IN not in data:
        return whole, None
    text, references = contents.extract(whole, data, bytes.fromhex(after) if after else None)
    if not references:
        return text, None
    for reference in references:
        heads[bytes.fromhex(reference.digest)] = None
    return text, ENCODER.encode(references).decode()


def _end_row(namespace: str, task: str, end: TaskEnd) -> tuple[Value, ...]:
    error = ENCODER.encode(end.error).decode() if end.error is not None else None
    texts = (end.status, end.agent, end.session)
    status, agent, session = map(without_nul, texts) if "\0" in "".join(texts) else texts
    return namespace, task, status, agent, end.steps, end.created, end.ended, error, session


# -- sums of usage -------------------------------------------------------------------------------------------------

UsageEnd: TypeAlias = tuple[str, str, float]
"""Of a task's row: the task, its agent, and when it ended."""
UsageRow: TypeAlias = tuple[str, str, int, str, str, str, str | None]
"""Of a step's row with usage: task, place, attempt, kind, name, usage and attributes."""
_Reports: TypeAlias = dict[str, dict[tuple[str, int], UsageRow]]
_Sums: TypeAlias = dict[tuple[str, ...], float]
REPORTED = ("task", "place", "attempt", "kind", "name", "usage", "attributes")
"""The columns of a UsageRow."""
_places = {column.name: place for place, column in enumerate(STEPS.columns)}
_usage_of_row = itemgetter(*(_places[name] for name in REPORTED))
_USAGE_AT = _places["usage"]
_has_usage = itemgetter(_USAGE_AT)
"""None if a row reports no usage."""


def usage_report(kind: str, name: str, usage: str, attributes: str | None) -> tuple[str, dict[str, float]]:
    """Return the model (empty if the report names none) and the amounts in a step's columns."""
    known = msgspec.json.decode(attributes) if attributes else {}
    named = kind == "model" or (kind == "usage" and name != "usage")
    return str(known.get(RESPONSE_MODEL, name)) if named else "", _USAGE.decode(usage)


def tenant_of(task: str) -> str:
    """Return the tenant that a task's id begins with; empty for none."""
    return task.partition(".")[0] if "." in task else ""


def day_of(ended_ms: float) -> str:
    """Return the day (UTC) of a time, as in 2026-11-27."""
    try:
        return datetime.fromtimestamp(ended_ms / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return "0001-01-01"  # nobody's clock


def usage_changes(
    namespace: str, rows: BatchRows, ends: Iterable[UsageEnd], stored: Iterable[UsageRow]
) -> list[tuple[Value, ...]]:
    """Return what a batch adds to the sums, as rows of `weft_usage`.

    `ends` and `stored` are what the store had before: the ends of the batch's tasks, and the steps with usage of those
    that have ended or do so now. The difference counts: a batch that is written again adds nothing, and neither does a
    row that replaces another one.
    """
    old: _Reports = defaultdict(dict)
    for report in stored:
        old[report[0]][report[1:3]] = report
    if not old and not any(map(_has_usage, rows.steps)):
        return []
    before = {end[0]: end for end in ends}
    after = before.copy()
    for _, task, _, agent, _, _, ended, *_ in rows.tasks:
        after[cast(str, task)] = cast(UsageEnd, (task, agent, ended))
    new: _Reports = defaultdict(dict, {task: reports.copy() for task, reports in old.items()})
    for row in rows.steps:
        if row[_USAGE_AT] is not None:
            report = cast(UsageRow, _usage_of_row(row))
            new[report[0]][report[1:3]] = report
        elif row[1] in old:
            report = cast(UsageRow, _usage_of_row(row))
            new[report[0]].pop(report[1:3], None)
    changes: _Sums = defaultdict(float)
    for task, reports in new.items():
        end = after.get(task)
        if end is None:
            continue
        if task not in before:
            _add_usage(changes, end, reports.values())
            continue
        counted: _Sums = defaultdict(float)
        usage: _Sums = defaultdict(float)
        _add_usage(counted, before[task], old[task].values())
        _add_usage(usage, end, reports.values())
        for key in usage.keys() | counted.keys():
            # One difference per sum: an unchanged task adds exactly nothing. A sum of zeros has a row, too.
            difference = usage.get(key, 0.0) - counted.get(key, 0.0)
            if difference or key not in counted:
                changes[key] += difference
    return _usage_rows(namespace, changes)


def _usage_rows(namespace: str, sums: Mapping[tuple[str, ...], float]) -> list[tuple[Value, ...]]:
    # In the order of their keys: two writers wait for each other, and do not deadlock.
    return [(namespace, *key, amount) for key, amount in sorted(sums.items())]


def _add_usage(sums: _Sums, end: UsageEnd, reports: Collection[UsageRow]) -> None:
    """Add a task's usage to the sums."""
    if not reports:
        return
    place = day_of(end[2]), tenant_of(end[0]), end[1][:_NAME_MAX]
    sums[*place, "", "tasks", ""] += 1
    models = set()
    for _, _, _, kind, name, usage, attributes in reports:
        model, amounts = usage_report(kind, name, usage, attributes)
        of_model = *place, without_nul(model)[:_NAME_MAX]
        if model not in models:
            models.add(model)
            sums[*of_model, "model_tasks", ""] += 1
        for of, amount in amounts.items():
            if abs(amount) > _AMOUNT_MAX:
                amount = copysign(_AMOUNT_MAX, amount)
            sums[*of_model, "amount", without_nul(of)[:_NAME_MAX]] += amount


# Any: a sequence cannot express the types of its columns.
def step_of(row: Sequence[Any], contents: Contents) -> Step:
    """Return the step of a row, which begins with the columns of STEPS; `contents` holds what it refers to."""
    # By place, since a task may have thousands of rows: each access by name costs as much as all of this.
    (
        _namespace, _task, _place, attempt, run, step, kind, name, status, started, ended, key, given, output, error,
        errors, usage, cause, owner, input_refs, output_refs, attributes, committed,
    ) = row[:_STEP_COLUMNS]  # fmt: skip
    noted = _ATTRIBUTES.decode(attributes) if attributes else {}
    if input_refs and contents.has_gap(REFERENCES.decode(input_refs)):
        noted[INCOMPLETE] = True
    return Step(
        run=run,
        kind=kind,
        name=name,
        status=status,
        started=started,
        ended=ended,
        step=step,
        attempt=attempt,
        key=key,
        input=_restore(contents, given, input_refs),
        output=_restore(contents, output, output_refs),
        error=_ERROR.decode(error) if error else None,
        errors=_ERRORS.decode(errors) if errors else [],
        usage=_USAGE.decode(usage) if usage else {},
        cause=cause,
        owner=owner,
        attributes=noted,
        committed=committed or 0.0,
    )


def _restore(contents: Contents, text: str | None, references: str | None) -> msgspec.Raw:
    if references:
        return msgspec.Raw(contents.restore(text, REFERENCES.decode(references)))
    return msgspec.Raw(text.encode()) if text else NOTHING


# Any: a sequence cannot express the types of its columns.
def end_of(row: Sequence[Any]) -> TaskEnd:
    """Return the task end of a row, whose columns are in the table's order."""
    _namespace, task, status, agent, steps, created, ended, error, session = row
    return TaskEnd(
        task=task,
        status=status,
        agent=agent,
        steps=steps,
        created=created,
        ended=ended,
        error=_ERROR.decode(error) if error else None,
        session=session,
    )
