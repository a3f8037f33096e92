"""Spark jobs, `def job(spark, **arguments)`: beside the driver, each in a thread and with a session of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from runtime_core.clusters.remote import NotRunnable, declared, error_of, outcome_of
from runtime_core.clusters.spark import tables
from runtime_core.clusters.spark.calls import InThread, Stopped, first_lines, in_thread, lost, over_limit, stop, tag_of
from runtime_core.clusters.spark.sessions import Paced, Sessions, is_lost, watch
from runtime_core.engines.protocol import Error, Outcome, Registered, Report, Value, Work
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.telemetry.spans import within

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

logger = logging.getLogger(__name__)


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
            return Error("invalid", "InvalidInput", f"{work.name} is a Spark job: it has no map", retryable=False)
        try:
            session = await in_thread(functools.partial(self._sessions.of_job, work.key, work.step.attempt))
        except Exception as error:
            return lost(error)
        progress = _Progress(report)
        watch(session, progress.told)
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
            table = tables.table_of(value, session)
            if table is None:
                return outcome_of(_without_rows(value), work.step, self._results)
            return Value(tables.kept(table, self._results, work.step.task))
        except (InvalidInput, ConfigurationError) as error:
            return _invalid(error)
        except BaseException as error:  # Spark does not compute a table before this
            return _ended_by(error)

    async def _stop(self, thread: InThread[Outcome], session: SparkSession, work: Work) -> None:
        if await stop(thread, session.interruptAll, code=True):
            return
        self.abandoned += 1
        logger.warning(
            "the Spark job %s (%s) does not end: its thread is left to itself, and its session closed; %d such now",
            work.name,
            work.key,
            self.abandoned,
        )
        thread.done.add_done_callback(self._ended_after_all)

    def _ended_after_all(self, done: asyncio.Future[Outcome]) -> None:
        self.abandoned -= 1


class _Progress:
    """Adds up the stages of a job's operations. Accepts updates from any thread and reports on the loop."""

    def __init__(self, report: Report) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = Paced(report)
        self._operations: dict[str, tuple[int, int, int]] = {}

    def told(self, stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
        with suppress(RuntimeError):  # the loop has since ended
            self._loop.call_soon_threadsafe(self._add, operation, (stages, tasks_done, tasks))

    def end(self) -> None:
        self._tell(last=True)

    def _add(self, operation: str, counts: tuple[int, int, int]) -> None:
        if counts[2]:
            self._operations[operation] = counts
            self._tell()

    def _tell(self, last: bool = False) -> None:
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
        return Error("cancelled", "Cancelled", "it was stopped as asked")
    if type(error).__module__.startswith("pyspark."):
        return msgspec.structs.replace(error_of(error), message=first_lines(error))
    return error_of(error)


def _invalid(error: Exception) -> Error:
    return msgspec.structs.replace(error_of(error), cause="invalid", traceback="", retryable=False)
