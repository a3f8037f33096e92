"""Folders for recorded tasks, and empty databases for the trajectory store, in SQLite and in PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from runtime_core.trajectory.store import TrajectoryStore
from tests.conftest import missing
from tests.integration.trajectory.stores import Database
from tests.servers.postgres import postgres
from tests.servers.unavailable import Unavailable


@pytest.fixture
def data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which tasks of this process are recorded."""
    folder = tmp_path / "weft-data"
    monkeypatch.setenv("WEFT_DATA_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    try:
        with postgres() as url:
            yield url
    except Unavailable as reason:
        missing("postgresql", reason)


@pytest.fixture
def sqlite_database(tmp_path: Path) -> Database:
    path = tmp_path / "a folder" / "trajectory.db"
    return Database(f"sqlite:///{path}", path)


@pytest.fixture
async def postgres_database(postgres_url: str) -> AsyncIterator[Database]:
    name = f"test_{secrets.token_hex(4)}"
    server = Database(postgres_url)
    await server.execute(f"CREATE DATABASE {name}")
    yield Database(postgres_url.replace("/postgres?", f"/{name}?"))
    await server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Database:
    found = request.getfixturevalue(f"{request.param}_database")
    assert isinstance(found, Database)
    return found


@pytest.fixture
async def store(database: Database) -> AsyncIterator[TrajectoryStore]:
    opened = await TrajectoryStore.open(database.url)
    yield opened
    await opened.close()
