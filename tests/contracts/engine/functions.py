"""What the engines are given to run: at the top of a module, so that a process finds it again.

Functions that must wait look for a file, since calls may be in other processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 60.0
"""When a call that waits for its test gives up; it decides nothing."""


def add(left: int, right: int = 0) -> int:
    return left + right


async def add_later(left: int, right: int = 0) -> int:
    await asyncio.sleep(0)
    return left + right


def same(value: object) -> object:
    return value


def begun(folder: str, name: str) -> Path:
    """Report that a call has begun; the file holds its process id."""
    path = Path(folder) / f"begun-{name}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    return path


def count_begun(folder: str) -> int:
    return len([path for path in Path(folder).iterdir() if path.name.startswith("begun-") and not path.suffix])


def count_counted(folder: str) -> int:
    """Return how many calls of `hold_and_count` have counted."""
    return len(list(Path(folder).glob("begun-*.counted")))


def wait_for(folder: str, gate: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not (Path(folder) / gate).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"nobody has opened the gate {gate!r}")
        time.sleep(0.005)


def hold(folder: str, name: str, gate: str = "gate") -> str:
    """Begin, and end when the gate is open."""
    begun(folder, name)
    wait_for(folder, gate)
    return name


def hold_and_count(folder: str, name: str) -> int:
    """Return how many calls were running when this one began, itself included."""
    mine = begun(folder, name)
    running = count_begun(folder)
    mine.with_suffix(".counted").touch()
    wait_for(folder, "gate")
    mine.unlink()
    return running


def alone(folder: str, name: str) -> None:
    """Fails if another call runs at the same time."""
    lock = Path(folder) / "lock"
    lock.touch(exist_ok=False)
    begun(folder, name)
    if name == "0":
        wait_for(folder, "gate")
    lock.unlink()


def fail(message: str) -> None:
    raise ValueError(message)


class Strange(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__("strange: " + first + second)


def fail_strangely() -> None:
    raise Strange("a", "b")


def leave() -> None:
    sys.exit(3)


def stop_iteration() -> None:
    raise StopIteration(1)


def die(folder: str = "", name: str = "") -> None:
    """End the process as the kernel does when memory is short."""
    if folder:
        begun(folder, name)
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_a_child(folder: str) -> None:
    """Die, and leave a child behind that keeps all of the process's files open."""
    if os.fork() == 0:
        wait_for(folder, "gate")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once(status: int) -> None:
    os._exit(status)


def unsendable() -> object:
    return lambda: None


def process() -> int:
    return os.getpid()


class Adder:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, other: int) -> int:
        return self.number + other
