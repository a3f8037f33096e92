"""Trajectories as files for audit and training, as JSON lines or Parquet: one row per step, or one per item."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, Unpack

from runtime_core.errors import ConfigurationError
from runtime_core.trajectory.items import (
    DefaultTrajectoryStrategy,
    RewardFunction,
    TrajectoryItem,
    TrajectoryStrategy,
    score,
)
from runtime_core.trajectory.reading import ExportedStep, TaskTrajectory, exported
from runtime_core.trajectory.store import Filters, TrajectoryStore
from runtime_core.wire.step import ENCODER

if TYPE_CHECKING:
    from runtime_core.trajectory.parquet import Shape

_CHUNK_BYTES = 1 << 18
ROW_GROUP_ROWS = 5_000
ROW_GROUP_BYTES = 8_000_000

Row = TypeVar("Row")
Progress = Callable[[int], None]
"""Called with the number of rows after each row."""


async def export_jsonl(
    store: TrajectoryStore,
    namespace: str,
    out: BinaryIO,
    *,
    progress: Progress | None = None,
    **filters: Unpack[Filters],
) -> int:
    """Write one JSON object per line and step, and return the number of steps. See `store.steps` for the filters."""
    return await _write_lines(out, _counted(_steps(store, namespace, filters), progress))


async def export_parquet(
    store: TrajectoryStore,
    namespace: str,
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **filters: Unpack[Filters],
) -> int:
    """Write a Parquet file with one row per step, and return the number of steps. See `store.steps` for the filters.

    Times are timestamps in UTC. Input, output and errors are JSON in text columns, or null. The file gets its name when
    it is complete. Raises ConfigurationError if pyarrow is missing.
    """
    parquet = _parquet()
    rows = _counted(_steps(store, namespace, filters), progress)
    return await _write_parquet(Path(path), parquet, parquet.STEPS, rows, _size_of_step)


async def trajectory_items(
    store: TrajectoryStore,
    namespace: str,
    *,
    strategy: TrajectoryStrategy | None = None,
    reward: RewardFunction | None = None,
    min_reward: float | None = None,
    **filters: Unpack[Filters],
) -> AsyncIterator[TrajectoryItem]:
    """Yield the items of tasks, with one task's steps in memory at a time.

    `reward` scores each item; `min_reward` excludes items without a score and those below. See `store.steps` for the
    filters. Raises InvalidInput if the reward function fails.
    """
    made = strategy if strategy is not None else DefaultTrajectoryStrategy()
    async for trajectory in _tasks(store, namespace, filters):
        for item in made.items(trajectory):
            if reward is not None:
                await score(item, trajectory.end, reward)
            if min_reward is None or (item.reward.score is not None and item.reward.score >= min_reward):
                yield item


async def export_items_jsonl(
    out: BinaryIO, items: AsyncIterator[TrajectoryItem], progress: Progress | None = None
) -> int:
    """Write one JSON object per line and item (see `items.py`), and return the number of items."""
    return await _write_lines(out, _counted(items, progress))


async def export_items_parquet(
    path: str | os.PathLike[str], items: AsyncIterator[TrajectoryItem], progress: Progress | None = None
) -> int:
    """Write a Parquet file with one row per item, and return the number of items.

    Values of the user's own shape (input, messages, content, tool calls, …) are JSON in text columns. The file gets its
    name when it is complete. Raises ConfigurationError if pyarrow is missing.
    """
    parquet = _parquet()
    return await _write_parquet(Path(path), parquet, parquet.ITEMS, _counted(items, progress), _size_of_item)


async def _counted(rows: AsyncIterator[Row], progress: Progress | None) -> AsyncIterator[Row]:
    count = 0
    async for row in rows:
        yield row
        count += 1
        if progress is not None:
            progress(count)


async def _steps(store: TrajectoryStore, namespace: str, filters: Filters) -> AsyncIterator[ExportedStep]:
    async for stored in store.steps(namespace, **filters):
        yield exported(namespace, stored)


async def _tasks(store: TrajectoryStore, namespace: str, filters: Filters) -> AsyncIterator[TaskTrajectory]:
    task: TaskTrajectory | None = None
    async for stored in store.steps(namespace, **filters):
        if task is None or task.task != stored.task:
            if task is not None:
                yield task
            task = TaskTrajectory(namespace, stored.task, stored.end, [])
        task.steps.append(stored.step)
    if task is not None:
        yield task


async def _write_lines(out: BinaryIO, rows: AsyncIterator[Any]) -> int:  # Any: one of the two shapes
    count = 0
    chunk = bytearray()
    async for row in rows:
        chunk += ENCODER.encode(row)
        chunk += b"\n"
        count += 1
        if len(chunk) >= _CHUNK_BYTES:
            await asyncio.to_thread(out.write, bytes(chunk))
            chunk.clear()
    await asyncio.to_thread(out.write, bytes(chunk))
    return count


def _parquet() -> ModuleType:
    try:
        from runtime_core.trajectory import parquet
    except ImportError:
        raise ConfigurationError("Parquet needs pyarrow, which is not installed: pip install 'weft[parquet]'") from None
    return parquet


async def _write_parquet(
    target: Path,
    parquet: ModuleType,
    shape: Shape[Any],
    rows: AsyncIterator[Any],  # Any: one of the two shapes
    size_of: Callable[[Any], int],
) -> int:
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    count = 0
    try:
        file = await asyncio.to_thread(parquet.ParquetFile, part, shape)
        try:
            group: list[Any] = []  # Any: see `rows`
            size = 0
            async for row in rows:
                group.append(row)
                size += size_of(row)
                count += 1
                if len(group) >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
                    await asyncio.to_thread(file.write, group)
                    group, size = [], 0
            if group:
                await asyncio.to_thread(file.write, group)
        finally:
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(os.replace, part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        number = error.errno or errno.EIO  # pyarrow names a file of its own, or none
        raise OSError(number, os.strerror(number), str(target)) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return count


def _size_of_step(row: ExportedStep) -> int:
    return len(bytes(row.input)) + len(bytes(row.output))


def _size_of_item(row: TrajectoryItem) -> int:
    return len(ENCODER.encode(row))
