"""Blobs as plain files of this machine, or of a folder that all machines share."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runtime_core.blobs.store import BLOB_NAME, local_path, path_below
from runtime_core.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow


class FileBlobs:
    """A folder of blobs, by its `file:///` URL."""

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
