"""From an entry of the record stream to what the store writes."""

from __future__ import annotations

import re

import msgspec

from runtime_core.telemetry.redaction import redactor
from runtime_core.trajectory.steps import StepError, TaskEnd
from runtime_core.trajectory.store import RecordEntry

_BY_A_PROCESS = re.compile(rb'"owner":"[^"]*"\}\]\Z')
"""The end of rows that name the process which made them. The broker makes rows too: people's answers, refused calls."""
_TAIL_BYTES = 300
_ERROR = msgspec.json.Decoder(StepError)


def record_entry(entry: bytes, fields: list[bytes]) -> RecordEntry:
    """Fields are `t` task, `d` steps (JSON array or empty), and for the commit that ended the task `e` (status,
    agent, steps, created ms, ended ms, session; a line each), `f` (the error object, or empty), where the task's
    context names a trace `x` (its traceparent), and where it had ended before `g`."""
    task, rows = fields[1].decode(), fields[3]
    if rows and _BY_A_PROCESS.search(rows[-_TAIL_BYTES:]) is None:
        # Who made the others has taken secrets out of them.
        rows = redactor().data(rows)
    if len(fields) < 6:
        return RecordEntry(entry.decode(), task, rows, None)
    status, agent, steps, created, ended, session = fields[5].decode().split("\n")
    error = _ERROR.decode(fields[7]) if len(fields) > 7 and fields[7] else None
    end = TaskEnd(task, status, agent, int(steps), float(created or 0), float(ended), error, session)
    trace = dict(zip(fields[8::2], fields[9::2], strict=True)).get(b"x", b"").decode()
    return RecordEntry(entry.decode(), task, rows, end, trace)
