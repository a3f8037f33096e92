"""A Parquet file of exported steps. Imports pyarrow, so it is itself imported only when one is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from runtime_core.trajectory.steps import ENCODER

if TYPE_CHECKING:
    from runtime_core.trajectory.export import ExportedStep

_YEAR_9999 = 253_402_300_799_000.0
_TIME = pa.timestamp("us", tz="UTC")
_REPEATED = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("namespace", _REPEATED, nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("agent", _REPEATED),
        pa.field("session", pa.string()),
        pa.field("task_status", _REPEATED),
        pa.field("task_created", _TIME),
        pa.field("task_ended", _TIME),
        pa.field("run", pa.string(), nullable=False),
        pa.field("step", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("kind", _REPEATED, nullable=False),
        pa.field("name", _REPEATED, nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("status", _REPEATED, nullable=False),
        pa.field("started", _TIME, nullable=False),
        pa.field("ended", _TIME, nullable=False),
        pa.field("input", pa.string()),
        pa.field("output", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("errors", pa.string()),
        pa.field("usage", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("cause", pa.string(), nullable=False),
        pa.field("owner", pa.string(), nullable=False),
    ]
)


class ParquetFile:
    """A file under way; each `write` is one row group. Without one, `close` leaves an empty table."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")

    def write(self, rows: Sequence[ExportedStep]) -> None:
        """Append a row group."""
        self._writer.write_table(pa.Table.from_pylist([_row(row) for row in rows], schema=SCHEMA))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


def _row(step: ExportedStep) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(step, name) for name in SCHEMA.names if name in step.__struct_fields__}
    for name in ("task_created", "task_ended", "started", "ended"):
        at = getattr(step, name)
        row[name] = _microseconds(at) if at is not None else None
    row["input"] = _text(step.input)
    row["output"] = _text(step.output)
    row["error_type"] = step.error.type if step.error else None
    row["error_message"] = step.error.message if step.error else None
    row["errors"] = ENCODER.encode(step.errors).decode() if step.errors else None
    row["usage"] = list(step.usage.items())
    return row


def _microseconds(milliseconds: float) -> int:
    # A worker's broken clock must not make every export fail.
    return round(min(max(milliseconds, 0.0), _YEAR_9999) * 1_000)


def _text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode("utf-8", "replace")
    return text if text != "null" else None
