"""Functions on Spark's executors: each call is a job of one task."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from runtime_core.base.text import LONGEST_MESSAGE
from runtime_core.engines import mapping
from runtime_core.engines.protocol import Error, Mapped, Outcome, Pickled, Registered, Report, StepInfo, Work
from runtime_core.engines.results import Results
from runtime_core.engines.spark import worker
from runtime_core.engines.spark.connect import OnProgress, Sessions, Watched, condition_of, is_lost
from runtime_core.engines.spark.worker import Assignment, CallOutcomes, MapCalls
from runtime_core.telemetry.redaction import kept

STOP_SECONDS = 2.0
"""The time that a stopped body may take to end, in seconds."""
REPEAT_SECONDS = 0.1
"""The pause between two interrupts, in seconds. One that precedes the operation on the server has no effect."""
CODE_SECONDS = 0.5
"""The time after which a body is stopped in its own code if interrupts have not ended it, in seconds."""
UNREPORTED_SECONDS = 15.0
"""The time after which an unreported call counts as started, in seconds: progress reports may be disabled."""
_SCHEMA = "index long, piece binary"
_DIED = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure|Python worker failed to connect back")
_NO_WEFT = re.compile(r"ModuleNotFoundError: No module named '(runtime_core|weft|msgspec|pyarrow)")
CALL_SECONDS = 1.0
"""The target duration of all functions of one call, in seconds. Longer functions get a call per item."""
Result = TypeVar("Result")


class Stopped(BaseException):
    """Raised inside a job's own code, which nothing else stops. Not an Exception, so that few handlers catch it."""


class InThread(Generic[Result]):
    """Runs a body in a daemon thread at once, so a body that never ends does not keep the process alive."""

    def __init__(self, body: Callable[[], Result], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Result] = self._loop.create_future()
        """The body's result or exception."""
        self._body = body
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the body to end and return whether it has. Cancelling the wait does not stop the body."""
        await asyncio.wait((self.done,), timeout=seconds)
        return self.done.done()

    def stop_code(self) -> None:
        """Raise Stopped in the thread as soon as it runs Python code again."""
        thread = self._thread.ident
        if thread is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))

    def _run(self) -> None:
        try:
            settle = functools.partial(self._succeed, self._body())
        except BaseException as error:  # SystemExit too: it ends the body, not the process
            settle = functools.partial(self._fail, error)
        with suppress(RuntimeError):  # the loop has since ended
            self._loop.call_soon_threadsafe(settle)

    def _succeed(self, result: Result) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def _fail(self, failure: BaseException) -> None:
        if not self.done.done():
            # A future does not accept StopIteration.
            self.done.set_exception(RuntimeError(repr(failure)) if isinstance(failure, StopIteration) else failure)
            self.done.exception()  # retrieved, so that asyncio does not warn if nobody awaits it


async def in_thread(body: Callable[[], Result], name: str = "weft spark") -> Result:
    """Run a body in a thread and return its result. If cancelled, abandon the thread."""
    thread = InThread(body, name)
    await thread.wait()
    return thread.done.result()


async def stop(thread: InThread[Result], interrupt: Callable[[], object], *, code: bool = False) -> bool:
    """Interrupt a body's operations repeatedly until it ends. Return whether it ended within STOP_SECONDS.

    With `code`, stop its own code, too, after CODE_SECONDS.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asking: InThread[object] | None = None
    while not thread.done.done() and loop.time() < begun + STOP_SECONDS:
        if asking is None or asking.done.done():
            asking = InThread(interrupt, "spark interrupt")
        if await thread.wait(REPEAT_SECONDS):
            break
        if code and loop.time() >= begun + CODE_SECONDS:
            code = False
            thread.stop_code()
    return thread.done.done()


class SessionCalls:
    """Runs calls in one session, each with its own tag, so that a cancel ends only that call."""

    def __init__(self, sessions: Sessions, results: Results, files: Path | None) -> None:
        """`files` is a folder that this process and all workers share for large data."""
        self._session = sessions.first
        self._watched = Watched(self._session)
        self._results = results
        self._files = files

    async def run(
        self,
        call: Registered | MapCalls | Pickled,
        step: StepInfo,
        name: str,
        key: str,
        timeout_seconds: float,
        on_start: Callable[[], object] | None = None,
    ) -> CallOutcomes:
        """Run a call and return its outcome, or one outcome per item; a single Error if the items did not all run.

        `timeout_seconds` counts from the start on a worker, which `on_start` reports. If cancelled, stop the call.
        """
        assignment = Assignment(call, step, self._results, str(self._files or ""))
        sent = await in_thread(functools.partial(self._sent, assignment))
        tag = f"weft-{uuid.uuid4().hex}"
        loop = asyncio.get_running_loop()
        start = _Start()

        def on_progress(stages: int, tasks_done: int, tasks: int, running: int, operation: str) -> None:
            with suppress(RuntimeError):  # the loop has since ended
                loop.call_soon_threadsafe(start.note, bool(running or tasks_done))

        tags = [tag, *([tag_of(key)] if key else [])]
        thread = InThread(functools.partial(self._in_thread, sent, tags, on_progress), f"spark call {name}")
        try:
            if timeout_seconds or on_start is not None:
                await start.wait(thread)
                if on_start is not None:
                    on_start()
            if timeout_seconds and not await thread.wait(timeout_seconds):
                await self._stop(thread, tag)
                return CallOutcomes([over_limit(timeout_seconds)])
            await thread.wait()
        except asyncio.CancelledError:
            await self._stop(thread, tag)
            raise
        finally:
            if isinstance(sent, Path):
                sent.unlink(missing_ok=True)
        try:
            return thread.done.result()
        except Exception as error:
            return CallOutcomes([error_from(error)])

    def _sent(self, assignment: Assignment) -> bytes | Path:
        data = msgspec.msgpack.encode(assignment)
        if self._files is None or len(data) <= worker.PIECE_BYTES:
            return data
        path = self._files / f"{uuid.uuid4().hex}.call"
        path.write_bytes(data)
        return path

    def _in_thread(self, sent: bytes | Path, tags: Sequence[str], on_progress: OnProgress) -> CallOutcomes:
        session = self._session
        for tag in tags:
            session.addTag(tag)
        self._watched.report_to(on_progress)
        one_row = session.range(0, 1, 1, 1)
        return worker.joined(one_row.mapInArrow(functools.partial(worker.work, sent), _SCHEMA).toArrow())

    async def _stop(self, thread: InThread[CallOutcomes], tag: str) -> None:
        await stop(thread, functools.partial(self._session.interruptTag, tag))


class _Start:
    """The start of a call on a worker, which Spark's reports of progress show."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._reported = False

    def note(self, runs: bool) -> None:
        """Note a report: whether the call runs, or waits for a free place."""
        self._reported = True
        if runs:
            self._begun.set()

    async def wait(self, thread: InThread[CallOutcomes]) -> None:
        """Wait until the call has started or ended. A call that nothing is reported of counts as started."""
        waiting = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait((waiting, thread.done), timeout=UNREPORTED_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._reported:
                await asyncio.wait((waiting, thread.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()


def over_limit(seconds: float) -> Error:
    """Return the error of a call that exceeded its time limit."""
    return Error("limit", "TimeoutError", f"the call did not end within {seconds:g} s; it was stopped")


def lost(error: BaseException) -> Error:
    """Return the error of a call that ran when the server, or its session there, was lost."""
    return Error("lost", "EngineLost", f"Spark was lost while it ran: {first_lines(error)}")


def error_from(error: Exception) -> Error:
    """Return the error of a call that Spark itself could not complete."""
    text = first_lines(error)
    if is_lost(error):
        return lost(error)
    if condition_of(error) == "OPERATION_CANCELED":
        return Error("worker", "OperationCanceled", "another client ended its Spark operation")
    if _DIED.search(text):
        return Error("worker", "WorkerDied", "the Python worker of the executor died, or the executor with it")
    if missing := _NO_WEFT.search(text):
        message = f"the executors' Python has no {missing[1]}: install weft[spark] there"
        return Error("invalid", "ModuleNotFoundError", message, retryable=False)
    if "PYTHON_VERSION_MISMATCH" in text:
        return Error("invalid", "PythonVersionMismatch", text, retryable=False)
    if getattr(getattr(error, "getGrpcStatusCode", lambda: None)(), "name", "") == "RESOURCE_EXHAUSTED":
        return Error("invalid", "TooLarge", f"its arguments or its result are too large for the server: {text}")
    return Error("worker", type(error).__name__, text)


def first_lines(error: BaseException) -> str:
    """Return the message of a Spark error without the server's stack trace."""
    text = str(error).partition("\n\nJVM stacktrace:")[0].strip()
    # Within a line: white space over many lines would be read again from each of them.
    return kept(re.split(r"\n[^\S\n]+at (?:org|java|scala)\.", text, maxsplit=1)[0].rstrip(), LONGEST_MESSAGE)


def tag_of(key: str) -> str:
    """Return the tag of a step's operations on the server."""
    # A comma ends a tag.
    return key.replace(",", "_")


async def run_map(calls: SessionCalls, work: Work, report: Report, in_flight: int) -> Outcome:
    """Run a map. Return a Value with one entry per item, in order, or an Error if Spark was lost."""

    async def run_some(part: Work, limit: float) -> mapping.Answer:
        assert isinstance(part.call, Mapped)
        items = MapCalls(part.call.function, part.call.over, part.call.items)
        answer = await calls.run(items, part.step, part.name, part.key, limit)
        first = answer.ends[0]
        if isinstance(first, Error) and first.cause == "lost":
            raise _Lost(first)
        whole = answer.seconds or len(answer.ends) > 1  # otherwise the error of the call itself
        return mapping.Items(answer.ends, answer.seconds) if whole else first

    assert isinstance(work.call, Mapped)
    try:
        return await mapping.run_map(
            work, work.call, work.call.in_flight or in_flight, run_some, report, task_seconds=CALL_SECONDS
        )
    except _Lost as lost:
        return lost.error


class _Lost(Exception):
    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error
