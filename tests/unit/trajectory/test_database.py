"""Valid and invalid trajectory URLs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime_core.errors import ConfigurationError, StoreUnavailable
from runtime_core.trajectory.database import PostgresAddress, SqliteAddress, parse
from runtime_core.trajectory.store import TrajectoryStore


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///data/t.db", "data/t.db"),
        ("sqlite:////var/lib/weft/t.db", "/var/lib/weft/t.db"),
        ("sqlite+aiosqlite:///t.db", "t.db"),
        ("sqlite:////with a space/t.db", "/with a space/t.db"),
    ],
)
def test_a_sqlite_url_names_a_file(url: str, path: str) -> None:
    assert parse(url) == SqliteAddress(Path(path))


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_a_postgresql_url_reaches_the_driver_as_it_is(scheme: str) -> None:
    address = parse(f"{scheme}://user:p%40ss@host:5433/db?sslmode=require")
    assert address == PostgresAddress("postgresql://user:p%40ss@host:5433/db?sslmode=require")


@pytest.mark.parametrize(
    "url", ["", "t.db", "sqlite://", "sqlite:///:memory:", "mysql://u:a-secret@h/d", "postgresql//u:a-secret@h/d"]
)
def test_another_url_is_refused_with_the_remedy_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="WEFT_TRAJECTORY_URL") as refused:
        parse(url)
    assert "a-secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 100)
    with pytest.raises(ConfigurationError, match=r"letter\.txt"):
        await TrajectoryStore.open(f"sqlite:///{path}")
    assert path.read_text().startswith("Dear reader")


async def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await TrajectoryStore.open(f"sqlite:///{tmp_path}/file/t.db")


@pytest.mark.parametrize(
    ("driver", "extra", "call"),
    [
        ("asyncpg", "weft[postgres]", "TrajectoryStore.open('postgresql://localhost/d')"),
        ("pyarrow", "weft[parquet]", "export_parquet(None, 'weft', 'out.parquet')"),
    ],
)
def test_a_missing_driver_is_answered_with_the_extra_that_has_it(driver: str, extra: str, call: str) -> None:
    program = (
        f"import sys, asyncio; sys.modules[{driver!r}] = None\n"
        "from runtime_core.trajectory.store import TrajectoryStore\n"
        "from runtime_core.trajectory.export import export_parquet\n"
        f"asyncio.run({call})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ConfigurationError" in ended.stderr
    assert extra in ended.stderr
