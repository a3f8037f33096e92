"""Detects a process without progress: work that waits while nothing moves, or code that blocks the event loop."""

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

logger = logging.getLogger(__name__)
INTERRUPT_SIGNAL = getattr(signal, "SIGURG", None)
"""Ignored by default and unused elsewhere, so a stray one does no harm. None on Windows."""
CHECKS_PER_LIMIT = 20
"""How often the thread checks within the limit."""
LEASE_PART = 0.75
"""The limit as a share of the lease: the last heartbeat may be a sixth of a lease older than the block."""
STACK_FRAMES = 20
_OURS = frozenset({"runtime_core", "weft", "asyncio", "uvloop"})


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to `/healthz`. If it is not ok, `reason` says why in one line."""

    ok: bool
    reason: str = ""


HEALTHY = Health(True)


class ProgressWatch:
    """Unhealthy when work has waited without progress for longer than `limit_seconds`.

    An idle process is healthy. So is one that waits for its broker: that time does not count. `monotonic` returns
    seconds.
    """

    def __init__(self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = limit_seconds
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
        """How long work has waited without progress while the brokers answered; 0 if no work waits."""
        now = self._asked_at if self._asked else self._monotonic()
        return max(0.0, now - self._since) if self._waiting else 0.0

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

    A blocked loop sends no heartbeat. Other processes then declare this one dead and reclaim all of its deliveries. In
    the end they blame a delivery that did not block it. So a thread checks whether the loop still runs. If not, the
    thread logs the loop's stack and signals the main thread. There the signal handler interrupts the code that blocks
    the loop, even inside `time.sleep`, and raises `LoopInterrupt`.
    """

    def __init__(self, limit_seconds: float, *, interrupts: bool) -> None:
        self._limit_seconds = limit_seconds
        self._interrupts = interrupts
        self._look_seconds = limit_seconds / CHECKS_PER_LIMIT
        self._turns = 0
        self._held_seconds = 0.0
        """How long the loop has been blocked; 0 if it runs. The thread writes it, and the signal handler resets it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start watching the running loop. Does nothing outside the main thread, since no signal arrives there."""
        if INTERRUPT_SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
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
        seen, looked_at, logged = -1, time.monotonic(), -1
        while not self._over.wait(self._look_seconds):
            now = time.monotonic()
            # A paused process blocks nothing: a long gap between two checks counts as one interval.
            gap, looked_at = min(now - looked_at, 2 * self._look_seconds), now
            if self._turns != seen:
                seen, self._held_seconds = self._turns, 0.0
                continue
            self._held_seconds += gap
            if self._held_seconds >= self._limit_seconds:
                if logged != seen:
                    logged = seen
                    self._log_stack()
                if self._interrupts:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals(INTERRUPT_SIGNAL or 0))

    def _log_stack(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and not _idle(frame):
            logger.warning("the event loop has been blocked for %.1f s by\n%s", self._held_seconds, _text(frame))

    # -- in the loop's thread ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        held = self._held_seconds
        # A debugger may block the loop for as long as it likes.
        if held < self._limit_seconds or frame is None or sys.gettrace() is not None or not interruptible(frame):
            return
        self._held_seconds = 0.0
        at = _users(frame)
        raise LoopInterrupt(
            f"blocked the event loop for {held:.1f} s at {at.f_code.co_filename}:{at.f_lineno} ({at.f_code.co_name}), "
            "so nothing else in the process could run: write it as a plain function, which runs in a thread, or await "
            "in between"
        )


def interruptible(frame: FrameType | None) -> bool:
    """Whether an exception may be raised in this frame: in the user's code, or in a library that it called.

    Not in Weft or asyncio, which it could leave in an inconsistent state, and not in an import. There the code
    continues, and the next signal may find it elsewhere.
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
    """Return the innermost frame outside the standard library."""
    at: FrameType | None = frame
    while at is not None:
        if str(at.f_globals.get("__name__", "")).partition(".")[0] not in sys.stdlib_module_names:
            return at
        at = at.f_back
    return frame


def _idle(frame: FrameType) -> bool:
    """Whether the loop waits for events: it is late only because the machine is busy."""
    return str(frame.f_globals.get("__name__", "")) in ("asyncio.runners", "selectors")


def _text(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
