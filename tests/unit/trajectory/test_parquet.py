"""Exports as Parquet: typed columns, row groups, and values that a column cannot hold."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from runtime_core.trajectory import export
from runtime_core.trajectory.export import export_parquet
from runtime_core.trajectory.parquet import SCHEMA
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.step import ENCODER, Step, StepFailure, TaskEnd

ENDED = datetime(2026, 11, 1, 12, tzinfo=UTC)
ENDED_MS = ENDED.timestamp() * 1_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrajectoryStore]:
    opened = await TrajectoryStore.open(f"sqlite:///{tmp_path}/trajectory.db")
    yield opened
    await opened.close()


async def record(
    store: TrajectoryStore, task: str, *steps: Step, ended: bool = True, status: str = "completed"
) -> None:
    end = TaskEnd(task, status, "researcher", len(steps), ENDED_MS - 5, ENDED_MS, session="s") if ended else None
    await store.write("weft", 0, 1, [RecordEntry("1-0", task, ENCODER.encode(steps), end)])


def step(path: str = "", **changes: object) -> Step:
    plain = Step(
        run="r", step=path, kind="tool", name="search", status="completed", started=ENDED_MS - 1.5, ended=ENDED_MS
    )
    return msgspec.structs.replace(plain, **changes)


FAILED = step(
    status="failed",
    input=msgspec.Raw(b'{\n  "query": "\\u732b \\n",\r\n  "n": 1e999\n}'),
    error=StepFailure("ValueError", "no\nmore", "trace", 1.0),
    errors=[StepFailure("OSError", "first")],
    usage={"tokens": 3.0},
)


async def test_a_parquet_file_has_typed_columns(store: TrajectoryStore, tmp_path: Path) -> None:
    await record(store, "t", FAILED, step("1"))
    await record(store, "u", step(), ended=False)
    assert await export_parquet(store, "weft", tmp_path / "out.parquet") == 3
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names == SCHEMA.names
    assert [str(table.schema.field(name).type) for name in ("started", "attempt", "error_type")] == [
        "timestamp[us, tz=UTC]",
        "int32",
        "string",
    ]
    first, second, third = table.to_pylist()
    assert first["task_ended"] == ENDED
    assert first["started"] == datetime.fromtimestamp((ENDED_MS - 1.5) / 1_000, UTC)
    assert json.loads(first["input"])["query"] == "猫 \n"
    assert first["output"] is None
    assert (first["error_type"], first["error_message"]) == ("ValueError", "no\nmore")
    assert json.loads(first["errors"]) == [{"type": "OSError", "message": "first"}]
    assert first["usage"] == [("tokens", 3.0)]
    assert second["error_type"] is None
    assert third["task_status"] is None


async def test_large_steps_make_more_row_groups(store: TrajectoryStore, tmp_path: Path) -> None:
    large = msgspec.Raw(b'"' + b"x" * (export.ROW_GROUP_BYTES // 4) + b'"')
    await record(store, "t", *(step(str(n), output=large) for n in range(9)))
    assert await export_parquet(store, "weft", tmp_path / "out.parquet") == 9
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


async def test_a_broken_clock_does_not_break_the_export(store: TrajectoryStore, tmp_path: Path) -> None:
    await record(store, "t", step(started=-1e300, ended=1e300))
    assert await export_parquet(store, "weft", tmp_path / "out.parquet") == 1
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["started"].year, row["ended"].year) == (1970, 9999)
