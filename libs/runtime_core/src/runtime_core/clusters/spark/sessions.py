"""Sessions of one Spark Connect server: how they are made, and how a lost one is told from an error in it."""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runtime_core.engines.protocol import Away

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

DEFAULT_PORT = 15002
REPORT_SECONDS = 0.5
"""The shortest interval between two progress reports, in seconds."""
# By default a client retries a lost server for ten minutes.
_RETRIES = 4
_LONGEST_PAUSE_MILLISECONDS = 1000
Told = Callable[[int, int, int, int, str], None]
"""Called with an operation's number of stages, completed tasks, tasks and running tasks, and its id."""
_JOBS = uuid.UUID("6b1f0d8e-3c53-4b83-9c1d-2d4f27f6a7b1")
# Messages of the server, or the client itself, about a session that no longer exists.
_SESSION_GONE = re.compile(
    r"INVALID_HANDLE\.SESSION_|server side session identifier|SESSION_(CLOSED|NOT_FOUND|CHANGED)"
)


def address_of(remote: str) -> tuple[str, int]:
    """Return host and port of `sc://host:port/;parameters`. Raise Away if it is not such an address."""
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme != "sc" or not host:
        raise Away(f"WEFT_SPARK_REMOTE={remote!r} is no address of a Spark Connect server: write sc://host:15002")
    return host, port or DEFAULT_PORT


def is_lost(error: BaseException) -> bool:
    """Return whether the error means that the server, or the session there, is gone."""
    for one in _chain(error):
        # Only PySpark's errors: a job may use other servers, too.
        if not type(one).__module__.startswith("pyspark."):
            continue
        status = getattr(one, "getGrpcStatusCode", lambda: None)()
        if getattr(status, "name", "") == "UNAVAILABLE" or _SESSION_GONE.search(str(one)):
            return True
    return False


def condition_of(error: BaseException) -> str:
    """Return Spark's name of an error, such as `OPERATION_CANCELED`; empty if it has none."""
    found = getattr(error, "getCondition", lambda: None)()
    return found or ""


class Sessions:
    """Opens sessions on one server. All methods block except `open`, which is cheap."""

    def __init__(self, remote: str) -> None:
        """Raise ImportError if PySpark is not installed."""
        from pyspark.sql import SparkSession

        self._remote = remote
        # The builder, not a constructor: it tells all of PySpark that this process uses a remote server.
        self.first: SparkSession = SparkSession.builder.remote(remote).create()
        _hurry(self.first)

    def open(self, key: str = "", attempt: int = 0) -> SparkSession:
        """Return a separate session, without a request to the server. Sessions do not share settings or registrations.

        With a key it is the same session in each process, so a later process can end an earlier one's operations.
        """
        if not key:
            session = self.first.newSession()
        else:
            from pyspark.sql.connect.client import DefaultChannelBuilder
            from pyspark.sql.connect.session import SparkSession

            channel = DefaultChannelBuilder(self._remote)
            channel.set("session_id", str(uuid.uuid5(_JOBS, f"{key}#{attempt}")))
            session = SparkSession(connection=channel)
        _hurry(session)
        return session

    def of_job(self, key: str, attempt: int) -> SparkSession:
        """Return the session of a job's attempt. End operations left by the previous attempt's dead driver."""
        if not key:
            return self.open()
        if attempt > 1:
            before = self.open(key, attempt - 1)
            self._ended(before)
            before.stop()
        session = self.open(key, attempt)
        if self._ended(session):
            return session
        # That attempt and its session have already ended: this is a redelivery.
        session.stop()
        return self.open()

    def details(self) -> dict[str, str]:
        """Return the server's version, application id and number of CPUs."""
        session = self.first
        plan = session.client.explain_string(session.range(1)._plan.to_proto(session.client), "formatted")
        splits = re.search(r"splits=(?:Some\()?(\d+)", plan)
        return {
            "version": session.version,
            "application": session.conf.get("spark.app.id", "") or "",
            "cpus": splits[1] if splits else "",
        }

    def ask(self) -> None:
        """Send a small request, which also prevents the session's idle timeout. Raises the client's errors."""
        self.first.client.get_configs("spark.app.id")

    def close(self) -> None:
        """Disconnect from the server."""
        self.first.stop()

    def _ended(self, session: SparkSession) -> bool:
        """End the operations of a session. Return False if the server has closed the session."""
        try:
            session.interruptAll()
        except Exception as error:
            if _SESSION_GONE.search(str(error)):
                return False
            raise
        return True


class Watched:
    """Routes the progress of a shared session's operations to the thread that runs each."""

    def __init__(self, session: SparkSession) -> None:
        self._here = threading.local()
        watch(session, self._hear)

    def tell(self, told: Told) -> None:
        """Report operations of this thread to `told` from now on."""
        self._here.told = told

    def _hear(self, stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
        told: Told | None = getattr(self._here, "told", None)
        if told is not None:
            told(stages, tasks_done, tasks, running, operation)


def watch(session: SparkSession, told: Told) -> None:
    """Report all operations of a session to `told`, in the threads that run them."""

    def hear(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:  # Any: of PySpark
        stages = list(stages)
        tasks_done = sum(stage.num_completed_tasks for stage in stages)
        told(len(stages), tasks_done, sum(stage.num_tasks for stage in stages), inflight_tasks, operation_id or "")

    session.registerProgressHandler(hear)


class Paced:
    """Forwards a report if it differs from the last one and REPORT_SECONDS have passed."""

    def __init__(self, report: Callable[[bytes], None]) -> None:
        self._report = report
        self._last = b""
        self._next = 0.0

    def __call__(self, value: bytes, last: bool = False) -> None:
        """Forward `value` if it differs and is due; with `last`, even if it is not due."""
        now = time.monotonic()
        if value != self._last and (last or now >= self._next):
            self._last = value
            self._next = now + REPORT_SECONDS
            self._report(value)


def _hurry(session: SparkSession) -> None:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES, max_backoff=_LONGEST_PAUSE_MILLISECONDS)])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    waiting = [error]
    while waiting and len(seen) < 20:
        one = waiting.pop()
        if one not in seen:
            seen.append(one)
            yield one
            waiting += itertools.filterfalse(lambda other: other is None, (one.__cause__, one.__context__))  # type: ignore[arg-type]
