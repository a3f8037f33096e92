"""Ties a child process to its parent: when the parent dies, however it dies, the child is signalled."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
NO_FILE = -1


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


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
