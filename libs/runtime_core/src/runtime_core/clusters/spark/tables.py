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
"""More are never a value."""


class Table(Protocol):
    """What a job has returned, whatever library it is of."""

    def rows(self, limit: int) -> list[dict[str, Any]] | None:
        """Its rows; None where they are more than MAX_ROWS, or of more than `limit` bytes."""
        ...

    def write(self, url: str) -> tuple[int, int]:
        """Write it as Parquet to a new folder; how many rows and bytes there are now."""
        ...


def table_of(value: object, session: SparkSession) -> Table | None:
    """What a job has returned as a table; None where it is none. Raises InvalidInput(`result`)."""
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
    """A table as it travels, in JSON: an array of objects, or a Reference to Parquet where it is large.

    Raises InvalidInput (`result`; ResultTooLarge where there is no blob store).
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
    """A DataFrame of Spark: computed when it is read, and again when it is written."""

    def __init__(self, frame: Any, session: SparkSession) -> None:  # Any: of PySpark, as wherever no types are known
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
        # Piece by piece: rows may be of any size.
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
    # Of numbers, JSON may be half the size of Arrow's columns, and hardly less.
    rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
    return bool(rows > MAX_ROWS or size > 4 * limit)


def _rows(parts: list[pyarrow.Table]) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for part in parts for row in _dicts(part)]


def _dicts(part: pyarrow.Table) -> Iterator[dict[str, Any]]:
    yield from part.to_pylist(maps_as_pydicts="strict")


def _plain(value: object) -> object:
    if isinstance(value, float) and math.isnan(value):
        # pandas writes so what is missing, and JSON knows no other number that is none.
        return None
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value


def _url_for_spark(url: str) -> str:
    # Hadoop's name of the same place.
    return f"s3a://{url.removeprefix('s3://')}" if url.startswith("s3://") else url
