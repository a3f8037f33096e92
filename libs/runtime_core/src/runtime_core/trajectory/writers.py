"""Writes batches to SQLite or PostgreSQL, with one statement per table."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from sqlalchemy import ARRAY, LargeBinary, Table, any_, bindparam, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from runtime_core.errors import Fenced, StoreUnavailable
from runtime_core.trajectory import tables
from runtime_core.trajectory.database import BUSY_TIMEOUT_SECONDS, translated
from runtime_core.trajectory.tables import (
    BatchRows,
    RecordEntry,
    Value,
    entry_order,
    heads_of,
    rows_of,
    rows_of_contents,
    usage_changes,
)
from runtime_core.wire.contents import missing_nodes

NO_ENTRY = "0-0"
"""The cursor before the first entry."""
_REPLACED = (tables.STEPS, tables.TASKS, tables.UNREADABLE, tables.FORKS)
CONTENTS_LOCK = 0x77656675
"""The advisory lock of the contents: writers share it; an erasure takes it exclusively."""
_PLAIN = tuple(column.name for column in tables.STEPS.columns if column.name not in tables.RARE)
"""The columns of a step that has no rare ones."""
_HAS_LIST = "SELECT 1 FROM weft_lists WHERE namespace = ? AND digest = ?"
_AMONG = "? AND task IN (SELECT value FROM json_each(?))"
_ENDS = "SELECT task, agent, ended FROM weft_tasks WHERE namespace = "
_REPORTS = f"SELECT {', '.join(tables.REPORTED)} FROM weft_steps WHERE usage IS NOT NULL AND namespace = "  # noqa: S608 - names of columns


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition's record stream, oldest first, and the writer's epoch."""

    namespace: str
    partition: int
    epoch: int
    entries: Sequence[RecordEntry]


class Writer(Protocol):
    """Writes batches, each in one transaction: rows and cursor, or nothing."""

    async def write(self, batch: Batch) -> None:
        """Write a batch. Raises Fenced if a higher epoch has written, StoreUnavailable if the database fails."""

    async def close(self) -> None:
        """Finish a write in progress, then close the connection."""


def next_cursor(batch: Batch, stored_epoch: int, stored_entry: str) -> str:
    """Return the cursor after `batch`, never before the stored one. Raises Fenced for a lower epoch."""
    if stored_epoch > batch.epoch:
        raise Fenced(
            f"partition {batch.partition} of {batch.namespace!r} is recorded under epoch {stored_epoch}, "
            f"this writer has {batch.epoch}: another recorder leads"
        )
    return max((stored_entry, *(entry.entry_id for entry in batch.entries[-1:])), key=entry_order)


def sqlite_upsert(table: Table, columns: Sequence[str] = ()) -> str:
    """Return an upsert with `?` parameters in the order of the table's columns.

    With `columns` it has parameters for these columns alone. The others become null.
    """
    insert = sqlite.insert(table)
    if columns:
        insert = insert.values(dict.fromkeys(columns))
    update = {name: insert.excluded[name] for name in _values(table)}
    statement = insert.on_conflict_do_update(index_elements=_keys(table), set_=update)
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


def postgres_upsert(table: Table) -> str:
    """Return an upsert whose parameters `$1`, `$2`, … are arrays, one per column in the table's order.

    One statement per batch saves a protocol message per row. A batch must not hold a key twice.
    """
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    quote = dialect.identifier_preparer.quote
    update = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in _values(table))
    return (
        f"INSERT INTO {table.name} {_from_arrays(table)} "
        f"ON CONFLICT ({', '.join(map(quote, _keys(table)))}) DO UPDATE SET {update}"
    )


def sqlite_sums() -> str:
    """Return a statement that adds rows of `weft_usage` to its sums, with parameters as in `sqlite_upsert`."""
    values = ", ".join("?" for _ in tables.USAGE.columns)
    return f"INSERT INTO {tables.USAGE.name} VALUES ({values}) {_ADDED}"  # noqa: S608 - a table's name


def postgres_sums() -> str:
    """Return the same statement for PostgreSQL, with parameters as in `postgres_upsert`."""
    return f"INSERT INTO {tables.USAGE.name} {_from_arrays(tables.USAGE)} {_ADDED}"


def sqlite_insert(table: Table) -> str:
    """Return an insert with `?` parameters that skips existing keys: their rows are equal."""
    statement = sqlite.insert(table).on_conflict_do_nothing()
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


def postgres_insert(table: Table) -> str:
    """Return the same insert for PostgreSQL, with one array per column as in `postgres_upsert`."""
    return f"INSERT INTO {table.name} {_from_arrays(table)} ON CONFLICT DO NOTHING"


def _from_arrays(table: Table) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    arrays = ", ".join(
        f"${number}::{column.type.compile(dialect).partition(' COLLATE')[0]}[]"
        for number, column in enumerate(table.columns, 1)
    )
    columns = ", ".join(dialect.identifier_preparer.quote(column.name) for column in table.columns)
    # Only names from the tables' definition; values are parameters.
    return f"({columns}) SELECT * FROM unnest({arrays})"  # noqa: S608 (see above)


_ADDED = (
    f"ON CONFLICT ({', '.join(column.name for column in tables.USAGE.primary_key)}) "
    f"DO UPDATE SET amount = {tables.USAGE.name}.amount + excluded.amount"
)


def _keys(table: Table) -> list[str]:
    return [column.name for column in table.primary_key]


def _values(table: Table) -> list[str]:
    return [column.name for column in table.columns if not column.primary_key]


_places = {column.name: place for place, column in enumerate(tables.STEPS.columns)}
_rare_of = itemgetter(*(_places[name] for name in tables.RARE))
_of_plain = itemgetter(*(_places[name] for name in _PLAIN))
_task_of = itemgetter(1)
_NO_RARE = (None,) * len(tables.RARE)


def _tasks_of(rows: BatchRows) -> tuple[set[Value], set[Value]]:
    """Return the tasks that a batch ends, and all tasks that it has rows of."""
    # Not in Python, which calls a generator for each row.
    ended = set(map(_task_of, rows.tasks))
    return ended, ended.union(map(_task_of, rows.steps))


class PostgresWriter:
    """The Writer of a PostgreSQL database; the engine belongs to the store."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._upserts = {table: postgres_upsert(table) for table in _REPLACED}
        self._inserts = {table: postgres_insert(table) for table in (tables.CONTENTS, tables.LISTS, tables.USES)}
        self._sums = postgres_sums()

    async def write(self, batch: Batch) -> None:
        # In a thread: a large batch would block the event loop.
        rows = await asyncio.to_thread(rows_of, batch.namespace, batch.partition, batch.entries)
        with translated("the batch was not written"):
            async with self._engine.begin() as connection:
                await self._move_cursor(connection, batch)
                usage = await self._usage_changes(connection, batch.namespace, rows)
                await self._upsert(connection, tables.STEPS, rows.steps)
                await self._upsert(connection, tables.TASKS, rows.tasks)
                await self._upsert(connection, tables.UNREADABLE, rows.unreadable)
                await self._upsert(connection, tables.FORKS, rows.forks)
                if rows.uses:
                    await self._write_contents(connection, batch.namespace, rows)
                # Last: until the commit, writers of other partitions wait for the same sums.
                if usage:
                    await connection.exec_driver_sql(self._sums, tuple(zip(*usage, strict=True)))

    async def close(self) -> None:
        """Nothing is held between writes."""

    async def _move_cursor(self, connection: AsyncConnection, batch: Batch) -> None:
        # First in the transaction: the row lock serializes the writers of a partition.
        cursors = tables.CURSORS.c
        here = (cursors.namespace == batch.namespace) & (cursors.partition == batch.partition)
        read = select(cursors.epoch, cursors.entry).where(here).with_for_update()
        stored = (await connection.execute(read)).one_or_none()
        if stored is None:
            first = insert(tables.CURSORS).values(
                namespace=batch.namespace, partition=batch.partition, epoch=0, entry=NO_ENTRY
            )
            await connection.execute(first.on_conflict_do_nothing())
            stored = (await connection.execute(read)).one()
        cursor = next_cursor(batch, stored.epoch, stored.entry)
        await connection.execute(tables.CURSORS.update().where(here).values(epoch=batch.epoch, entry=cursor))

    async def _usage_changes(
        self, connection: AsyncConnection, namespace: str, rows: BatchRows
    ) -> list[tuple[Value, ...]]:
        ended, tasks = _tasks_of(rows)
        if not tasks:
            return []
        asked = (namespace, list(tasks))
        ends = (await connection.exec_driver_sql(f"{_ENDS}$1 AND task = ANY($2)", asked)).all()
        asked = (namespace, list(ended.union(end.task for end in ends)))
        reports = (await connection.exec_driver_sql(f"{_REPORTS}$1 AND task = ANY($2)", asked)).all()
        return usage_changes(namespace, rows, map(tuple, ends), map(tuple, reports))

    async def _write_contents(self, connection: AsyncConnection, namespace: str, rows: BatchRows) -> None:
        await connection.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": CONTENTS_LOCK})
        lists = tables.LISTS.c
        search = missing_nodes(heads_of(rows), rows.contents.nodes)
        known: set[bytes] | None = None
        while True:
            try:
                asked = next(search) if known is None else search.send(known)
            except StopIteration as found:
                lacking: list[bytes] = found.value
                break
            read = select(lists.digest).where(
                lists.namespace == namespace, lists.digest == any_(bindparam("asked", type_=ARRAY(LargeBinary)))
            )
            read = read.params(asked=asked)
            known = set((await connection.execute(read)).scalars())
        contents, nodes = rows_of_contents(namespace, rows, lacking)
        for table, made in ((tables.CONTENTS, contents), (tables.LISTS, nodes), (tables.USES, rows.uses)):
            if made:
                await connection.exec_driver_sql(self._inserts[table], tuple(zip(*made, strict=True)))

    async def _upsert(self, connection: AsyncConnection, table: Table, rows: Sequence[tuple[Value, ...]]) -> None:
        if not rows:
            return
        # One statement cannot change a row twice: send only the last row of each key.
        names = list(table.columns.keys())
        places = [names.index(column.name) for column in table.primary_key]
        last = {tuple(row[place] for place in places): row for row in rows}
        await connection.exec_driver_sql(self._upserts[table], tuple(zip(*last.values(), strict=True)))


class SqliteWriter:
    """The Writer of a SQLite file. Its connection belongs to one thread, from the first write on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-writer")
        self._connection: sqlite3.Connection | None = None
        self._steps = sqlite_upsert(tables.STEPS)
        self._plain_steps = sqlite_upsert(tables.STEPS, _PLAIN)
        self._tasks = sqlite_upsert(tables.TASKS)
        self._unreadable = sqlite_upsert(tables.UNREADABLE)
        self._cursors = sqlite_upsert(tables.CURSORS)
        self._forks = sqlite_upsert(tables.FORKS)
        self._contents = sqlite_insert(tables.CONTENTS)
        self._lists = sqlite_insert(tables.LISTS)
        self._uses = sqlite_insert(tables.USES)
        self._sums = sqlite_sums()

    async def write(self, batch: Batch) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with suppress(RuntimeError):  # closed before
            self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=True)

    def _write(self, batch: Batch) -> None:
        # Decode in this thread: a large batch would block the event loop.
        rows = rows_of(batch.namespace, batch.partition, batch.entries)
        try:
            connection = self._connect()
            # Take the write lock before reading the fence: a deferred transaction would have to upgrade its lock, which
            # SQLite refuses if another process has written meanwhile.
            connection.execute("BEGIN IMMEDIATE")
            try:
                stored = connection.execute(
                    "SELECT epoch, entry FROM weft_cursors WHERE namespace = ? AND partition = ?",
                    (batch.namespace, batch.partition),
                ).fetchone() or (0, NO_ENTRY)
                cursor = next_cursor(batch, *stored)
                usage = self._usage_changes(connection, batch.namespace, rows)
                self._write_steps(connection, rows.steps)
                connection.executemany(self._tasks, rows.tasks)
                connection.executemany(self._unreadable, rows.unreadable)
                connection.executemany(self._forks, rows.forks)
                if rows.uses:
                    self._write_contents(connection, batch.namespace, rows)
                connection.executemany(self._sums, usage)
                connection.execute(self._cursors, (batch.namespace, batch.partition, batch.epoch, cursor))
                connection.execute("COMMIT")
            except BaseException:
                # Some errors, such as a full disk, have already rolled the transaction back.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"the trajectory file {str(self._path)!r} was not written: {error}; check disk and permissions"
            ) from error

    def _write_steps(self, connection: sqlite3.Connection, rows: Sequence[tuple[Value, ...]]) -> None:
        # Python takes about a microsecond to bind a null. In their order, since the last row of a key counts.
        for rare, some in groupby(rows, _rare_of):
            if rare == _NO_RARE:
                connection.executemany(self._plain_steps, map(_of_plain, some))
            else:
                connection.executemany(self._steps, some)

    def _usage_changes(
        self, connection: sqlite3.Connection, namespace: str, rows: BatchRows
    ) -> list[tuple[Value, ...]]:
        ended, tasks = _tasks_of(rows)
        if not tasks:
            return []
        ends = connection.execute(f"{_ENDS}{_AMONG}", (namespace, json.dumps([*tasks]))).fetchall()
        asked = json.dumps([*ended.union(end[0] for end in ends)])
        reports = connection.execute(f"{_REPORTS}{_AMONG}", (namespace, asked)).fetchall()
        return usage_changes(namespace, rows, ends, reports)

    def _write_contents(self, connection: sqlite3.Connection, namespace: str, rows: BatchRows) -> None:
        search = missing_nodes(heads_of(rows), rows.contents.nodes)
        known: set[bytes] | None = None
        while True:
            try:
                asked = next(search) if known is None else search.send(known)
            except StopIteration as found:
                lacking: list[bytes] = found.value
                break
            known = {digest for digest in asked if connection.execute(_HAS_LIST, (namespace, digest)).fetchone()}
        contents, lists = rows_of_contents(namespace, rows, lacking)
        connection.executemany(self._contents, contents)
        connection.executemany(self._lists, lists)
        connection.executemany(self._uses, rows.uses)

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, cached_statements=16
            )
            # With the write-ahead log, a crash of the process loses nothing. A power cut may lose the last
            # transactions, with their cursor.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
