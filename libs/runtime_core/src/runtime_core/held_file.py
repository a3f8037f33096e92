"""A lock file that names its holder, and that the kernel frees when the holder dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self


class HeldFile:
    """An exclusive lock on a file whose content is the process id of the holder.

    The lock belongs to the open file: a child process that inherits the descriptor holds it as well,
    until the last of them has closed it or died.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Takes the lock without waiting; None where somebody holds it."""
        import fcntl  # missing on Windows, where other parts of this package still work

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def name_this_process(self) -> None:
        """Writes the id of the calling process into the file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Lets go of the lock, as far as this process is concerned."""
        os.close(self.descriptor)


def holder_of(path: Path) -> int | None:
    """The process id in the file: who holds it, or who held it last."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
