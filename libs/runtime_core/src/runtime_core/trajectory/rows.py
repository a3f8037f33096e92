"""Between record entries and rows of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Row

from runtime_core.errors import InvalidInput
from runtime_core.record.contents import REFERENCES, Contents, readable
from runtime_core.record.step import ENCODER, INCOMPLETE, STEPS, Step, StepError, TaskEnd, place

TASK_MAX = 500
"""Bytes of a task id; see PLACE_MAX."""

Value: TypeAlias = str | int | float | bytes | None

_NUL = "\0"
_NUL_SHOWN = "␀"
_ERROR = msgspec.json.Decoder(StepError)
_ERRORS = msgspec.json.Decoder(list[StepError])
_ATTRIBUTES = msgspec.json.Decoder(dict[str, Any])
_USAGE = msgspec.json.Decoder(dict[str, float])


@dataclass(slots=True)
class RecordEntry:
    """One entry of a record stream."""

    entry_id: str
    """The stream's entry id, as in `1731240000000-3`."""
    task: str
    steps: bytes
    """JSON array of Step; may be empty."""
    end: TaskEnd | None
    """Set where the entry's commit ended the task."""
    trace: str = ""
    """The traceparent of a task that has ended, where its context names one."""


@dataclass(slots=True)
class Rows:
    """What a batch of record entries writes; each row is in the order of its table's columns."""

    steps: list[tuple[Value, ...]] = field(default_factory=list)
    tasks: list[tuple[Value, ...]] = field(default_factory=list)
    forks: list[tuple[Value, ...]] = field(default_factory=list)
    uses: list[tuple[Value, ...]] = field(default_factory=list)
    contents: Contents = field(default_factory=Contents)
    unreadable: list[tuple[Value, ...]] = field(default_factory=list)


def entry_order(entry_id: str) -> tuple[int, int]:
    """Return what entry ids compare by: milliseconds, then sequence number."""
    milliseconds, _, sequence = entry_id.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        raise InvalidInput("entry_id", f"{entry_id!r} is not a stream entry id, as in 1731240000000-0") from None


def storable(text: str) -> str:
    """Return `text` as both databases can hold it: PostgreSQL refuses NUL, so NUL is stored as ␀."""
    return text.replace(_NUL, _NUL_SHOWN) if _NUL in text else text


def rows_of(namespace: str, partition: int, entries: Sequence[RecordEntry]) -> Rows:
    """Decode a batch. An entry whose steps cannot be read is kept whole as an unreadable row.

    Bad bytes from one worker must not stop the record of all others, and must not vanish either.
    """
    rows = Rows()
    for entry in entries:
        task = storable(entry.task)
        try:
            _check_task(task)
            # The end counts even where the steps cannot be read: the task then shows as not complete.
            if entry.end is not None:
                rows.tasks.append(_end_row(namespace, task, entry.end))
            if entry.steps:
                _add_steps(rows, namespace, task, entry.steps)
        except (msgspec.MsgspecError, ValueError, RecursionError, InvalidInput) as error:
            reason = storable(str(error))
            rows.unreadable.append((namespace, partition, entry.entry_id, task[:TASK_MAX], reason, entry.steps))
    return rows


def heads_of(rows: Rows) -> list[bytes]:
    """Return the lists that steps of a batch refer to."""
    return [digest for _, _, digest in rows.uses if isinstance(digest, bytes) and digest in rows.contents.nodes]


def rows_of_contents(
    namespace: str, rows: Rows, lacking: Sequence[bytes]
) -> tuple[list[tuple[Value, ...]], list[tuple[Value, ...]]]:
    """Return rows for the tables of contents and of lists, where the store lacks these lists; ordered by digest.

    In that order two writers that add the same ones wait for each other, and not in a circle.
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
    if len(task) * 4 > TASK_MAX and len(task.encode("utf-8", "surrogatepass")) > TASK_MAX:
        raise InvalidInput("task", f"the task id is longer than {TASK_MAX} bytes; submit with a shorter one")


def _add_steps(rows: Rows, namespace: str, task: str, steps: bytes) -> None:
    encode = ENCODER.encode
    made: list[tuple[Value, ...]] = []
    heads: dict[bytes, None] = {}
    decoded = STEPS.decode(steps)
    # All of them first: an entry that is refused leaves nothing in `rows`.
    places = [_checked_place(step) for step in decoded]
    for step, at in zip(decoded, places, strict=True):
        given, given_refs = _taken_out(rows.contents, bytes(step.input), heads, step.input_after)
        returned, returned_refs = _taken_out(rows.contents, bytes(step.output), heads)
        if step.fork is not None:
            rows.forks.append((namespace, task, storable(step.fork.task), storable(step.fork.step)))
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
            )
        )
    if b"\\u0000" in steps:
        made = [tuple(storable(v) if isinstance(v, str) else v for v in row) for row in made]
    rows.steps += made
    rows.uses += [(namespace, task, digest) for digest in heads]


def _checked_place(step: Step) -> str:
    if not 0 <= step.attempt < 2**31:
        raise InvalidInput("attempt", f"{step.attempt} is not between 0 and 2147483647")
    return place(step.run, step.step)


def _taken_out(
    contents: Contents, data: bytes, heads: dict[bytes, None], after: str = ""
) -> tuple[str | None, str | None]:
    """The columns of an input or output: what is left of it, and where the rest is."""
    if not data:
        return None, None
    text, references = contents.take_out(readable(data), data, bytes.fromhex(after) if after else None)
    if not references:
        return text, None
    for reference in references:
        heads[bytes.fromhex(reference.digest)] = None
    return text, ENCODER.encode(references).decode()


def _end_row(namespace: str, task: str, end: TaskEnd) -> tuple[Value, ...]:
    return (
        namespace,
        task,
        storable(end.status),
        storable(end.agent),
        end.steps,
        end.created,
        end.ended,
        ENCODER.encode(end.error).decode() if end.error is not None else None,
        storable(end.session),
    )


# As above: the columns are read by name.
def step_of(row: Row[Any], contents: Contents) -> Step:
    """Return the step that a row of the table of steps holds; `contents` has what the row refers to."""
    attributes = _ATTRIBUTES.decode(row.attributes) if row.attributes else {}
    if row.input_refs and contents.lacks(REFERENCES.decode(row.input_refs)):
        attributes[INCOMPLETE] = True
    return Step(
        run=row.run,
        kind=row.kind,
        name=row.name,
        status=row.status,
        started=row.started,
        ended=row.ended,
        step=row.step,
        attempt=row.attempt,
        key=row.key,
        input=msgspec.Raw(_put_back(contents, row.input, row.input_refs)),
        output=msgspec.Raw(_put_back(contents, row.output, row.output_refs)),
        error=_ERROR.decode(row.error) if row.error else None,
        errors=_ERRORS.decode(row.errors) if row.errors else [],
        usage=_USAGE.decode(row.usage) if row.usage else {},
        cause=row.cause,
        owner=row.owner,
        attributes=attributes,
    )


def _put_back(contents: Contents, text: str | None, references: str | None) -> bytes:
    if references:
        return contents.put_back(text, REFERENCES.decode(references))
    return text.encode() if text else b""


# The values of a row have the types of their columns, which a sequence cannot say.
def end_of(row: Sequence[Any]) -> TaskEnd:
    """Return the task end that a row of the table of tasks holds, its columns in the table's order."""
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
