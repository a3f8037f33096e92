"""Blob stores: what one does, how one is opened, and blobs as plain files."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runtime_core.blobs.urls import BLOB_NAME, BLOB_URL, local_path, path_below
from runtime_core.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow


class BlobStore(Protocol):
    """Blobs under one URL, as `<url>/<namespace>/<task>/<name>`. Its methods block; errors of the place are OSError."""

    url: str

    def write(self, folder: str, name: str, data: bytes) -> str:
        """Store `data`, whole or not at all, and return its URL. One that is there already stays as it is."""
        ...

    def read(self, url: str) -> bytes:
        """The bytes of a blob. FileNotFoundError where it is gone."""
        ...

    def read_table(self, url: str) -> pyarrow.Table:
        """A Parquet file, or a folder of such files. FileNotFoundError where it is gone."""
        ...

    def erase(self, folder: str) -> int:
        """Erase all blobs of a folder `<namespace>/<task>`; how many there were."""
        ...

    def sweep(self, namespace: str, before: float) -> int:
        """Erase the namespace's blobs that were written before that moment (epoch seconds); how many there were."""
        ...


class FileBlobs:
    """A folder of blobs, by its `file:///` URL: on this machine, or shared by all."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = local_path(url)

    def write(self, folder: str, name: str, data: bytes) -> str:
        url = f"{self.url}/{folder}/{name}"
        path = self._path(url)
        if path.exists():
            # Named by its content: only its age changes, since it is wanted again.
            os.utime(path)
            return url
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return url

    def read(self, url: str) -> bytes:
        return self._path(url).read_bytes()

    def read_table(self, url: str) -> pyarrow.Table:
        path = self._path(url)
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigurationError(
                "a Parquet result is read with pyarrow, which is not installed: pip install 'weft[parquet]'"
            ) from error
        return pyarrow.parquet.read_table(path)

    def erase(self, folder: str) -> int:
        path = self._path(f"{self.url}/{folder}")
        count = sum(1 for _ in _blobs(path))
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
        return count

    def sweep(self, namespace: str, before: float) -> int:
        count = 0
        root = self._path(f"{self.url}/{namespace}")
        for folder in _entries(root):
            # Looked at first, since a removal makes it young; a young one may be about to get a blob.
            old = _written(folder) < before
            for blob in _entries(folder):
                leftover = blob.name.startswith(".") and blob.name.endswith(".part")
                if (leftover or BLOB_NAME.fullmatch(blob.name)) and _written(blob) < before:
                    _remove(blob)
                    count += not leftover
            if old:
                with suppress(OSError):  # not empty
                    folder.rmdir()
        return count

    def _path(self, url: str) -> Path:
        path_below(self.url, url)
        return local_path(url)


def open_blobs(url: str) -> BlobStore:
    """The store at a URL. Raises ConfigurationError where it cannot be used; nothing is asked of the place yet."""
    if url.startswith("file:"):
        return FileBlobs(url)
    try:
        from runtime_core.blobs.arrow import ArrowBlobs
    except ImportError as error:
        raise ConfigurationError(
            f"{BLOB_URL}={url!r}: needs pyarrow, which is not installed: pip install 'weft[parquet]', or use file:///…"
        ) from error
    return ArrowBlobs(url)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _blobs(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if BLOB_NAME.fullmatch(path.name)]


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
