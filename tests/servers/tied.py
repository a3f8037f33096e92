"""Run a command that ends when the process that started it ends: `python tied.py <parent pid> <command …>`.

Linux only ties the two; elsewhere the command runs untied. A launcher and not a `preexec_fn`, since that
one is unsafe (and, with warnings as errors, refused) in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    end_with_parent(parent)
    os.execv(command[0], command)


def end_with_parent(parent: int) -> None:
    """Tie this process to the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent died before the tie was made, so its death will not be signalled again.
            raise SystemExit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
