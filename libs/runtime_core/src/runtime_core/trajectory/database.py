"""Opens the databases: reads the URL, makes folder and tables, brings older ones up to date."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, func, insert, select, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from runtime_core.errors import ConfigurationError, StoreUnavailable
from runtime_core.trajectory import migrations, tables
from runtime_core.trajectory.failures import translated
from runtime_core.trajectory.writers import BUSY_TIMEOUT_SECONDS

if TYPE_CHECKING:
    import asyncpg


_REMEDY = "set WEFT_TRAJECTORY_URL to sqlite:///path or postgresql://<user>:<password>@host/database"


@dataclass(frozen=True, slots=True)
class SqliteAddress:
    """A file; its folder is made when the store is opened."""

    path: Path


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A database, as a libpq URL: `sslmode`, `host` and the like may stand in its query."""

    dsn: str


def parse(url: str) -> SqliteAddress | PostgresAddress:
    """Read a trajectory URL. ConfigurationError, without the URL's password, where it names neither."""
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


_PREPARE_LOCK = 0x77656674
"""Number of the advisory lock under which PostgreSQL's tables are made; any constant will do."""
_CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0


async def open_sqlite(address: SqliteAddress) -> AsyncEngine:
    """Make the file with its folder and tables; return an engine for reads and deletes."""
    try:
        await asyncio.to_thread(_prepare_sqlite, address.path)
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreUnavailable(
            f"the trajectory file {str(address.path)!r} cannot be opened: {error}; check its folder's rights, or name"
            " another in WEFT_TRAJECTORY_URL"
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(
            f"{str(address.path)!r} is not a trajectory file: {error}; name another in WEFT_TRAJECTORY_URL"
        ) from error
    engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(address.path)),
        connect_args={"timeout": BUSY_TIMEOUT_SECONDS},
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "connect", _erase_what_is_deleted)
    return engine


async def open_postgres(address: PostgresAddress) -> AsyncEngine:
    """Make the tables; return an engine for reads and writes."""
    try:
        import asyncpg
    except ImportError:
        raise ConfigurationError(
            "the trajectory URL names PostgreSQL, whose driver is missing: install weft[postgres]"
        ) from None

    async def connect(**_: object) -> asyncpg.Connection:
        # The driver reads the URL itself, so that whatever libpq takes works here too.
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
                " check WEFT_TRAJECTORY_URL, and that it runs"
            ) from error

    # Parameters hold users' data, which has no place in an error or a log.
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=connect, pool_pre_ping=True, hide_parameters=True
    )
    try:
        with translated("the tables were not made"):
            async with engine.begin() as connection:
                # CREATE TABLE IF NOT EXISTS of two sessions at once fails in PostgreSQL without this.
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _PREPARE_LOCK})
                await connection.run_sync(tables.METADATA.create_all)
                version = (await connection.execute(select(func.max(tables.FORMATS.c.version)))).scalar()
                if version is None:
                    await connection.execute(insert(tables.FORMATS).values(version=tables.FORMAT))
                elif version != tables.FORMAT:
                    for statement in migrations.statements(version):
                        await connection.execute(text(statement))
                    await connection.execute(insert(tables.FORMATS).values(version=tables.FORMAT))
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
            for index in table.indexes:
                connection.execute(str(CreateIndex(index, if_not_exists=True).compile(dialect=dialect)))
        (version,) = connection.execute("SELECT max(version) FROM weft_format").fetchone()
        if version is None:
            connection.execute("INSERT INTO weft_format VALUES (?)", (tables.FORMAT,))
        elif version != tables.FORMAT:
            for statement in migrations.statements(version):
                connection.execute(statement)
            connection.execute("INSERT INTO weft_format VALUES (?)", (tables.FORMAT,))
        connection.execute("COMMIT")


def _write_ahead(connection: sqlite3.Connection) -> None:
    # Two processes that switch a new file at the same moment do not wait for each other: SQLite skips the
    # busy timeout where waiting could be a deadlock.
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# The driver's connection has no public type behind SQLAlchemy's event.
def _erase_what_is_deleted(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA secure_delete = ON")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()
