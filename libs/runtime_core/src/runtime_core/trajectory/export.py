"""Trajectories as files for audit and training: one row per step, as JSON lines or Parquet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from runtime_core.errors import ConfigurationError
from runtime_core.trajectory.recorded import StoredStep
from runtime_core.trajectory.steps import ENCODER, StepError
from runtime_core.trajectory.store import TrajectoryStore

_CHUNK_BYTES = 1 << 18
ROW_GROUP_ROWS = 5_000
ROW_GROUP_BYTES = 8_000_000
_NULL = msgspec.Raw(b"null")


class ExportedStep(msgspec.Struct):
    """One exported step with its task. Times are epoch milliseconds.

    What the task's end says is null while the task has not ended.
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
    cause: str
    owner: str


async def export_jsonl(
    store: TrajectoryStore,
    namespace: str,
    out: BinaryIO,
    *,
    tasks: Sequence[str] | None = None,
    status: str | None = None,
    agent: str | None = None,
    since: datetime | None = None,
) -> int:
    """Write one JSON object per line and step; return how many. Filters are those of `store.steps`."""
    count = 0
    chunk = bytearray()
    async for stored in store.steps(namespace, tasks=tasks, status=status, agent=agent, since=since):
        chunk += ENCODER.encode(_exported(namespace, stored))
        chunk += b"\n"
        count += 1
        if len(chunk) >= _CHUNK_BYTES:
            await asyncio.to_thread(out.write, bytes(chunk))
            chunk.clear()
    await asyncio.to_thread(out.write, bytes(chunk))
    return count


async def export_parquet(
    store: TrajectoryStore,
    namespace: str,
    path: str | os.PathLike[str],
    *,
    tasks: Sequence[str] | None = None,
    status: str | None = None,
    agent: str | None = None,
    since: datetime | None = None,
) -> int:
    """Write a Parquet file with one row per step; return how many. Filters are those of `store.steps`.

    Times are timestamps in UTC; input, output and errors are JSON in text columns, null where there is none.
    The file appears under its name when it is whole. ConfigurationError where pyarrow is missing.
    """
    try:
        from runtime_core.trajectory.parquet import ParquetFile
    except ImportError:
        raise ConfigurationError("Parquet needs pyarrow, which is missing: install weft[parquet]") from None
    target = Path(path)
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    count = 0
    try:
        file = await asyncio.to_thread(ParquetFile, part)
        try:
            group: list[ExportedStep] = []
            size = 0
            async for stored in store.steps(namespace, tasks=tasks, status=status, agent=agent, since=since):
                row = _exported(namespace, stored)
                group.append(row)
                size += len(bytes(row.input)) + len(bytes(row.output))
                count += 1
                if len(group) >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
                    await asyncio.to_thread(file.write, group)
                    group, size = [], 0
            if group:
                await asyncio.to_thread(file.write, group)
        finally:
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(os.replace, part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return count


def _exported(namespace: str, stored: StoredStep) -> ExportedStep:
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
        usage=step.usage,
        cause=step.cause,
        owner=step.owner,
    )


def _one_line(raw: msgspec.Raw) -> msgspec.Raw:
    """Return JSON without line breaks, which it may hold between its tokens and nowhere else."""
    data = bytes(raw)
    if not data:
        return _NULL
    if b"\n" not in data and b"\r" not in data:
        return raw
    return msgspec.Raw(data.replace(b"\n", b" ").replace(b"\r", b" "))
