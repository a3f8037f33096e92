"""All blob stores keep the same promises, and references read their blobs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from runtime_core.engines.results import Results
from runtime_core.settings import Settings
from runtime_core.state_manager.keeper import BlobSweeper
from runtime_core.wire.blobs import ArrowBlobs, BlobStore, FileBlobs, blob_url, folder_of, open_blobs
from weft.engines import Reference
from weft.errors import ConfigurationError, InvalidInput

NAME = "0" * 64 + ".json"
OTHER = "1" * 64 + ".json"
TABLE = "2" * 32 + ".parquet"
WAIT = 60.0
"""Patience of a test, which decides nothing."""

Open = Callable[[str], BlobStore]


@pytest.fixture(params=[FileBlobs, ArrowBlobs])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    opened: Open = request.param
    return opened((tmp_path / "blobs").as_uri())


def put_table(blobs: BlobStore, folder: str, tmp_path: Path) -> str:
    path = tmp_path / "blobs" / folder / TABLE
    path.mkdir(parents=True)
    for part in (0, 1):
        table = pyarrow.table({"number": [part], "name": [f"ü{part}"]})
        pyarrow.parquet.write_table(table, path / f"part-{part}.parquet")
    return f"{blobs.url}/{folder}/{TABLE}"


def age(path: Path) -> None:
    """Make it and everything in it a day old."""
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - 86_400,) * 2)


def test_a_written_blob_is_read_back(blobs: BlobStore) -> None:
    folder = folder_of("weft", "a@b+c=1.2_3-4")
    url = blobs.write(folder, NAME, b"[1]")
    assert url == f"{blobs.url}/weft/a@b+c=1.2_3-4/{NAME}"
    assert blobs.write(folder, NAME, b"[1]") == url
    assert blobs.read(url) == b"[1]"
    for read in (blobs.read, blobs.read_table):
        with pytest.raises(FileNotFoundError):
            read(f"{blobs.url}/weft/t/{OTHER}")


def test_the_blobs_of_a_task_are_erased_and_no_others(blobs: BlobStore, tmp_path: Path) -> None:
    kept = blobs.write("weft/t-10", NAME, b"1")
    blobs.write("weft/t-1", NAME, b"1")
    blobs.write("weft/t-1", OTHER, b"1")
    put_table(blobs, "weft/t-1", tmp_path)
    assert blobs.erase("weft/t-1") == 3
    assert blobs.erase("weft/t-1") == 0
    assert blobs.read(kept) == b"1"
    assert not (tmp_path / "blobs" / "weft" / "t-1").exists()


def test_a_sweep_erases_what_is_old_and_only_blobs_of_its_namespace(blobs: BlobStore, tmp_path: Path) -> None:
    blobs.write("weft/old", NAME, b"1")
    put_table(blobs, "weft/table", tmp_path)
    blobs.write("other/old", NAME, b"1")
    root = tmp_path / "blobs"
    (root / "weft" / "old" / "notes.json").write_text("of somebody else")
    for path in list(root.iterdir()):
        age(path)
    blobs.write("weft/new", OTHER, b"1")
    assert blobs.sweep("weft", time.time() - 3600) == 2
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {f"weft/new/{OTHER}", f"other/old/{NAME}", "weft/old/notes.json"}
    assert blobs.sweep("nobody", time.time()) == 0


def test_a_repeated_write_resets_the_age_of_a_blob(blobs: BlobStore, tmp_path: Path) -> None:
    url = blobs.write("weft/t", NAME, b"1")
    age(tmp_path / "blobs")
    blobs.write("weft/t", NAME, b"1")
    assert blobs.sweep("weft", time.time() - 3600) == 0
    assert blobs.read(url) == b"1"


def test_nothing_outside_the_store_is_touched(blobs: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "blobs").mkdir(exist_ok=True)
    for url in ((tmp_path / "secret").as_uri(), f"{blobs.url}/../secret", f"{blobs.url}/a/%2e%2e/%2e%2e/secret"):
        for read in (blobs.read, blobs.read_table):
            with pytest.raises(InvalidInput, match="is outside the blob store"):
                read(url)
    with pytest.raises(InvalidInput):
        blobs.erase("..")
    assert (tmp_path / "secret").exists()


@pytest.mark.parametrize(
    "inner", [".\t./secret", ".\n./secret", "\r../secret", "%09/x", "weft/t/x?y", "weft/t/x#y", "\0"]
)
def test_a_url_that_is_read_as_another_path_is_refused(blobs: BlobStore, tmp_path: Path, inner: str) -> None:
    """`urlsplit` drops tabs and line breaks: without a check, `.<tab>.` would lead out of the store."""
    (tmp_path / "secret").write_text("s")
    (tmp_path / "blobs").mkdir(exist_ok=True)
    for read in (blobs.read, blobs.read_table):
        with pytest.raises(InvalidInput, match="is outside the blob store"):
            read(f"{blobs.url}/{inner}")


def test_many_writers_of_the_same_blob_leave_it_whole(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path.as_uri())
    data = b"x" * 1_000_000
    seen: list[bytes] = []

    def write() -> None:
        seen.extend([blobs.read(blobs.write("weft/t", NAME, data)) for _ in range(5)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert seen == [data] * 20
    assert [path.name for path in (tmp_path / "weft" / "t").iterdir()] == [NAME]


def test_files_of_a_dead_writer_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "weft" / "t"
    folder.mkdir(parents=True)
    (folder / ".0123.part").write_text("half")
    age(tmp_path / "weft")
    assert FileBlobs(tmp_path.as_uri()).sweep("weft", time.time() - 3600) == 0
    assert not folder.exists()


def test_a_table_is_read_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.apps.remote_app import app

    blobs = open_blobs((tmp_path / "blobs").as_uri())
    reference = Reference(put_table(blobs, "weft/t", tmp_path), 1000, "parquet", rows=2)
    monkeypatch.setenv("WEFT_BLOB_URL", blobs.url)
    table = reference.load()
    assert table.num_rows == 2
    assert sorted(table.column("name").to_pylist()) == ["ü0", "ü1"]
    with pytest.raises(InvalidInput, match=r"is a folder of Parquet files: use load\(\)"):
        reference.read()
    # An argument that is no Reference gets the rows.
    arguments = json.dumps({"value": reference.to_value()}).encode()
    rows = app.engine_functions["echo"].bound(arguments)()
    assert sorted(rows, key=str) == [{"number": 0, "name": "ü0"}, {"number": 1, "name": "ü1"}]  # type: ignore[call-overload]  # a list


def test_a_reference_is_a_type_of_arguments_and_a_value_of_json() -> None:
    from tests.apps.remote_app import app

    entry = app.engine_functions["place"].entry()
    assert entry.arguments is not None
    assert entry.arguments["required"] == ["where"]
    with pytest.raises(InvalidInput, match=r"^arguments\.where: .*not a reference to a result"):
        app.engine_functions["place"].arguments.decode(b'{"where": {"url": "file:///x"}}')
    reference = Reference("file:///x", 3, digest="sha256:0")
    assert Reference.from_value(json.loads(json.dumps(reference.to_value()))) == reference
    others: list[object] = [{}, {"weft.reference": 1, "bytes": 2}, {"weft.reference": "file:///x"}, [], None]
    for other in others:
        assert Reference.from_value(other) is None


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, ""),
        ({"WEFT_DATA_DIR": "/srv/a b"}, "file:///srv/a%20b/blobs"),
        ({"WEFT_BLOB_URL": "file:///srv/blobs/", "WEFT_DATA_DIR": "/x"}, "file:///srv/blobs"),
        ({"WEFT_BLOB_URL": "s3://bucket/x/"}, "s3://bucket/x"),
    ],
)
def test_the_store_is_at_the_configured_url(environ: dict[str, str], url: str) -> None:
    assert blob_url(environ) == url
    assert Settings.from_environment(environ).blob_url == (url or None)
    assert Results.from_environment(environ).blob_url == url


@pytest.mark.parametrize("url", ["/srv/blobs", "file://host/x", "s3://", "file:///a/../b", "s3://b/x?y=1", "x"])
def test_an_invalid_url_of_a_store_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^WEFT_BLOB_URL=.*: must be file:///folder or a URL such as s3://bucket/folder"
    ):
        Settings.from_environment({"WEFT_BLOB_URL": url})


def test_a_place_that_pyarrow_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^WEFT_BLOB_URL='mars://x/y': pyarrow cannot open it"):
        open_blobs("mars://x/y")


def test_a_table_without_a_store_names_the_missing_store() -> None:
    with pytest.raises(InvalidInput, match="there is no blob store: set WEFT_BLOB_URL"):
        Results().table_url("t")
    assert Results("file:///b").table_url("t").startswith("file:///b/weft/t/")


async def test_the_sweeper_continues_after_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.from_environment({"WEFT_BLOB_URL": tmp_path.as_uri(), "WEFT_BLOB_RETENTION_SECONDS": "3600"})
    sweeper = BlobSweeper(settings, interval_seconds=0.01)
    tries: list[int] = []
    sweep = sweeper.sweep

    def first_fails() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("the disk is away")
        return sweep()

    monkeypatch.setattr(sweeper, "sweep", first_fails)
    FileBlobs(tmp_path.as_uri()).write("weft/t", NAME, b"1")
    age(tmp_path / "weft")
    with caplog.at_level(logging.WARNING):
        running = asyncio.create_task(sweeper.run())
        async with asyncio.timeout(WAIT):
            while (tmp_path / "weft" / "t").exists():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait((running,))
    assert "cannot sweep the blob store" in caplog.text
    assert "the disk is away" in caplog.text
