"""Detects a process without progress: work that waits while nothing moves, or code that blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

from runtime_core.consumer.settle import place_in_code
from runtime_core.errors import LoopInterrupt
from runtime_core.telemetry.logs import HANDLED, Handled, has_ended, is_guard

logger = logging.getLogger(__name__)
INTERRUPT_SIGNAL = getattr(signal, "SIGURG", None)
"""Ignored by default and unused elsewhere, so a stray one does no harm. None on Windows."""
REPORT_PART = 1 / 3
"""A loop that is blocked for this share of the lease is reported, and its heartbeat comes from another thread."""
CHECKS_PER_REPORT = 10
"""How often the thread checks within that time."""
REMEDY = (
    "move the blocking code to a plain function (def), as a tool or in ctx.step, which runs in a thread, or await in "
    "between"
)
"""Fits agents and tools: an agent itself is always async."""
LOCK_REMEDY = "give the C code that it calls less to do at once, or run it in a separate process"
COMPUTED_PART = 1 / 10
"""A delayed process that used a CPU for at least this part of the delay was computing, not paused."""
MAX_SILENCED = 1000
STACK_FRAMES = 20
_OURS = frozenset({"runtime_core", "weft", "asyncio", "uvloop"})
_BELOW = tuple(f"runtime_core.{name}." for name in ("base", "bus", "consumer", "telemetry", "wire"))
"""Modules that call no code of users."""
SILENCED: OrderedDict[tuple[str, str], str] = OrderedDict()
"""The runs and calls, by task and id, that have kept the global lock for a lease in this process, and the error."""


_HANDLERS: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable[..., object])


def handles_delivery(function: Function) -> Function:
    """Mark the function that runs one delivery, its argument `delivery`. The loop's watch reads its frame."""
    _HANDLERS.add(cast("FunctionType", function).__code__)
    return function


def silenced_by(handled: Handled, deliveries: int) -> str:
    """Return why an earlier delivery of this entry has silenced this process for a lease; empty if none has.

    Others have reclaimed it since, so it has silenced them, too. A first delivery is of another turn or attempt.
    """
    why = SILENCED.pop((handled.task, handled.run), "")
    return why if deliveries > 1 else ""


BeatsBeside = Callable[[Callable[[], bool]], Coroutine[Any, Any, None]]  # Any: asyncio's protocol
"""Sends heartbeats from the loop of another thread while its argument returns True."""


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`. If it is not ok, `reason` says why in one line."""

    ok: bool
    reason: str = ""


HEALTHY = Health(True)


class ProgressWatch:
    """Unhealthy when work has waited without progress for longer than `limit_seconds`.

    An idle process is healthy. So is one that waits for its broker: that time does not count. Nor does the time that
    one piece of work may take, `work_seconds`: a slow tool is not a defect. `monotonic` returns seconds.
    """

    def __init__(
        self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic, *, work_seconds: float = 0.0
    ) -> None:
        self._limit_seconds = limit_seconds
        self._work_seconds = work_seconds
        self._monotonic = monotonic
        self._waiting = False
        self._since = monotonic()
        """When work began to wait or last progressed, plus the time since then that brokers took to answer."""
        self._asked: set[Hashable] = set()
        self._asked_at = 0.0

    def waiting(self, waits: bool) -> None:
        """Report whether this process has work now. Reporting the same again changes nothing."""
        if waits and not self._waiting:
            self._since = self._monotonic()
        self._waiting = waits

    def progressed(self) -> None:
        """Report that work was taken or has ended."""
        self._since = self._monotonic()

    def asks_broker(self, broker: Hashable) -> None:
        """Report a request to one of the brokers. A second one before its answer changes nothing."""
        if not self._asked:
            self._asked_at = self._monotonic()
        self._asked.add(broker)

    def broker_answered(self, broker: Hashable) -> None:
        """Report an answer. The clock continues when all brokers with requests have answered."""
        if broker in self._asked:
            self._asked.remove(broker)
            if not self._asked:
                self._since += max(0.0, self._monotonic() - max(self._asked_at, self._since))

    @property
    def stalled_seconds(self) -> float:
        """How long work has waited without progress, beyond the time that it may take, while the brokers answered; 0
        if no work waits.
        """
        now = self._asked_at if self._asked else self._monotonic()
        return max(0.0, now - self._since - self._work_seconds) if self._waiting else 0.0

    def health(self) -> Health:
        silent = self.stalled_seconds
        if silent <= self._limit_seconds:
            return HEALTHY
        return Health(
            False,
            f"work has waited without progress for {silent:.1f} s (limit {self._limit_seconds:g} s)",
        )


class LoopWatch:
    """Watches the event loop of the main thread. `interrupts`: the process runs the user's code there.

    A blocked loop runs nothing else and sends no heartbeat. So a thread checks whether the loop still runs. After a
    third of the lease it logs which agent or tool blocks the loop, and where, and a heartbeat beside the loop keeps the
    process's deliveries. After `limit_seconds` that heartbeat ends, and the thread signals the main thread. There the
    signal handler interrupts the code that blocks the loop, even inside `time.sleep`, and raises `LoopInterrupt`.

    C code that keeps Python's global lock stops this thread, too. It runs again when that code returns, and before the
    code that called it continues, so it still finds the place. After a lease without a heartbeat, others have reclaimed
    the delivery. Then that attempt ends, and another delivery of it to this process fails (`silenced_by`).
    """

    def __init__(self, lease_seconds: float, limit_seconds: float, *, interrupts: bool) -> None:
        self._lease_seconds = lease_seconds
        self._report_seconds = min(REPORT_PART * lease_seconds, limit_seconds)
        self._limit_seconds = limit_seconds
        self._interrupts = interrupts
        self._look_seconds = self._report_seconds / CHECKS_PER_REPORT
        self._turns = 0
        self._held_seconds = 0.0
        """How long the loop has been blocked; 0 if it runs. The thread writes it, and the signal handler resets it."""
        self._silencing: tuple[Handled, float, FrameType] | None = None
        """What has kept the global lock for a lease: the delivery, the seconds and the frame. The handler resets it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats: BeatsBeside | None = None

    def start(self, beats: BeatsBeside | None = None) -> None:
        """Start watching the running loop. `beats` sends the process's heartbeats from another loop.

        Does nothing outside the main thread, where no signal arrives, and where a program handles the signal itself.
        """
        if INTERRUPT_SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(INTERRUPT_SIGNAL) is not signal.SIG_DFL:
            return
        self._beats = beats
        self._loop = asyncio.get_running_loop()
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)
        self._turn()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and INTERRUPT_SIGNAL is not None:
            signal.signal(INTERRUPT_SIGNAL, signal.SIG_DFL)

    def _turn(self) -> None:
        self._turns += 1
        assert self._loop is not None
        self._timer = self._loop.call_later(self._look_seconds, self._turn)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, looked_at, computed, reported, silent = -1, time.monotonic(), time.process_time(), -1, 0.0
        while not self._over.wait(self._look_seconds):
            now, before = time.monotonic(), computed
            computed = time.process_time()
            late = now - looked_at
            if late >= self._report_seconds and computed - before >= COMPUTED_PART * late:
                silent += late
                self._report_lock(silent)
            elif late < 2 * self._look_seconds:
                silent = 0.0  # other threads run, and send heartbeats
            # A paused process blocks nothing: a long gap between two checks counts as one interval.
            gap, looked_at = min(late, 2 * self._look_seconds), now
            if self._turns != seen:
                seen, self._held_seconds = self._turns, 0.0
                continue
            self._held_seconds += gap
            if self._held_seconds >= self._report_seconds and reported != seen:
                reported = seen
                self._report()
                if self._beats is not None:
                    threading.Thread(target=self._beat, args=(seen,), name="heartbeat beside", daemon=True).start()
            if self._held_seconds >= self._limit_seconds and self._interrupts:
                self._signal()

    def _signal(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals(INTERRUPT_SIGNAL or 0))

    def _report_lock(self, seconds: float) -> None:
        """Report that no thread ran for so long, and which code kept the global lock.

        Signals before anything else: meanwhile the main thread may continue.
        """
        main, frames = threading.main_thread().ident or 0, sys._current_frames()
        in_loop = main in frames and _runs_users_code(frames[main])
        if in_loop:
            frames = {main: frames[main]}
        # Otherwise a plain function in a thread has kept the lock. If there are several, nothing shows which one.
        users = [frame for frame in frames.values() if _runs_users_code(frame)]
        blamed = [(handled, frame) for frame in users if (handled := _handled_in(frame)) is not None]
        ends = seconds >= self._lease_seconds and len(blamed) == 1 and self._interrupts
        if ends and in_loop and interruptible(frames[main]):
            handled, frame = blamed[0]
            self._silencing = handled, seconds, frame
            self._signal()
        for handled, frame in blamed:
            why = _kept_lock(seconds, frame)
            if ends:
                SILENCED[handled.task, handled.run] = why
                if len(SILENCED) > MAX_SILENCED:
                    SILENCED.popitem(last=False)
            one_of = "" if len(blamed) == 1 else f" (or one of {len(blamed) - 1} others)"
            logger.warning("run %s of task %s%s %s", handled.run, handled.task, one_of, why, extra=_stack(frame))

    def _report(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and not _idle(frame):
            place, _ = place_in_code(frame)
            logger.warning(
                "event loop blocked for %.1f s in %s by %s, so nothing else in the process runs: %s",
                self._held_seconds, place or _place_of(frame), self._culprit(frame), REMEDY, extra=_stack(frame),
            )  # fmt: skip

    def _culprit(self, frame: FrameType) -> str:
        """Return the agent or tool in whose stack the frame is, and its task."""
        at: FrameType | None = frame
        while at is not None:
            if at.f_code in _HANDLERS:
                handled = at.f_locals["delivery"]
                return f"{handled.stream.partition(':')[0]} {handled.name!r} of task {handled.task}"
            at = at.f_back
        task = asyncio.current_task(self._loop)
        return "code outside asyncio's tasks" if task is None else task.get_name()

    def _beat(self, seen: int) -> None:
        """Send heartbeats until the loop runs again, but no longer than the limit."""

        def blocked() -> bool:
            return self._turns == seen and not self._over.is_set() and self._held_seconds < self._limit_seconds

        assert self._beats is not None
        try:
            asyncio.run(self._beats(blocked))
        except Exception as error:
            logger.warning("no heartbeat while the event loop is blocked: %s", error)

    # -- in the loop's thread ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        held, silencing, self._silencing = self._held_seconds, self._silencing, None
        # A debugger may block the loop for as long as it likes.
        if frame is None or sys.gettrace() is not None or not interruptible(frame):
            return
        handled = HANDLED.get()
        # By now the thread may run another delivery.
        if silencing is not None and handled is not None and _same(handled, silencing[0]):
            raise LoopInterrupt(_kept_lock(*silencing[1:]), repeatable=False)
        if held < self._limit_seconds:
            return
        if handled is None:
            return  # code of the program itself, which no delivery answers for
        self._held_seconds = 0.0
        place, _ = place_in_code(frame)
        raise LoopInterrupt(
            f"blocked the event loop for {held:.1f} s in {place or _place_of(frame)}, "
            f"so nothing else in the process could run: {REMEDY}"
        )


def interruptible(frame: FrameType | None) -> bool:
    """Whether an exception may be raised in this frame: in the user's code, or in a library that it called.

    Not in Weft or asyncio, which it could leave in an inconsistent state, nor in a library that they use themselves,
    as for the redaction of a log line, and not in an import. There the code continues, and the next signal may find it
    elsewhere.
    """
    users = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        top = name.partition(".")[0]
        if top in _OURS:
            return users and not name.startswith(_BELOW)
        if top == "importlib":
            return False
        users = users or top not in sys.stdlib_module_names
        frame = frame.f_back
    return False


def _runs_users_code(frame: FrameType) -> bool:
    """Whether the frame is in the user's code, or where that has just ended."""
    return has_ended(frame) or interruptible(frame)


def _same(one: Handled, other: Handled) -> bool:
    return (one.task, one.run) == (other.task, other.run)


def _handled_in(frame: FrameType | None) -> Handled | None:
    """Return the delivery whose code is in this stack."""
    while frame is not None:
        if is_guard(frame):
            return frame.f_locals.get("handled")
        if frame.f_code in _HANDLERS:
            return cast("Handled", frame.f_locals["delivery"])
        frame = frame.f_back
    return None


def _kept_lock(seconds: float, frame: FrameType) -> str:
    place, _ = place_in_code(frame)
    where = "its last expression before it returned" if has_ended(frame) else place or _place_of(frame)
    return (
        f"kept Python's global lock (GIL) for {seconds:.1f} s in {where}, so no thread of the "
        f"process ran, nor its heartbeat: {LOCK_REMEDY}"
    )


def _place_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _idle(frame: FrameType) -> bool:
    """Whether the loop waits for events: it is late only because the machine is busy."""
    return str(frame.f_globals.get("__name__", "")) in ("asyncio.runners", "selectors")


def _stack(frame: FrameType) -> dict[str, dict[str, str]]:
    """Return the `extra` of a log line that shows the stack below it."""
    return {"fields": {"traceback": _text(frame)}}


def _text(frame: FrameType) -> str:
    """Return the stack from the user's first frame on; the whole one if there is none."""
    frames = [each for each, _ in traceback.walk_stack(frame)]
    frames.reverse()
    tops = [str(each.f_globals.get("__name__", "")).partition(".")[0] for each in frames]
    # The loop and what started it come first, then Weft's own frames.
    start = max((place + 1 for place, top in enumerate(tops) if top in ("asyncio", "uvloop")), default=0)
    while start < len(tops) and tops[start] in _OURS:
        start += 1
    whole = traceback.format_stack(frame)
    return "".join((whole[start:] or whole)[-STACK_FRAMES:])
