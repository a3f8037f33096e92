"""Spark jobs, `def job(spark, **arguments)`: each in a thread of the driver with its own session. Tables they return.

A small table becomes rows; a larger one becomes Parquet in the blob store.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Error, Outcome, Registered, Report, Value, Work
from runtime_core.engines.remote import NotRunnable, declared, error_of, outcome_of
from runtime_core.engines.results import Reference, Results
from runtime_core.engines.spark.calls import InThread, Stopped, first_lines, in_thread, lost, over_limit, stop, tag_of
from runtime_core.engines.spark.connect import Paced, Sessions, is_lost, watch
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.spans import within
from runtime_core.wire.blobs import local_path

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.connect.session import SparkSession

logger = logging.getLogger(__name__)

MAX_ROWS = 10_000
"""The most rows that are returned as a value; larger tables become Parquet."""


class Jobs:
    """Runs jobs. Jobs do not see each other's views, settings and registered functions."""

    def __init__(self, sessions: Sessions, results: Results) -> None:
        self._sessions = sessions
        self._results = results
        self.abandoned = 0
        """The number of running threads whose jobs did not end when they were stopped."""

    async def run(self, work: Work, report: Report) -> Outcome:
        """Run a job and return its outcome. If cancelled, stop its operations on the server, then its code here."""
        if not isinstance(work.call, Registered):
            return Error("invalid", "InvalidInput", f"{work.name} is a Spark job, which has no map", retryable=False)
        try:
            session = await in_thread(functools.partial(self._sessions.of_job, work.key, work.step.attempt))
        except Exception as error:
            return lost(error)
        progress = _JobProgress(report)
        watch(session, progress.on_progress)
        thread = InThread(functools.partial(self._in_thread, work, session), f"spark job {work.name}")
        try:
            if work.timeout_seconds and not await thread.wait(work.timeout_seconds):
                await self._stop(thread, session, work)
                return over_limit(work.timeout_seconds)
            await thread.wait()
        except asyncio.CancelledError:
            await self._stop(thread, session, work)
            raise
        finally:
            # Always released: from now on, an abandoned job's requests to it fail.
            InThread(session.stop, "spark session")
        progress.end()
        return thread.done.result()

    def _in_thread(self, work: Work, session: SparkSession) -> Outcome:
        assert isinstance(work.call, Registered)
        # PySpark's own look-ups must find this job's session, too.
        type(session)._set_default_and_active_session(session)
        session.addTag(tag_of(work.key or work.name))
        try:
            function = declared(work.call.app, work.call.folder, work.call.name)
            body = function.bound(work.call.arguments, work.step, store=self._results.blob_url, session=session)
        except NotRunnable as refused:
            return refused.error
        except Exception as error:
            return _invalid(error)
        try:
            with within(work.step.traceparent):
                value = body()
        except BaseException as error:  # SystemExit too: it ends the job, not the driver
            return _ended_by(error)
        try:
            table = table_of(value, session)
            if table is None:
                return outcome_of(_without_rows(value), work.step, self._results)
            return Value(table_as_json(table, self._results, work.step.task))
        except (InvalidInput, ConfigurationError) as error:
            return _invalid(error)
        except BaseException as error:  # Spark does not compute a table before this
            return _ended_by(error)

    async def _stop(self, thread: InThread[Outcome], session: SparkSession, work: Work) -> None:
        if await stop(thread, session.interruptAll, code=True):
            return
        self.abandoned += 1
        logger.warning(
            "the Spark job %s (%s) does not end: abandoned its thread and closed its session; %d abandoned in total",
            work.name,
            work.key,
            self.abandoned,
        )
        thread.done.add_done_callback(self._abandoned_ended)

    def _abandoned_ended(self, done: asyncio.Future[Outcome]) -> None:
        self.abandoned -= 1


class _JobProgress:
    """Adds up the stages of a job's operations. Accepts updates from any thread and reports on the loop."""

    def __init__(self, report: Report) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = Paced(report)
        self._operations: dict[str, tuple[int, int, int]] = {}

    def on_progress(self, stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
        with suppress(RuntimeError):  # the loop has since ended
            self._loop.call_soon_threadsafe(self._add, operation, (stages, tasks_done, tasks))

    def end(self) -> None:
        self._send_report(last=True)

    def _add(self, operation: str, counts: tuple[int, int, int]) -> None:
        if counts[2]:
            self._operations[operation] = counts
            self._send_report()

    def _send_report(self, last: bool = False) -> None:
        if self._operations:
            stages, tasks_done, tasks = (sum(column) for column in zip(*self._operations.values(), strict=True))
            self._report(msgspec.json.encode({"stages": stages, "tasks_done": tasks_done, "tasks": tasks}), last)


def _without_rows(value: object) -> object:
    """Return a job's result with Spark's rows as dicts: JSON would encode them as arrays."""
    from pyspark.sql import Row

    if isinstance(value, Row):
        return value.asDict(recursive=True)
    if isinstance(value, list):
        return [_without_rows(part) for part in value]
    return value


def _ended_by(error: BaseException) -> Error:
    if is_lost(error):
        return lost(error)
    if isinstance(error, Stopped):
        return Error("cancelled", "Cancelled", "it was cancelled")
    if type(error).__module__.startswith("pyspark."):
        return msgspec.structs.replace(error_of(error), message=first_lines(error))
    return error_of(error)


def _invalid(error: Exception) -> Error:
    return msgspec.structs.replace(error_of(error), cause="invalid", traceback="", retryable=False)


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


def table_as_json(table: Table, results: Results, task: str) -> bytes:
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
                f"was written by the Spark server to its own {url}, which is not visible here: set WEFT_BLOB_URL to a "
                "folder that both share, or to s3://bucket",
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
