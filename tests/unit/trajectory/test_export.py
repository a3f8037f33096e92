"""Exports as JSON lines, and files that an export leaves behind."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from runtime_core.errors import InvalidInput
from runtime_core.trajectory.export import export_jsonl, export_parquet
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


async def lines(store: TrajectoryStore, **filters: str) -> list[dict[str, object]]:
    out = io.BytesIO()
    count = await export_jsonl(store, "weft", out, status=filters.get("status"), agent=filters.get("agent"))
    found = [json.loads(line) for line in out.getvalue().split(b"\n")[:-1]]
    assert len(found) == count
    return found


async def test_a_line_holds_a_step_with_its_task(store: TrajectoryStore) -> None:
    await record(store, "t", FAILED, step("1", output=msgspec.Raw('["猫"]'.encode())))
    first, second = await lines(store)
    assert first["input"] == {"query": "猫 \n", "n": float("inf")}
    assert first["output"] is None
    assert first["error"] == {"type": "ValueError", "message": "no\nmore", "traceback": "trace", "at": 1.0}
    assert (first["namespace"], first["task"], first["agent"], first["session"]) == ("weft", "t", "researcher", "s")
    assert (first["task_status"], first["task_ended"]) == ("completed", ENDED_MS)
    assert second["output"] == ["猫"]
    assert (second["run"], second["step"], second["attempt"], second["started"]) == ("r", "1", 1, ENDED_MS - 1.5)


async def test_a_running_task_is_exported_with_its_end_open(store: TrajectoryStore) -> None:
    await record(store, "t", step(), ended=False)
    (line,) = await lines(store)
    assert line["task_status"] is None


async def test_filters_choose_tasks(store: TrajectoryStore) -> None:
    await record(store, "good", step())
    await record(store, "bad", step(), status="failed")
    assert [line["task"] for line in await lines(store, status="failed")] == ["bad"]
    assert await lines(store, agent="nobody") == []


async def test_an_empty_export_is_a_valid_file(store: TrajectoryStore, tmp_path: Path) -> None:
    assert await export_parquet(store, "weft", tmp_path / "out.parquet") == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert (table.num_rows, table.schema.names) == (0, SCHEMA.names)
    assert await lines(store) == []


async def test_a_failed_export_leaves_an_earlier_file_alone(store: TrajectoryStore, tmp_path: Path) -> None:
    (tmp_path / "out.parquet").write_bytes(b"earlier")
    await record(store, "t", step())
    with pytest.raises(InvalidInput, match="time zone"):
        await export_parquet(store, "weft", tmp_path / "out.parquet", since=ENDED.replace(tzinfo=None))
    assert (tmp_path / "out.parquet").read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
