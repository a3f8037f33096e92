"""What a trajectory URL names: a SQLite file or a PostgreSQL database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from runtime_core.errors import ConfigurationError

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
