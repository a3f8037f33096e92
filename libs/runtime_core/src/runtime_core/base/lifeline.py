"""Ties a child process to its parent: when the parent dies, however it dies, the child is signalled.

`tied` does it for a command that Weft starts, `guard_forks` for what the user's code forks. A forked child has a copy
of everything, and shares the connections to the broker with its parent. So the guard also keeps it from returning into
Weft: a tool that forks and returns twice would answer twice, and the child's event loop would read replies that the
parent waits for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

PR_SET_PDEATHSIG = 1
NO_FILE = -1

CAME_BACK_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""

_OURS = frozenset({"runtime_core", "weft"})
_NEVER_RETURN = frozenset({"multiprocessing", "subprocess"})
"""Modules whose children end by an exec or an exit, and so need no guard."""

_installed = False
_process = 0
_lasting = False
"""Whether the forking thread lasts as long as its process: Linux ties a child to the thread that forked it."""
_prctl = None


def tied(command: Sequence[str], signal_number: signal.Signals, name_in: int = NO_FILE) -> list[str]:
    """Return the command that starts `command` tied to this process.

    The child writes its process id to the inherited descriptor `name_in`, if there is one.
    The command that is returned runs this file, which makes the tie and then becomes `command`: same process, same id.
    It is a launcher and not a `preexec_fn`, because code between fork and exec can block forever in a process that has
    threads.

    The tie follows the *thread* that starts the child: start children from the main thread.
    Only Linux has such a tie; elsewhere the command runs untied.
    """
    launcher = [sys.executable, "-I", "-S", __file__]
    return [*launcher, str(os.getpid()), str(int(signal_number)), str(name_in), *command]


def tie(parent: int, signal_number: int) -> None:
    """Tie this process to its parent. Raises SystemExit if that has died."""
    if sys.platform == "linux":
        import ctypes  # only here: it costs a third of the launcher's time

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:
            # The parent died before the tie was made, so no signal will follow.
            raise SystemExit(1)


def become(parent: int, signal_number: int, name_in: int, command: list[str]) -> None:
    """Make the tie and replace this process by the command. Raises SystemExit if it cannot."""
    tie(parent, signal_number)
    if name_in != NO_FILE:
        os.ftruncate(name_in, 0)
        os.pwrite(name_in, str(os.getpid()).encode(), 0)
    try:
        os.execvp(command[0], command)  # noqa: S606  # becoming the command is the purpose
    except OSError as error:
        raise SystemExit(f"weft launcher: cannot start {command[0]}: {error.strerror}") from None


def guard_forks() -> None:
    """Guard all forks of this process from now on. Only Linux ties the children to their parent."""
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
    # Not above: `tied` starts this file for each child, and would load these each time.
    import threading
    from concurrent.futures import thread as pools

    global _lasting
    thread = threading.current_thread()
    _lasting = thread is threading.main_thread() or getattr(thread, "_target", None) is pools._worker


def _in_child() -> None:
    global _process
    parent, _process = _process, 0
    # Not for a grandchild, which may want to outlive its parent, as a daemon does.
    if parent and _prctl is not None and _lasting:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(CAME_BACK_STATUS)  # the parent died before the tie was made
    _reset_signals()
    frame = _frame_of_weft(sys._getframe())
    if frame is not None:
        sys.setprofile(_Returns(frame))


def _reset_signals() -> None:
    """Remove the parent's signal handlers: they wake an event loop that the child lacks, so SIGTERM would be lost."""
    with contextlib.suppress(ValueError, OSError):
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGURG", signal.SIGTERM)):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)


def _frame_of_weft(frame: FrameType | None) -> FrameType | None:
    """Return the frame of Weft that called the forking code; None if the child cannot return to it."""
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
    """A profile function that ends the child when this frame returns or yields. Only a forked child pays for it."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame is self._frame:
            text = f"weft: process {os.getpid()}, forked by {os.getppid()}, returned from the code that forked it"
            os.write(2, f"{text}: Weft ends it here; end such children with os._exit\n".encode())
            os._exit(CAME_BACK_STATUS)


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
