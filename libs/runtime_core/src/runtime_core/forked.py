"""What becomes of children that the user's code forks: they die with their parent, and never come back into Weft.

A child has a copy of everything, the connections to the broker included, which it shares with its parent: a tool that
forks and returns twice would answer twice, and its child's loop would read what its parent waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import thread as pools
from types import FrameType

from runtime_core.lifeline import PR_SET_PDEATHSIG

CAME_BACK_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""

_OURS = frozenset({"runtime_core", "weft"})
_NEVER_RETURN = frozenset({"multiprocessing", "subprocess"})
"""Their children end in them, by an exec or an exit: nothing has to be watched."""

_installed = False
_process = 0
_lasting = False
"""Whether the thread that forks lasts as long as its process. The tie is to the thread."""
_prctl = None


def guard_forks() -> None:
    """Look after all children that this process forks from now on. Only Linux ties them to their parent."""
    global _installed, _process, _prctl
    _process = os.getpid()
    if _installed or not hasattr(os, "register_at_fork"):
        return
    _installed = True
    if sys.platform == "linux":
        import ctypes  # not after the fork, where another thread may hold the import lock

        _prctl = ctypes.CDLL(None, use_errno=True).prctl
    os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    global _lasting
    thread = threading.current_thread()
    _lasting = thread is threading.main_thread() or getattr(thread, "_target", None) is pools._worker


def _in_child() -> None:
    global _process
    parent, _process = _process, 0
    # Not a child's child: it may want to outlive its parent, as a daemon does.
    if parent and _prctl is not None and _lasting:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(CAME_BACK_STATUS)  # it died before the tie was made
    _reset_signals()
    frame = _frame_of_weft(sys._getframe())
    if frame is not None:
        sys.setprofile(_Returns(frame))


def _reset_signals() -> None:
    """The parent's handlers tell its loop, which is not here: without them SIGTERM would not end the child."""
    with contextlib.suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGURG", signal.SIGTERM)):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)


def _frame_of_weft(frame: FrameType | None) -> FrameType | None:
    """The frame of Weft that has called the code that forks; None where the child cannot return to it."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        top = name.partition(".")[0]
        if top in _NEVER_RETURN:
            return None
        if top in _OURS and name != __name__:
            return frame
        frame = frame.f_back
    return None


class _Returns:
    """Ends the child when this frame returns or yields. A profile function: only a forked child pays for it."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame is self._frame:
            text = f"weft: process {os.getpid()} was forked by {os.getppid()} and came back from the code that forked: "
            os.write(2, f"{text}it ends here; end such children with os._exit\n".encode())
            os._exit(CAME_BACK_STATUS)
