"""Reads what steps refer to: contents, and lists of messages with all that comes before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from runtime_core.trajectory import tables
from runtime_core.trajectory.contents import REFERENCES, Contents, Node

_AT_ONCE = 400
"""Digests per query: SQLite takes no more than 999 parameters in some builds."""


# The columns of a row are read by name.
async def contents_of(connection: AsyncConnection, namespace: str, rows: Sequence[Row[Any]]) -> Contents:
    """Return all that these rows of the table of steps refer to."""
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
    """Yield digests in as many as one query may ask for."""
    every = list(digests)
    return (every[first : first + _AT_ONCE] for first in range(0, len(every), _AT_ONCE))


async def chains(
    connection: AsyncConnection, namespace: str, heads: Sequence[bytes]
) -> list[tuple[bytes, bytes | None, bytes, str]]:
    """Return (digest, parent, message, content) of these lists' nodes and all that come before them, each once."""
    lists, contents = tables.LISTS, tables.CONTENTS
    chain = (
        select(lists.c.digest, lists.c.parent, lists.c.message)
        .where(lists.c.namespace == namespace, lists.c.digest.in_(heads))
        .cte("chain", recursive=True)
    )
    before = select(lists.c.digest, lists.c.parent, lists.c.message).join(
        chain, (lists.c.digest == chain.c.parent) & (lists.c.namespace == namespace)
    )
    # Without ALL: a node that several lists share is followed once.
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
