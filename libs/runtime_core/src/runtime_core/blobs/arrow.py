"""Blobs in an object store, such as S3, through pyarrow's filesystems. Imports pyarrow: load it only when used."""

from __future__ import annotations

import pyarrow
import pyarrow.fs
import pyarrow.parquet

from runtime_core.blobs.urls import BLOB_NAME, BLOB_URL, path_below
from runtime_core.errors import ConfigurationError


class ArrowBlobs:
    """Blobs under a URL that pyarrow knows (`s3://`, `gs://`, `abfs://`, `hdfs://`).

    Keys and endpoints are read from the environment, as each place's own tools do.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for a URL that pyarrow cannot open."""
        self.url = url
        try:
            self._files, self._root = pyarrow.fs.FileSystem.from_uri(url)
        except (ValueError, NotImplementedError, OSError) as error:
            raise ConfigurationError(f"{BLOB_URL}={url!r}: pyarrow cannot open it: {error}") from error

    def write(self, folder: str, name: str, data: bytes) -> str:
        url = f"{self.url}/{folder}/{name}"
        path = self._path(url)
        self._files.create_dir(path.rpartition("/")[0], recursive=True)
        # An object store shows an object when it is closed, and not before; the same name holds the same content.
        with self._files.open_output_stream(path) as stream:
            stream.write(data)
        return url

    def read(self, url: str) -> bytes:
        with self._files.open_input_file(self._path(url)) as file:
            data: bytes = file.read()
        return data

    def read_table(self, url: str) -> pyarrow.Table:
        return pyarrow.parquet.read_table(self._path(url), filesystem=self._files)

    def erase(self, folder: str) -> int:
        path = self._path(f"{self.url}/{folder}")
        count = sum(1 for info in self._entries(path) if BLOB_NAME.fullmatch(info.base_name))
        if self._files.get_file_info(path).type != pyarrow.fs.FileType.NotFound:
            self._files.delete_dir(path)
        return count

    def sweep(self, namespace: str, before: float) -> int:
        count = 0
        for folder in self._entries(self._path(f"{self.url}/{namespace}")):
            for blob in self._entries(folder.path):
                if BLOB_NAME.fullmatch(blob.base_name) and self._written(blob) < before:
                    self._remove(blob)
                    count += 1
        return count

    def _written(self, blob: pyarrow.fs.FileInfo) -> float:
        """When it was written; of a folder, when the last of its files was."""
        infos = [blob] if blob.is_file else self._entries(blob.path)
        times = [info.mtime.timestamp() for info in infos if info.mtime is not None]
        return max(times, default=float("inf"))

    def _remove(self, blob: pyarrow.fs.FileInfo) -> None:
        if blob.is_file:
            self._files.delete_file(blob.path)
        else:
            self._files.delete_dir(blob.path)

    def _entries(self, path: str) -> list[pyarrow.fs.FileInfo]:
        found: list[pyarrow.fs.FileInfo] = self._files.get_file_info(
            pyarrow.fs.FileSelector(path, allow_not_found=True)
        )
        return found

    def _path(self, url: str) -> str:
        return f"{self._root}/{path_below(self.url, url)}"
