"""Writes Parquet files of exported steps or items. It imports pyarrow, so import it only to write one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from runtime_core.trajectory.items import TrajectoryItem
from runtime_core.trajectory.reading import ExportedStep
from runtime_core.wire.step import ENCODER

Row = TypeVar("Row")

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
        pa.field("logprobs", pa.string()),
        pa.field("attributes", pa.string(), nullable=False),
        pa.field("cause", pa.string(), nullable=False),
        pa.field("owner", pa.string(), nullable=False),
    ]
)


ITEM_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("agent", _REPEATED, nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("execute_time", _TIME, nullable=False),
        pa.field("pre_agent", _REPEATED),
        pa.field("input", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("context", pa.string(), nullable=False),
        pa.field("content", pa.string()),
        pa.field("tool_calls", pa.string(), nullable=False),
        pa.field("is_agent_finished", pa.bool_(), nullable=False),
        pa.field("usage", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("logprobs", pa.string()),
        pa.field("ext_info", pa.string(), nullable=False),
        pa.field("tool_outputs", pa.string(), nullable=False),
        pa.field("status", _REPEATED, nullable=False),
        pa.field("score", pa.float64()),
        pa.field("details", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Shape(Generic[Row]):
    """The schema of a file, and its rows' values."""

    schema: pa.Schema
    columns: Callable[[Row], dict[str, object]]
    """Returns a row's values by column."""


class ParquetFile(Generic[Row]):
    """An open file; each `write` adds one row group. Without any, the file is an empty table."""

    def __init__(self, path: Path, shape: Shape[Row]) -> None:
        self._shape = shape
        self._writer = pq.ParquetWriter(path, shape.schema, compression="zstd")

    def write(self, rows: Sequence[Row]) -> None:
        """Append a row group."""
        columns = [self._shape.columns(row) for row in rows]
        self._writer.write_table(pa.Table.from_pylist(columns, schema=self._shape.schema))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


def _of_step(step: ExportedStep) -> dict[str, object]:
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
    row["logprobs"] = _json(step.logprobs)
    row["attributes"] = _json(step.attributes)
    return row


def _of_item(item: TrajectoryItem) -> dict[str, object]:
    meta, state, action, reward = item.meta, item.state, item.action, item.reward
    return {
        "id": item.id,
        "session_id": meta.session_id,
        "task_id": meta.task_id,
        "run_id": meta.run_id,
        "agent": meta.agent,
        "step": meta.step,
        "step_id": meta.step_id,
        "execute_time": _microseconds(meta.execute_time),
        "pre_agent": meta.pre_agent,
        "input": _json(state.input),
        "messages": _json(state.messages),
        "context": _json(state.context),
        "content": _json(action.content),
        "tool_calls": _json(action.tool_calls),
        "is_agent_finished": action.is_agent_finished,
        "usage": list(action.usage.items()),
        "logprobs": _json(action.logprobs),
        "ext_info": _json(action.ext_info),
        "tool_outputs": _json(reward.tool_outputs),
        "status": reward.status,
        "score": reward.score,
        "details": _json(reward.details),
    }


def _microseconds(milliseconds: float) -> int:
    # A worker's wrong clock must not make every export fail.
    return round(min(max(milliseconds, 0.0), _YEAR_9999) * 1_000)


def _text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode("utf-8", "replace")
    return text if text != "null" else None


def _json(value: object) -> str | None:
    return None if value is None else ENCODER.encode(value).decode()


STEPS: Shape[ExportedStep] = Shape(SCHEMA, _of_step)
ITEMS: Shape[TrajectoryItem] = Shape(ITEM_SCHEMA, _of_item)
