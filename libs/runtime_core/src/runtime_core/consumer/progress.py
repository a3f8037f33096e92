"""Whether a process makes progress: work that waits while nothing moves, and code that blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FrameType

from runtime_core.errors import LoopInterrupt


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`; `reason` says in one line why it is not ok."""

    ok: bool
    reason: str = ""


HEALTHY = Health(True)


class ProgressWatch:
    """Unhealthy when work has waited, and nothing has progressed, for longer than `limit_seconds`.

    A process without work is healthy however long it is idle, and so is one that waits for its broker: time in which
    a broker owes an answer does not count. `monotonic` gives seconds.
    """

    def __init__(self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._waiting = False
        self._since = monotonic()
        """When work began to wait, or last progressed; later by the time that brokers owed answers since then."""
        self._asked: set[Hashable] = set()
        self._asked_at = 0.0

    def waiting(self, waits: bool) -> None:
        """Report whether there is work for this process now. Reporting the same again changes nothing."""
        if waits and not self._waiting:
            self._since = self._monotonic()
        self._waiting = waits

    def progressed(self) -> None:
        """Report that a piece of work was taken, or has ended."""
        self._since = self._monotonic()

    def asks_broker(self, broker: Hashable) -> None:
        """Report that this broker, one of several, got a request. Another one before its answer changes nothing."""
        if not self._asked:
            self._asked_at = self._monotonic()
        self._asked.add(broker)

    def broker_answered(self, broker: Hashable) -> None:
        """Report that this broker answers: the clock continues once all brokers with requests have answered."""
        if broker in self._asked:
            self._asked.remove(broker)
            if not self._asked:
                self._since += max(0.0, self._monotonic() - max(self._asked_at, self._since))

    @property
    def stalled_seconds(self) -> float:
        """How long work has waited without progress while the brokers answered; 0 if none waits."""
        now = self._asked_at if self._asked else self._monotonic()
        return max(0.0, now - self._since) if self._waiting else 0.0

    def health(self) -> Health:
        silent = self.stalled_seconds
        if silent <= self._limit_seconds:
            return HEALTHY
        return Health(
            False,
            f"work waits and nothing has progressed for {silent:.1f} s (limit {self._limit_seconds:g} s)",
        )


logger = logging.getLogger(__name__)

SIGNAL = getattr(signal, "SIGURG", None)
"""Ignored by default, and used by nothing else here: a stray one does no harm. None on Windows."""
LOOKS = 20
"""How often the thread checks before the limit has passed."""
LEASE_PART = 0.75
"""A share of the lease: the last heartbeat may be a sixth of a lease older than the last turn of the loop."""
STACK_FRAMES = 20

_OURS = frozenset({"runtime_core", "weft", "asyncio", "uvloop"})


class LoopWatch:
    """Watches the loop that runs in the main thread. `interrupts`: the process runs the user's code there.

    A blocked loop sends no heartbeat. Other processes then declare this one dead, reclaim all of its deliveries, and in
    the end blame whichever it held. So a thread checks whether the loop still turns. If it does not, the thread logs
    the loop's stack and signals the loop's thread. The signal handler runs there, between two instructions of the code
    that blocks the loop, or inside its `time.sleep`, and raises `LoopInterrupt`.
    """

    def __init__(self, limit_seconds: float, *, interrupts: bool) -> None:
        self._limit_seconds = limit_seconds
        self._interrupts = interrupts
        self._look_seconds = limit_seconds / LOOKS
        self._turns = 0
        self._held_seconds = 0.0
        """How long the loop has been blocked; 0 if it turns. The thread writes it, and the handler once it has
        raised."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Call it in the loop. Does nothing outside the main thread, where no signal arrives."""
        if SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        signal.signal(SIGNAL, self._on_signal)
        self._turn()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and SIGNAL is not None:
            signal.signal(SIGNAL, signal.SIG_DFL)

    def _turn(self) -> None:
        self._turns += 1
        assert self._loop is not None
        self._timer = self._loop.call_later(self._look_seconds, self._turn)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, looked_at, told = -1, time.monotonic(), -1
        while not self._over.wait(self._look_seconds):
            now = time.monotonic()
            # A paused process has blocked nothing: a long gap between two checks counts as one.
            gap, looked_at = min(now - looked_at, 2 * self._look_seconds), now
            if self._turns != seen:
                seen, self._held_seconds = self._turns, 0.0
                continue
            self._held_seconds += gap
            if self._held_seconds >= self._limit_seconds:
                if told != seen:
                    told = seen
                    self._tell()
                if self._interrupts:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals(SIGNAL or 0))

    def _tell(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and not _idle(frame):
            logger.warning("the event loop has been held for %.1f s by\n%s", self._held_seconds, _text(frame))

    # -- in the loop's thread ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        held = self._held_seconds
        # A debugger may block the loop for any time.
        if held < self._limit_seconds or frame is None or sys.gettrace() is not None or not interruptible(frame):
            return
        self._held_seconds = 0.0
        at = _users(frame)
        raise LoopInterrupt(
            f"held the event loop for {held:.1f} s at {at.f_code.co_filename}:{at.f_lineno} ({at.f_code.co_name}), "
            "while nothing else in its process could run: make it a plain function, which runs in a thread, or await "
            "in between"
        )


def interruptible(frame: FrameType | None) -> bool:
    """Whether an exception may be raised in this frame: in the user's code, or in a library that it has called.

    Not in Weft or asyncio, which might be left half changed, and not in an import. The code then continues, and the
    next signal may find it elsewhere.
    """
    users = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        top = name.partition(".")[0]
        if top in _OURS:
            return users
        if top == "importlib":
            return False
        users = users or top not in sys.stdlib_module_names
        frame = frame.f_back
    return False


def _users(frame: FrameType) -> FrameType:
    """The innermost frame outside the standard library."""
    at: FrameType | None = frame
    while at is not None:
        if str(at.f_globals.get("__name__", "")).partition(".")[0] not in sys.stdlib_module_names:
            return at
        at = at.f_back
    return frame


def _idle(frame: FrameType) -> bool:
    """Whether the loop waits for something to do: it is late only because the machine is busy."""
    return str(frame.f_globals.get("__name__", "")) in ("asyncio.runners", "selectors")


def _text(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
