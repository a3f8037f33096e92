"""Writes to PostgreSQL: one statement per table, with a column's values as one array."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import ARRAY, LargeBinary, Table, any_, bindparam, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from runtime_core.trajectory import tables
from runtime_core.trajectory.contents import missing
from runtime_core.trajectory.failures import translated
from runtime_core.trajectory.rows import Rows, Value, heads_of, rows_of, rows_of_contents
from runtime_core.trajectory.statements import postgres_insert, postgres_upsert
from runtime_core.trajectory.writer import NO_ENTRY, Batch, next_cursor

_REPLACED = (tables.STEPS, tables.TASKS, tables.UNREADABLE, tables.FORKS)
CONTENTS_LOCK = 0x77656675
"""Number of the advisory lock of the contents: writers share it, since only an erasure may not be beside them."""


class PostgresWriter:
    """The Writer of a PostgreSQL database; the engine belongs to the store."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._upserts = {table: postgres_upsert(table) for table in _REPLACED}
        self._inserts = {table: postgres_insert(table) for table in (tables.CONTENTS, tables.LISTS, tables.USES)}

    async def write(self, batch: Batch) -> None:
        # In a thread, so that a large batch does not hold up the event loop.
        rows = await asyncio.to_thread(rows_of, batch.namespace, batch.partition, batch.entries)
        with translated("the batch was not written"):
            async with self._engine.begin() as connection:
                await self._move_cursor(connection, batch)
                await self._upsert(connection, tables.STEPS, rows.steps)
                await self._upsert(connection, tables.TASKS, rows.tasks)
                await self._upsert(connection, tables.UNREADABLE, rows.unreadable)
                await self._upsert(connection, tables.FORKS, rows.forks)
                if rows.uses:
                    await self._write_contents(connection, batch.namespace, rows)

    async def close(self) -> None:
        """Nothing is held between writes."""

    async def _move_cursor(self, connection: AsyncConnection, batch: Batch) -> None:
        # First in the transaction: the row's lock makes the writers of one partition take turns.
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

    async def _write_contents(self, connection: AsyncConnection, namespace: str, rows: Rows) -> None:
        await connection.execute(text("SELECT pg_advisory_xact_lock_shared(:lock)"), {"lock": CONTENTS_LOCK})
        lists = tables.LISTS.c
        search = missing(heads_of(rows), rows.contents.nodes)
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
        # One statement cannot change a row twice, so the last row of each key is the one that is sent.
        names = list(table.columns.keys())
        places = [names.index(column.name) for column in table.primary_key]
        last = {tuple(row[place] for place in places): row for row in rows}
        await connection.exec_driver_sql(self._upserts[table], tuple(zip(*last.values(), strict=True)))
