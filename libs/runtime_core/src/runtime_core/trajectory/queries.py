"""Queries for the contents and message lists that steps refer to, and for the origin of forks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from runtime_core.trajectory import tables
from runtime_core.trajectory.reading import in_order
from runtime_core.trajectory.tables import step_of
from runtime_core.wire.contents import REFERENCES, Contents, Node
from runtime_core.wire.step import Fork, Step, before, place

_AT_ONCE = 400
"""Digests per query: some builds of SQLite take at most 999 parameters."""


# Any: the columns of a row are read by name.
async def contents_of(connection: AsyncConnection, namespace: str, rows: Sequence[Row[Any]]) -> Contents:
    """Return the contents that rows of steps refer to."""
    digests: dict[bytes, None] = {}
    for row in rows:
        for references in (row.input_refs, row.output_refs):
            if references:
                for reference in REFERENCES.decode(references):
                    digests[bytes.fromhex(reference.digest)] = None
    contents = Contents()
    if digests:
        for part in in_parts(digests):
            await _read_lists(connection, namespace, part, contents)
            await _read_values(connection, namespace, part, contents)
    return contents


def in_parts(digests: Iterable[bytes]) -> Iterable[list[bytes]]:
    """Split digests into chunks for one query each."""
    every = list(digests)
    return (every[first : first + _AT_ONCE] for first in range(0, len(every), _AT_ONCE))


async def chains(
    connection: AsyncConnection, namespace: str, heads: Sequence[bytes]
) -> list[tuple[bytes, bytes | None, bytes, str]]:
    """Return (digest, parent, message, content) of these lists and all their prefixes, each once."""
    lists, contents = tables.LISTS, tables.CONTENTS
    chain = (
        select(lists.c.digest, lists.c.parent, lists.c.message)
        .where(lists.c.namespace == namespace, lists.c.digest.in_(heads))
        .cte("chain", recursive=True)
    )
    before = select(lists.c.digest, lists.c.parent, lists.c.message).join(
        chain, (lists.c.digest == chain.c.parent) & (lists.c.namespace == namespace)
    )
    # UNION without ALL: follow a shared node once.
    chain = chain.union(before)
    read = select(chain.c.digest, chain.c.parent, chain.c.message, contents.c.content).join(
        contents, (contents.c.digest == chain.c.message) & (contents.c.namespace == namespace)
    )
    rows = (await connection.execute(read)).all()
    return [(row.digest, row.parent, row.message, row.content) for row in rows]


async def _read_lists(connection: AsyncConnection, namespace: str, heads: Sequence[bytes], into: Contents) -> None:
    for digest, parent, message, content in await chains(connection, namespace, heads):
        into.nodes[digest] = Node(parent, message)
        into.values[message] = content


async def _read_values(connection: AsyncConnection, namespace: str, digests: Sequence[bytes], into: Contents) -> None:
    contents = tables.CONTENTS.c
    read = select(contents.digest, contents.content).where(
        contents.namespace == namespace, contents.digest.in_([each for each in digests if each not in into.nodes])
    )
    for digest, content in (await connection.execute(read)).all():
        into.values[digest] = content


async def fork_of(connection: AsyncConnection, namespace: str, task: str) -> Fork | None:
    """Return the origin of a fork; None if the task is not a fork."""
    forks = tables.FORKS.c
    read = select(forks.fork_of_task, forks.fork_of_step).where(forks.namespace == namespace, forks.task == task)
    found = (await connection.execute(read)).one_or_none()
    return Fork(found.fork_of_task, found.fork_of_step) if found is not None else None


async def inherited_by(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    """Return the steps before a fork, in order; for a fork of a fork, those of all origins."""
    inherited: list[Step] = []
    origin: Fork | None = fork
    seen: set[str] = set()
    while origin is not None and origin.step and origin.task not in seen:
        seen.add(origin.task)
        inherited += await _steps_before(connection, namespace, origin)
        further = await fork_of(connection, namespace, origin.task)
        # Of the steps that the origin has inherited, count only those before this fork.
        if further is not None and place("r", origin.step) < place("r", further.step):
            further = Fork(further.task, origin.step)
        origin = further
    inherited.sort(key=in_order)
    return inherited


async def _steps_before(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    steps = tables.STEPS.c
    read = (
        select(tables.STEPS)
        .where(steps.namespace == namespace, steps.task == fork.task)
        .order_by(steps.place, steps.ended, steps.attempt)
    )
    rows = [row for row in (await connection.execute(read)).all() if before(row.run, row.step, fork.step)]
    contents = await contents_of(connection, namespace, rows)
    return [step_of(row, contents) for row in rows]
