"""Erases a task: its rows, and what only its steps referred to."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from runtime_core.trajectory import tables
from runtime_core.trajectory.postgres_writer import CONTENTS_LOCK
from runtime_core.trajectory.reading import chains, in_parts


async def erase(connection: AsyncConnection, namespace: str, task: str) -> int:
    """Erase all that is recorded of a task, in the transaction of `connection`; return how many rows that were."""
    if connection.dialect.name == "postgresql":
        # A writer that finds a content stored must not lose it before it has written that it uses it.
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": CONTENTS_LOCK})
    erased = 0
    # Deletes first: in SQLite the first of them takes the write lock, before anything is read.
    for table in (tables.STEPS, tables.TASKS, tables.UNREADABLE, tables.FORKS):
        chosen = (table.c.namespace == namespace) & (table.c.task == task)
        erased += (await connection.execute(table.delete().where(chosen))).rowcount
    uses = tables.USES.c
    mine = (uses.namespace == namespace) & (uses.task == task)
    used = set((await connection.execute(select(uses.digest).where(mine))).scalars())
    if used:
        await connection.execute(tables.USES.delete().where(mine))
        await _erase_unused(connection, namespace, used)
    return erased


async def _erase_unused(connection: AsyncConnection, namespace: str, used: set[bytes]) -> None:
    parents: dict[bytes, bytes | None] = {}
    contents = set(used)
    for part in in_parts(used):
        for digest, parent, message, _ in await chains(connection, namespace, part):
            parents[digest] = parent
            contents.add(message)
    lists, uses = tables.LISTS, tables.USES
    kept = await _still_used(connection, namespace, parents)
    for part in in_parts(parents):
        read = select(lists.c.digest, lists.c.parent).where(lists.c.namespace == namespace, lists.c.parent.in_(part))
        kept.update(parent for child, parent in (await connection.execute(read)).all() if child not in parents)
    for head in list(kept):
        # All that comes before a list that is kept is kept.
        at = parents.get(head)
        while at is not None and at not in kept:
            kept.add(at)
            at = parents.get(at)
    for part in in_parts(digest for digest in parents if digest not in kept):
        await connection.execute(lists.delete().where(lists.c.namespace == namespace, lists.c.digest.in_(part)))
    stored = tables.CONTENTS
    for part in in_parts(contents - parents.keys()):
        in_use = select(uses.c.digest).where(uses.c.namespace == namespace, uses.c.digest.in_(part))
        in_lists = select(lists.c.message).where(lists.c.namespace == namespace, lists.c.message.in_(part))
        unused = stored.c.digest.in_(part) & stored.c.digest.not_in(in_use) & stored.c.digest.not_in(in_lists)
        await connection.execute(stored.delete().where(stored.c.namespace == namespace, unused))


async def _still_used(connection: AsyncConnection, namespace: str, digests: Iterable[bytes]) -> set[bytes]:
    uses = tables.USES.c
    found: set[bytes] = set()
    for part in in_parts(digests):
        read = select(uses.digest).where(uses.namespace == namespace, uses.digest.in_(part)).distinct()
        found.update((await connection.execute(read)).scalars())
    return found
