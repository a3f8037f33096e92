"""Tables that jobs return: small ones as rows, larger ones as Parquet in the blob store."""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from runtime_core.blobs.urls import local_path
from runtime_core.declare.schema import encode
from runtime_core.engines.results import Reference, Results
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.connect.session import SparkSession

MAX_ROWS = 10_000
"""The most rows that are returned as a value; larger tables become Parquet."""


class Table(Protocol):
    """A table that a job returned, from any library."""

    def rows(self, limit: int) -> list[dict[str, Any]] | None:
        """Return the rows; None if there are more than MAX_ROWS or they are far larger than `limit` bytes."""
        ...

    def write(self, url: str) -> tuple[int, int]:
        """Write the table as Parquet to a new folder. Return the number of rows and of bytes written."""
        ...


def table_of(value: object, session: SparkSession) -> Table | None:
    """Return a job's result as a table; None if it is not one. Raises InvalidInput(`result`)."""
    import pandas
    import pyarrow
    from pyspark.sql import DataFrame

    if isinstance(value, DataFrame):
        return SparkTable(value, session)
    if isinstance(value, pandas.DataFrame):
        value = pyarrow.Table.from_pandas(value, preserve_index=False)
    if isinstance(value, pyarrow.Table):
        return ArrowTable(value)
    return None


def kept(table: Table, results: Results, task: str) -> bytes:
    """Return a table as JSON: an array of objects, or a Reference to Parquet if it is large.

    Raises InvalidInput (`result`; ResultTooLarge if there is no blob store).
    """
    rows = table.rows(results.limit)
    if rows is not None:
        data = encode(rows, "result", limit=sys.maxsize)
        if len(data) <= results.limit:
            return data
    url = results.table_url(task)
    count, size = table.write(url)
    return msgspec.json.encode(Reference(url, size, "parquet", rows=count))


class SparkTable:
    """A Spark DataFrame: computed when it is read, and again when it is written."""

    def __init__(self, frame: Any, session: SparkSession) -> None:  # Any: PySpark's, here and where types are unknown
        if frame.isStreaming:
            raise InvalidInput(
                "result", "is a streaming DataFrame: write its stream somewhere, or return a batch of it"
            )
        _check_names(frame.columns)
        self._frame = frame
        self._session = session

    def rows(self, limit: int) -> list[dict[str, Any]] | None:
        client = self._session.client
        plan = self._frame.limit(MAX_ROWS + 1)._plan.to_proto(client)
        parts: list[pyarrow.Table] = []
        # Batch by batch: rows may have any size.
        for part in client.to_table_as_iterator(plan, {}):
            if hasattr(part, "num_rows"):
                parts.append(part)
                if _too_large(parts, limit):
                    return None
        return _rows(parts)

    def write(self, url: str) -> tuple[int, int]:
        there = _url_for_spark(url)
        self._frame.write.parquet(there)
        read = self._session.read
        [[size]] = read.format("binaryFile").load(f"{there}/*.parquet").selectExpr("sum(length)").collect()
        if url.startswith("file:") and not local_path(url).exists():
            raise InvalidInput(
                "result",
                f"was written by the Spark server to its own {url}, which is not seen here: set WEFT_BLOB_URL to a "
                "folder that both share, or as s3://bucket",
            )
        return self._session.read.parquet(there).count(), size or 0


class ArrowTable:
    """A table in this process's memory."""

    def __init__(self, table: pyarrow.Table) -> None:
        _check_names(table.column_names)
        self._table = table

    def rows(self, limit: int) -> list[dict[str, Any]] | None:
        return None if _too_large([self._table], limit) else _rows([self._table])

    def write(self, url: str) -> tuple[int, int]:
        import pyarrow.fs
        import pyarrow.parquet

        files, folder = pyarrow.fs.FileSystem.from_uri(url)
        files.create_dir(folder, recursive=True)
        path = f"{folder}/part-{uuid.uuid4().hex}.parquet"
        pyarrow.parquet.write_table(self._table, path, filesystem=files)
        return self._table.num_rows, files.get_file_info(path).size


def _check_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput("result", f"has two columns named {name!r}: rename one with alias()")


def _too_large(parts: list[pyarrow.Table], limit: int) -> bool:
    # Numbers in JSON may take half the size of Arrow's columns, and hardly less.
    rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
    return bool(rows > MAX_ROWS or size > 4 * limit)


def _rows(parts: list[pyarrow.Table]) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for part in parts for row in _dicts(part)]


def _dicts(part: pyarrow.Table) -> Iterator[dict[str, Any]]:
    yield from part.to_pylist(maps_as_pydicts="strict")


def _plain(value: object) -> object:
    if isinstance(value, float) and math.isnan(value):
        # pandas marks missing values with NaN, which JSON does not have.
        return None
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value


def _url_for_spark(url: str) -> str:
    # Hadoop's name for the same location.
    return f"s3a://{url.removeprefix('s3://')}" if url.startswith("s3://") else url
