"""Opens the databases: parses the URL, creates folder and tables, migrates older tables, translates errors."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, func, insert, select, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from runtime_core.errors import ConfigurationError, StoreUnavailable
from runtime_core.trajectory import tables

if TYPE_CHECKING:
    import asyncpg

BUSY_TIMEOUT_SECONDS = 10.0
"""How long a statement waits for another process's transaction."""
_REMEDY = "set WEFT_TRAJECTORY_URL to sqlite:///path or postgresql://<user>:<password>@host/database"
_PREPARE_LOCK = 0x77656674
"""The advisory lock that PostgreSQL's tables are created under; any constant will do."""
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
                elif version != tables.FORMAT:
                    for statement in tables.migration_statements(version):
                        await connection.execute(text(statement))
                    await connection.execute(insert(tables.FORMATS).values(version=tables.FORMAT))
                for table in tables.METADATA.sorted_tables:
                    for index in table.indexes:  # those of an older table, too
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
        elif version != tables.FORMAT:
            for statement in tables.migration_statements(version):
                connection.execute(statement)
            connection.execute("INSERT INTO weft_format VALUES (?)", (tables.FORMAT,))
        for table in tables.METADATA.sorted_tables:
            for index in table.indexes:  # those of an older table, too
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
