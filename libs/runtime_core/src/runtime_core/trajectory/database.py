"""The databases below the store: opens them with their tables, and translates their errors.

Also the queries for what steps refer to: contents, lists of messages, and the steps that a fork inherits.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, event, func, insert, select, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from runtime_core.errors import ConfigurationError, StoreUnavailable
from runtime_core.trajectory import tables
from runtime_core.trajectory.reading import in_order
from runtime_core.trajectory.tables import step_of
from runtime_core.wire.contents import REFERENCES, Contents, Node
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import Fork, Step, before, place

if TYPE_CHECKING:
    import asyncpg

BUSY_TIMEOUT_SECONDS = 10.0
"""How long a statement waits for another process's transaction."""
_REMEDY = "set WEFT_TRAJECTORY_URL to sqlite:///path or postgresql://<user>:<password>@host/database"
_PREPARE_LOCK = 0x77656674
"""The advisory lock that PostgreSQL's tables are created under; any constant will do."""
_AT_ONCE = 400
"""Digests per query: some builds of SQLite take at most 999 parameters."""
_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0


@contextmanager
def translated(consequence: str) -> Iterator[None]:
    """Translate errors of a database or its connection into StoreUnavailable: cause, then consequence."""
    try:
        yield
    except DBAPIError as error:
        raise StoreUnavailable(f"{_line(error.orig or error)}: {consequence}") from error
    except (SQLAlchemyError, InterfaceError, OSError) as error:
        raise StoreUnavailable(f"{_line(error)}: {consequence}") from error


def _line(error: BaseException) -> str:
    # Drivers append the statement and its parameters on further lines, which may hold users' data.
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class SqliteAddress:
    """A file; opening the store creates its folder."""

    path: Path


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A database as a libpq URL; its query may hold `sslmode`, `host` and other parameters."""

    dsn: str


def parse(url: str) -> SqliteAddress | PostgresAddress:
    """Parse a trajectory URL. Raises ConfigurationError, without the password, if it names neither database."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"the trajectory URL cannot be read: {_REMEDY}") from None
    match parsed.get_backend_name():
        case "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise ConfigurationError(f"the trajectory URL names no file: {_REMEDY}")
            return SqliteAddress(Path(parsed.database))
        case "postgresql" | "postgres":
            plain = parsed.set(drivername="postgresql")
            return PostgresAddress(plain.render_as_string(hide_password=False))
        case other:
            raise ConfigurationError(f"the trajectory URL names {other!r}, which is not supported: {_REMEDY}")


async def open_sqlite(address: SqliteAddress) -> AsyncEngine:
    """Create the file with its folder and tables. Return an engine for reads and deletes."""
    try:
        await asyncio.to_thread(_prepare_sqlite, address.path)
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreUnavailable(
            f"the trajectory file {str(address.path)!r} cannot be opened: {error}; check the permissions of its folder,"
            " or name another file in WEFT_TRAJECTORY_URL"
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(
            f"{str(address.path)!r} is not a trajectory file: {error}; name another file in WEFT_TRAJECTORY_URL"
        ) from error
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(address.path)),
        connect_args={"timeout": BUSY_TIMEOUT_SECONDS},
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "connect", _erase_what_is_deleted)
    return engine


async def open_postgres(address: PostgresAddress) -> AsyncEngine:
    """Create the tables. Return an engine for reads and writes."""
    try:
        import asyncpg
    except ImportError:
        raise ConfigurationError(
            "the trajectory URL names PostgreSQL, whose driver is not installed: pip install 'weft[postgres]'"
        ) from None

    async def connect(**_: object) -> asyncpg.Connection:
        # The driver parses the URL, so that all of libpq's parameters work.
        try:
            return await asyncpg.connect(address.dsn, timeout=_CONNECT_SECONDS, command_timeout=_COMMAND_SECONDS)
        except (
            asyncpg.InvalidAuthorizationSpecificationError,
            asyncpg.InvalidCatalogNameError,
            asyncpg.InterfaceError,
            ValueError,
        ) as error:
            raise ConfigurationError(f"PostgreSQL cannot be opened: {error}; correct WEFT_TRAJECTORY_URL") from error
        except (OSError, TimeoutError, asyncpg.PostgresError) as error:
            raise StoreUnavailable(
                f"PostgreSQL cannot be reached: {str(error) or 'timed out'};"
                " check WEFT_TRAJECTORY_URL and that the server runs"
            ) from error

    # Parameters hold users' data, which must not appear in errors or logs.
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=connect, pool_pre_ping=True, hide_parameters=True
    )
    try:
        with translated("the tables were not created"):
            async with engine.begin() as connection:
                # Without this lock, concurrent CREATE TABLE IF NOT EXISTS fails in PostgreSQL.
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _PREPARE_LOCK})
                for table in tables.METADATA.sorted_tables:
                    await connection.execute(CreateTable(table, if_not_exists=True))
                version = (await connection.execute(select(func.max(tables.FORMATS.c.version)))).scalar()
                if version is None:
                    await connection.execute(insert(tables.FORMATS).values(version=tables.FORMAT))
                else:
                    tables.check_format(version)
                for table in tables.METADATA.sorted_tables:
                    for index in table.indexes:
                        await connection.execute(CreateIndex(index, if_not_exists=True))
    except BaseException:
        await engine.dispose()
        raise
    return engine


def _prepare_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)) as connection:
        _write_ahead(connection)
        connection.execute("BEGIN IMMEDIATE")
        dialect = sqlite.dialect()
        for table in tables.METADATA.sorted_tables:
            connection.execute(str(CreateTable(table, if_not_exists=True).compile(dialect=dialect)))
        (version,) = connection.execute("SELECT max(version) FROM weft_format").fetchone()
        if version is None:
            connection.execute("INSERT INTO weft_format VALUES (?)", (tables.FORMAT,))
        else:
            tables.check_format(version)
        for table in tables.METADATA.sorted_tables:
            for index in table.indexes:
                connection.execute(str(CreateIndex(index, if_not_exists=True).compile(dialect=dialect)))
        connection.execute("COMMIT")


def _write_ahead(connection: sqlite3.Connection) -> None:
    # Retry: if two processes switch a new file at once, SQLite skips the busy timeout, to avoid a deadlock.
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# Any: the driver's connection behind SQLAlchemy's event has no public type.
def _erase_what_is_deleted(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


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
        if further is not None and place(ROOT_RUN, origin.step) < place(ROOT_RUN, further.step):
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
