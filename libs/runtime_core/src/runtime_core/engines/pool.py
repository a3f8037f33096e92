"""Worker processes: each has its own pipe, so that one that dies takes only its own call with it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from runtime_core.engines.runtime_engine import Failure
from runtime_core.errors import EngineError

START_SECONDS = 60.0
"""How long a process may take to start on a busy machine."""
READY = b"r"
"""The process can take calls."""
BEGUN = b"b"
"""The call has arrived: from now on it may have had effects."""
DONE = b"k"
"""Precedes the pickled result."""
FAILED = b"e"
"""Precedes the pickled (type, message, traceback, the pickled error or None)."""
Result = TypeVar("Result")


class WorkerDied(EngineError):
    """A worker process has ended or was killed."""

    def __init__(self, how: str, begun: bool) -> None:
        super().__init__("WorkerDied", how)
        self.begun = begun
        """Whether its call had arrived. If not, another process may get the call."""


class Worker:
    """One worker process. Its methods block the calling thread; another thread may call `kill`."""

    def __init__(self) -> None:
        # Not fork: a forked process with threads may block forever on a lock.
        context = multiprocessing.get_context("spawn")
        self._calls, far_calls = context.Pipe()
        far_lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(far_calls, far_lifeline), name="weft worker", daemon=True)
        # Held while a thread talks to the process, so that nothing closes the pipes meanwhile.
        self._talking = threading.Lock()
        self._closed = False
        try:
            self._process.start()
        finally:
            # Only the process keeps its ends, so that they close when it ends.
            far_calls.close()
            far_lifeline.close()
        self._death = _death_of(self.pid)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ready(self) -> None:
        """Wait until it takes calls. Raises WorkerDied."""
        with self._talking:
            if self._receive(time.monotonic() + START_SECONDS) != READY:
                raise self._died(begun=False)

    def call(self, payload: bytes) -> bytes:
        """Send it a call and wait for the answer. Raises WorkerDied."""
        with self._talking:
            try:
                self._calls.send_bytes(payload)
            except OSError:
                raise self._died(begun=False) from None
            if self._receive() != BEGUN:
                raise self._died(begun=False)
            answer = self._receive()
            if answer is None:
                raise self._died(begun=True)
            return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait for its end and free its resources. A repeat does nothing."""
        if self._closed:
            return
        self._process.kill()
        with self._talking:
            if self._closed:
                return
            self._closed = True
            self._process.join()
            self._process.close()
            self._calls.close()
            self._lifeline.close()
            if self._death is not None:
                os.close(self._death)

    def _receive(self, until: float | None = None) -> bytes | None:
        """Return the next message; None if the process dies first, or after `until` (monotonic seconds)."""
        death = self._process.sentinel if self._death is None else self._death
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = wait([self._calls, death], left)
        if self._calls not in ready and not self._calls.poll():
            return None
        try:
            return self._calls.recv_bytes()
        except (EOFError, OSError):
            return None

    def _died(self, *, begun: bool) -> WorkerDied:
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        if code is not None and code < 0:
            try:
                how = f"was ended by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was ended by signal {-code}"
        else:
            how = f"ended with exit status {code}"
        when = "while it ran the call" if begun else "before it took the call"
        return WorkerDied(f"the worker process {how} {when}", begun)


def _death_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process dies; None if the system has none.

    The standard library uses a pipe, which a worker's children hold open after its death.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class WorkerPool:
    """Up to `size` worker processes, started at demand and reused."""

    def __init__(self, size: int) -> None:
        # Threads wait for the processes, so that the event loop does not. Twice as many, since a killed process
        # occupies its thread a moment longer.
        self._threads = ThreadPoolExecutor(2 * size, thread_name_prefix="weft engine")
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return sorted(worker.pid for worker in self._all)

    async def run(self, payload: bytes, timeout_seconds: float | None) -> object:
        """Run a pickled (function, args, kwargs). Raises Failure. A cancel kills the process that runs the call."""
        for attempt in (1, 2, 3):
            worker = await self._worker()
            try:
                answer = await self._answer(worker, payload, timeout_seconds)
            except WorkerDied as death:
                await self._discard(worker)
                # The process died while it was idle, so the call has not begun.
                if not death.begun and attempt < 3:
                    continue
                raise Failure("WorkerDied", death.message) from None
            except BaseException:
                await self._discard(worker)
                raise
            self._idle.append(worker)
            return await self._in_thread(functools.partial(_value, answer))
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Kill all processes and wait for their ends."""
        for worker in list(self._all):
            await self._discard(worker)
        self._idle = []
        self._threads.shutdown(wait=False)

    async def _worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await self._discard(worker)
        starting = asyncio.ensure_future(self._in_thread(self._start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # It still starts, and the next call uses it.
            starting.add_done_callback(self._keep)
            raise
        except WorkerDied as death:
            raise Failure(
                "WorkerDied",
                f"{death.message}; does the program guard its start with `if __name__ == '__main__'`?",
            ) from None
        except (OSError, RuntimeError) as error:
            raise Failure("WorkerNotStarted", str(error), error) from error

    def _start(self) -> Worker:
        worker = Worker()
        self._all.add(worker)
        try:
            worker.ready()
        except BaseException:
            self._all.discard(worker)
            worker.close()
            raise
        return worker

    def _keep(self, started: asyncio.Future[Worker]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._idle.append(started.result())

    async def _answer(self, worker: Worker, payload: bytes, timeout_seconds: float | None) -> bytes:
        answering = asyncio.ensure_future(self._in_thread(lambda: worker.call(payload)))
        try:
            await asyncio.wait((answering,), timeout=timeout_seconds)
        finally:
            # A caller that gives up here discards the worker. Its thread then ends with an error that nobody retrieves.
            answering.add_done_callback(_hear)
        if not answering.done():
            raise Failure("TimeoutError", f"the call did not end within {timeout_seconds:g} s; its process was ended")
        return answering.result()

    async def _discard(self, worker: Worker) -> None:
        if worker in self._all:
            self._all.discard(worker)
            await asyncio.shield(self._in_thread(worker.close))

    async def _in_thread(self, body: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, body)


def _hear(future: asyncio.Future[bytes]) -> None:
    if not future.cancelled():
        future.exception()


def _value(answer: bytes) -> object:
    """Return the result of a call. Raises Failure with the function's error."""
    if answer[:1] == DONE:
        try:
            value: object = pickle.loads(memoryview(answer)[1:])  # noqa: S301  # our own worker made it
        except Exception as error:  # the result's own methods may raise anything
            raise Failure("PicklingError", f"the result cannot be unpickled in this process: {error}", error) from None
        return value
    kind, message, trace, itself = pickle.loads(memoryview(answer)[1:])  # noqa: S301  # as above
    original = None
    if itself is not None:
        # An error cannot be recreated if its arguments are not those of its class.
        with suppress(Exception):
            original = pickle.loads(itself)  # noqa: S301  # as above
    if isinstance(original, BaseException):
        original.add_note(f"In the worker process:\n{trace}")
        raise Failure(kind, message, original)
    raise Failure(kind, message)


def serve(calls: Connection, lifeline: Connection) -> None:
    """Run calls until the parent hangs up. If the parent dies during a call, end this process."""
    # Ctrl-C reaches the whole process group; the parent decides about its calls.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    try:
        calls.send_bytes(READY)
        while True:
            payload = calls.recv_bytes()
            calls.send_bytes(BEGUN)
            calls.send_bytes(_answer(payload))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_parent(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _answer(payload: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(payload)  # noqa: S301  # our parent made it
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except BaseException as error:  # SystemExit, too: it ends the call, not the worker
        return _failed(error)
    try:
        return DONE + pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the result's own methods may raise anything
        message = f"the result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return FAILED + pickle.dumps(("PicklingError", message, "", None))


def _failed(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        itself: bytes | None = pickle.dumps(error)
    except Exception:  # an error may contain anything
        itself = None
    try:
        message = str(error)
    except Exception:  # its __str__ may fail, too
        message = "its message cannot be shown"
    return FAILED + pickle.dumps((type(error).__name__, message, text, itself))
