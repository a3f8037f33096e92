"""One measured process: starts it, sends orders, reads its CPU time, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from benchmarks.driver import Drive, Order
from runtime_core.base.lifeline import tied

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 30.0
READY_SECONDS = 30.0
TASK_SECONDS = 0.05
"""How long a task may take on average before an order counts as stuck."""


class Child:
    """A child of this process, which ends with it. Its standard error goes to a log."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Self:
        """Start it in the repository's root. Call it from the main thread."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *tied(command, signal.SIGKILL),
                cwd=ROOT,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """The CPU time of all its threads so far, and of the processes that it has started."""
        return sum(map(cpu_seconds, session(self.pid)))

    async def ready(self) -> None:
        """Wait until a driver reports that it is ready for orders. Raises RuntimeError with the end of its log."""
        await self._line(READY_SECONDS, "did not get ready")

    async def order(self, order: Order) -> Drive:
        """Have a driver carry out an order. Raises RuntimeError with the end of its log if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        line = await self._line(READY_SECONDS + order.tasks * TASK_SECONDS, f"did not carry out {order}")
        return Drive(**json.loads(line))

    async def stop(self) -> None:
        """Stop it gracefully; kill it if that takes too long. Raises RuntimeError if it did not end well."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            # A driver ends with its input, a service by the signal.
            self._process.stdin.close()
            if self._serves():
                self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                status = await self._process.wait()
        except TimeoutError:
            await self.kill()
            raise RuntimeError(f"{self.name} did not end within {STOP_SECONDS:g} s: {self.said()}") from None
        if status:
            raise RuntimeError(f"{self.name} ended with status {status}: {self.said()}")

    async def kill(self) -> None:
        """SIGKILL, as in a crash, for it and the processes that it has started. Returns when it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    def said(self) -> str:
        """The end of its log."""
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:]) or "it said nothing"

    def _serves(self) -> bool:
        return not self.name.startswith("client")

    async def _line(self, seconds: float, otherwise: str) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"{self.name} {otherwise} within {seconds:g} s: {self.said()}") from None
        if not line:
            raise RuntimeError(f"{self.name} {otherwise} and ended: {self.said()}")
        return line


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads, running and ended, in user and system mode."""
    # The second field is the program's name in brackets, and may hold blanks and brackets itself.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def session(leader: int) -> list[int]:
    """The processes of the session that `leader` leads: each child leads its own."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                members += [int(entry.name)] if os.getsid(int(entry.name)) == leader else []
    return members
