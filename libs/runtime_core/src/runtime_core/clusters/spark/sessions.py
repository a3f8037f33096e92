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
"""Between two reports of progress."""
# By default a client tries for ten minutes to reach a server that is gone.
_RETRIES = 4
_LONGEST_PAUSE_MILLISECONDS = 1000
Told = Callable[[int, int, int, int, str], None]
"""Takes of one operation: stages, tasks done, tasks, tasks that run now, and its id."""
_JOBS = uuid.UUID("6b1f0d8e-3c53-4b83-9c1d-2d4f27f6a7b1")
# What the server, or the client by itself, says of a session that is not there any more.
_SESSION_GONE = re.compile(
    r"INVALID_HANDLE\.SESSION_|server side session identifier|SESSION_(CLOSED|NOT_FOUND|CHANGED)"
)


def address_of(remote: str) -> tuple[str, int]:
    """Host and port of `sc://host:port/;parameters`. Raises Away for what is no such address."""
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme != "sc" or not host:
        raise Away(f"WEFT_SPARK_REMOTE={remote!r} is no address of a Spark Connect server: write sc://host:15002")
    return host, port or DEFAULT_PORT


def is_lost(error: BaseException) -> bool:
    """Whether it says that the server, or the session there, is gone."""
    for one in _chain(error):
        # Of PySpark alone: a job may talk to other servers, too.
        if not type(one).__module__.startswith("pyspark."):
            continue
        status = getattr(one, "getGrpcStatusCode", lambda: None)()
        if getattr(status, "name", "") == "UNAVAILABLE" or _SESSION_GONE.search(str(one)):
            return True
    return False


def condition_of(error: BaseException) -> str:
    """Spark's own name of an error, as in `OPERATION_CANCELED`; empty where it has none."""
    found = getattr(error, "getCondition", lambda: None)()
    return found or ""


class Sessions:
    """Makes sessions on one server. Its methods block, but for the cheap `open`."""

    def __init__(self, remote: str) -> None:
        """Raises ImportError where PySpark is not installed."""
        from pyspark.sql import SparkSession

        self._remote = remote
        # The builder, and no constructor: it says to all of PySpark that this process has servers elsewhere.
        self.first: SparkSession = SparkSession.builder.remote(remote).create()
        _hurry(self.first)

    def open(self, key: str = "", attempt: int = 0) -> SparkSession:
        """A session of its own: nothing that is set or registered in one is seen in another; no question to the server.

        With a key it is the same one in each process, so that a later process can end what an earlier one began.
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
        """The session of a job's attempt. What the one before left running, its driver dead, is ended."""
        if not key:
            return self.open()
        if attempt > 1:
            before = self.open(key, attempt - 1)
            self._ended(before)
            before.stop()
        session = self.open(key, attempt)
        if self._ended(session):
            return session
        # That attempt has ended already, and its session with it: the same delivery was made again.
        session.stop()
        return self.open()

    def details(self) -> dict[str, str]:
        """What the server says of itself."""
        session = self.first
        plan = session.client.explain_string(session.range(1)._plan.to_proto(session.client), "formatted")
        splits = re.search(r"splits=(?:Some\()?(\d+)", plan)
        return {
            "version": session.version,
            "application": session.conf.get("spark.app.id", "") or "",
            "cpus": splits[1] if splits else "",
        }

    def ask(self) -> None:
        """A small question, which also keeps the session from being closed as idle. Raises what the client raises."""
        self.first.client.get_configs("spark.app.id")

    def close(self) -> None:
        """Let go of the server."""
        self.first.stop()

    def _ended(self, session: SparkSession) -> bool:
        """End what runs in a session; False where the server has closed that session."""
        try:
            session.interruptAll()
        except Exception as error:
            if _SESSION_GONE.search(str(error)):
                return False
            raise
        return True


class Watched:
    """Hears what the server says of the operations of a session that several threads share, each for itself."""

    def __init__(self, session: SparkSession) -> None:
        self._here = threading.local()
        watch(session, self._hear)

    def tell(self, told: Told) -> None:
        """From now on `told` hears of operations of this thread."""
        self._here.told = told

    def _hear(self, stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
        told: Told | None = getattr(self._here, "told", None)
        if told is not None:
            told(stages, tasks_done, tasks, running, operation)


def watch(session: SparkSession, told: Told) -> None:
    """Let `told` hear of all operations of a session, in the threads that run them."""

    def hear(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:  # Any: of PySpark
        stages = list(stages)
        tasks_done = sum(stage.num_completed_tasks for stage in stages)
        told(len(stages), tasks_done, sum(stage.num_tasks for stage in stages), inflight_tasks, operation_id or "")

    session.registerProgressHandler(hear)


class Paced:
    """Passes a report on where it differs from the last one and that is half a second ago."""

    def __init__(self, report: Callable[[bytes], None]) -> None:
        self._report = report
        self._last = b""
        self._next = 0.0

    def __call__(self, value: bytes, last: bool = False) -> None:
        """`last` passes on now what differs."""
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
