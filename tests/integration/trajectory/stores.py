"""Databases and steps for tests of the trajectory store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import msgspec

from runtime_core.trajectory.store import RecordEntry
from runtime_core.wire.step import ENCODER, Step, TaskEnd

ENDED_MS = 1_793_491_200_000.0


@dataclass(frozen=True, slots=True)
class Database:
    """An empty database for one test."""

    url: str
    path: Path | None = None

    async def execute(self, *statements: str) -> None:
        """Run statements outside the store, each committed."""
        if self.path is not None:
            with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
                for statement in statements:
                    connection.execute(statement)
            return
        session = await asyncpg.connect(self.url)
        try:
            for statement in statements:
                await session.execute(statement)
        finally:
            await session.close()

    async def number(self, query: str) -> int:
        """Return the number that a query returns."""
        if self.path is not None:
            with closing(sqlite3.connect(self.path)) as connection:
                return int(connection.execute(query).fetchone()[0] or 0)
        session = await asyncpg.connect(self.url)
        try:
            return int(await session.fetchval(query) or 0)
        finally:
            await session.close()


def step(run: str = "r", path: str = "", **changes: object) -> Step:
    plain = Step(run=run, step=path, kind="tool", name="search", status="completed", started=1.5, ended=2.25)
    return msgspec.structs.replace(plain, **changes)


def end(task: str, steps: int = 1, **changes: object) -> TaskEnd:
    plain = TaskEnd(task, "completed", "researcher", steps, created=ENDED_MS - 10, ended=ENDED_MS)
    return msgspec.structs.replace(plain, **changes)


def entry(entry_id: str, task: str, *steps: Step, ends: TaskEnd | None = None) -> RecordEntry:
    return RecordEntry(entry_id, task, ENCODER.encode(steps) if steps else b"", ends)
