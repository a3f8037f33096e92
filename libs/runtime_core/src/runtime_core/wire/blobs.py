"""Blob stores: results that are too large for an event, by URL, in a folder for each task."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote, urlsplit

from runtime_core.errors import ConfigurationError, InvalidInput

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

BLOB_URL = "WEFT_BLOB_URL"
DATA_DIR = "WEFT_DATA_DIR"
URL = re.compile(r"file:///.+|(s3|gs|gcs|abfss?|hdfs|viewfs)://[^/?#]+.*")
# A sweep deletes nothing else, such as files of others in the same bucket.
BLOB_NAME = re.compile(r"[0-9a-f]{32,64}\.(json|parquet)")


def open_blobs(url: str) -> BlobStore:
    """Return the store at a URL, without connecting to it. Raises ConfigurationError if the URL cannot be used."""
    return FileBlobs(url) if url.startswith("file:") else ArrowBlobs(url)


def blob_url(environ: Mapping[str, str]) -> str:
    """Return the URL of the configured store without a final `/`, or an empty string if there is none.

    If only `WEFT_DATA_DIR` is set, it is the folder `blobs` there. Raises ConfigurationError for an invalid URL.
    """
    url = environ.get(BLOB_URL, "").strip()
    if url:
        return checked_url(url)
    directory = environ.get(DATA_DIR, "").strip()
    return (Path(os.path.abspath(Path(directory).expanduser())) / "blobs").as_uri() if directory else ""


def checked_url(url: str) -> str:
    """Return the URL of a store without a final `/`. Raises ConfigurationError if it is invalid."""
    if not URL.fullmatch(url) or "?" in url or "#" in url or ".." in unquote(url).split("/"):
        raise ConfigurationError(f"{BLOB_URL}={url!r}: must be file:///folder or a URL such as s3://bucket/folder")
    return url.rstrip("/")


def folder_of(namespace: str, task: str) -> str:
    """Return the folder of a task's blobs, below the store's URL."""
    return f"{folder_of_namespace(namespace)}/{quote(task, safe='@+=')}"


def folder_of_namespace(namespace: str) -> str:
    """Return the folder of a namespace's blobs, below the store's URL."""
    return quote(namespace, safe="")


def path_below(store: str, url: str) -> str:
    """Return the path of a blob below its store's URL, still quoted.

    Raises InvalidInput(`reference`) if it is elsewhere: the author of the URL may not be allowed to read all that this
    process can.
    """
    inner = url.removeprefix(store + "/")
    plain = unquote(inner)
    # `urlsplit` drops some control characters and ends a path at ? and #: a URL with one names another path there.
    unsafe = not plain.isprintable() or "?" in inner or "#" in inner
    if not store or inner == url or unsafe or any(part in ("", ".", "..") for part in plain.split("/")):
        where = f"outside the blob store {store}" if store else "in a blob store, but this process has none"
        raise InvalidInput("reference", f"{url!r} is {where}: set {BLOB_URL} to the store that holds it")
    return inner


def local_path(url: str) -> Path:
    """Return the path that a `file:` URL names."""
    return Path(unquote(urlsplit(url).path))


class BlobStore(Protocol):
    """Blobs under one URL, as `<url>/<namespace>/<task>/<name>`. Methods block, and raise OSError on errors."""

    url: str

    def write(self, folder: str, name: str, data: bytes) -> str:
        """Store `data` completely or not at all, and return its URL. An existing blob stays as it is."""
        ...

    def read(self, url: str) -> bytes:
        """Return the bytes of a blob. Raises FileNotFoundError if it is gone."""
        ...

    def read_table(self, url: str) -> pyarrow.Table:
        """Return a Parquet file, or a folder of them, as a table. Raises FileNotFoundError if it is gone."""
        ...

    def erase(self, folder: str) -> int:
        """Erase all blobs of a folder `<namespace>/<task>`, and return how many there were."""
        ...

    def sweep(self, namespace: str, before: float) -> int:
        """Erase the namespace's blobs written before `before` (epoch seconds), and return how many there were."""
        ...


class FileBlobs:
    """A folder of blobs at a `file:///` URL, on this machine or shared."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = local_path(url)

    def write(self, folder: str, name: str, data: bytes) -> str:
        url = f"{self.url}/{folder}/{name}"
        path = self._path(url)
        if path.exists():
            # The name derives from the content. Renew its age, since it is in use again.
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
            raise FileNotFoundError(f"{path} does not exist")
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigurationError(
                "reading a Parquet result needs pyarrow, which is not installed: pip install 'weft[parquet]'"
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
            # Check the folder's age first, since a removal renews it. A young folder may be about to get a blob.
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


class ArrowBlobs:
    """Blobs under a URL that pyarrow supports (`s3://`, `gs://`, `abfs://`, `hdfs://`).

    pyarrow reads credentials and endpoints from the environment, as the tools of each service do.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError without pyarrow, and for a URL that pyarrow cannot open."""
        try:
            import pyarrow.fs
        except ImportError as error:
            raise ConfigurationError(
                f"{BLOB_URL}={url!r}: needs pyarrow, which is not installed: pip install 'weft[parquet]',"
                " or use file:///…"
            ) from error
        self.url = url
        self._selector = pyarrow.fs.FileSelector
        try:
            self._files, self._root = pyarrow.fs.FileSystem.from_uri(url)
        except (ValueError, NotImplementedError, OSError) as error:
            raise ConfigurationError(f"{BLOB_URL}={url!r}: pyarrow cannot open it: {error}") from error

    def write(self, folder: str, name: str, data: bytes) -> str:
        url = f"{self.url}/{folder}/{name}"
        path = self._path(url)
        self._files.create_dir(path.rpartition("/")[0], recursive=True)
        # An object appears when it is closed, and never in parts. The same name holds the same content.
        with self._files.open_output_stream(path) as stream:
            stream.write(data)
        return url

    def read(self, url: str) -> bytes:
        with self._files.open_input_file(self._path(url)) as file:
            data: bytes = file.read()
        return data

    def read_table(self, url: str) -> pyarrow.Table:
        import pyarrow.parquet

        return pyarrow.parquet.read_table(self._path(url), filesystem=self._files)

    def erase(self, folder: str) -> int:
        path = self._path(f"{self.url}/{folder}")
        count = sum(1 for info in self._entries(path) if BLOB_NAME.fullmatch(info.base_name))
        if self._files.get_file_info(path).type.name != "NotFound":
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
        """Return when a blob was written, in epoch seconds; for a folder, its newest file."""
        infos = [blob] if blob.is_file else self._entries(blob.path)
        times = [info.mtime.timestamp() for info in infos if info.mtime is not None]
        return max(times, default=float("inf"))

    def _remove(self, blob: pyarrow.fs.FileInfo) -> None:
        if blob.is_file:
            self._files.delete_file(blob.path)
        else:
            self._files.delete_dir(blob.path)

    def _entries(self, path: str) -> list[pyarrow.fs.FileInfo]:
        found: list[pyarrow.fs.FileInfo] = self._files.get_file_info(self._selector(path, allow_not_found=True))
        return found

    def _path(self, url: str) -> str:
        return f"{self._root}/{path_below(self.url, url)}"
