"""The code in Ray's worker processes. It does not use Ray itself."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from runtime_core.engines.mapping import CHUNK_SECONDS, Answer, Items
from runtime_core.engines.protocol import Mapped, Outcome, Pickled, Registered, Work
from runtime_core.engines.remote import declared, run_items, run_pickled, run_registered
from runtime_core.engines.results import Results

INTERRUPT_SECONDS = 0.4
"""How long a call may continue after KeyboardInterrupt, in seconds."""
FIRST_MARK = 128
"""A mark of a call is a byte from this one on: no signal has such a number."""


class WorkerJob(msgspec.Struct, frozen=True):
    """Work as it is sent to a worker."""

    work: Work
    """The work; for a map, some of its items."""
    results: Results

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


class CallProcess(msgspec.Struct, frozen=True):
    """The process in which a call runs."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def run_job(job: bytes) -> Iterator[CallProcess | Answer]:
    """Yield that the call has started, then its outcome. Ends this process if a cancelled call continues."""
    # Load first: the imports of a new process do not count against the call's limit.
    unpacked = msgspec.msgpack.decode(job, type=WorkerJob)
    with interrupts().watched():
        _load(unpacked)
    yield CallProcess(os.getpid(), socket.gethostname())
    # Not around a `yield`: the process must not count as running this call when Ray has ended it there.
    with interrupts().watched():
        outcome = answer(unpacked)
    yield outcome


class Interrupts:
    """Ends this process if a call continues after it was interrupted. Calls run one after the other in the main thread.

    Ray can end a process, too. But Ray does not know what the process runs: if the call ends while Ray's request is on
    its way, Ray may kill the next call.

    Python writes each signal, and each interrupt of a cancelled task, to the wake-up file descriptor at once. The main
    thread may notice much later: nothing interrupts a `time.sleep`, and a function may catch KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._running = 0
        """The mark of the running call; 0: none runs."""
        self._changing = threading.Lock()
        self._heard, self._signals = os.pipe()
        os.set_blocking(self._signals, False)
        threading.Thread(target=self._listen, name="interrupts", daemon=True).start()
        # A forked child has the same pipe, but its signals are not those of the call.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a call: INTERRUPT_SECONDS after its interrupt the process ends, unless the call has ended."""
        self._calls += 1
        mark = FIRST_MARK + self._calls % FIRST_MARK
        os.write(self._signals, bytes((mark,)))
        before = signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        try:
            with self._changing:
                self._running = mark
            yield
        finally:
            with self._changing:
                self._running = 0
            signal.set_wakeup_fd(before)

    def _listen(self) -> None:
        mark = 0
        while received := os.read(self._heard, 4096):
            for byte in received:
                if byte >= FIRST_MARK:
                    mark = byte  # later signals are of this call, even if they are read after its end
                elif byte == signal.SIGINT:
                    ending = threading.Timer(INTERRUPT_SECONDS, self._end, (mark,))
                    ending.daemon = True
                    ending.start()

    def _end(self, mark: int) -> None:
        with self._changing:
            if self._running == mark:
                os._exit(1)


@functools.cache
def interrupts() -> Interrupts:
    """Return the process's own."""
    return Interrupts()


class LongLived:
    """An actor: a process that runs calls one after the other and keeps their imports loaded."""

    def ready(self, first_job: bytes = b"") -> CallProcess:
        """Load the first job's app, then return the actor's process."""
        if first_job:
            _load(msgspec.msgpack.decode(first_job, type=WorkerJob))
        return CallProcess(os.getpid(), socket.gethostname())

    def run(self, job: bytes) -> Answer:
        """Run a call and return its outcome."""
        return answer(msgspec.msgpack.decode(job, type=WorkerJob))


def _load(job: WorkerJob) -> None:
    """Import the app if possible; if not, the call reports the error."""
    call = job.work.call
    function = call.function if isinstance(call, Mapped) else call
    if isinstance(function, Registered):
        with suppress(BaseException):  # importing an app may raise anything
            declared(function.app, function.folder, function.name)


def answer(job: WorkerJob) -> Answer:
    """Run the call and return its outcome. Never raises."""
    work = job.work
    match work.call:
        case Pickled():
            from ray import cloudpickle  # Ray's own copy; here, since only pickled calls need it

            return run_pickled(work.call, cloudpickle)
        case Mapped(function=function, over=over, items=items):
            began = time.monotonic()
            outcomes: list[Outcome] = []
            for outcome in run_items(function, over, items, work.step, job.results):
                outcomes.append(outcome)
                if time.monotonic() - began > CHUNK_SECONDS:
                    break
            return Items(outcomes, time.monotonic() - began)
        case function:
            return run_registered(function, work.step, job.results)
