"""A backend whose cluster is a folder: running work outlives its driver, which finds it again by its key.

Each call is a separate process (`worker.py`), which leaves its outcome in the folder. With `ENGINE_INLINE` calls run
in threads of the driver instead, and nothing is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from runtime_core.engines.protocol import Error, Outcome, Report, Work
from tests.engine_backends.files import FOLDER, Files
from tests.engine_backends.worker import OUTCOME, PID, WORK, outcome_of

INLINE = "ENGINE_INLINE"
_OUTCOME: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


class Folder:
    """Logs `began`, `attached`, `stopped` and `forgot`, each with the key."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._files = Files(Path(environ[FOLDER]))
        self._environ = dict(environ)

    async def connect(self) -> Mapping[str, str]:
        return await self._files.connect()

    async def lost(self) -> str:
        return await self._files.lost()

    async def run(self, work: Work, report: Report) -> Outcome:
        if INLINE in self._environ:
            return await asyncio.to_thread(outcome_of, work, self._environ)
        place = self._place(work.key)
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            self._files.note("attached", work.key, os.getpid())
        else:
            self._files.note("began", work.key, os.getpid())
            (place / WORK).write_bytes(msgspec.msgpack.encode(work))
            await asyncio.to_thread(self._start, place)
        report(b'{"runs":true}')
        try:
            return await self._outcome(place, work)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((place / PID).read_text()), signal.SIGKILL)
            self._files.note("stopped", work.key)
            raise

    def _start(self, place: Path) -> None:
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine_backends.worker", str(place)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _outcome(self, place: Path, work: Work) -> Outcome:
        while True:
            # Before the look for its outcome: what it leaves in its last moment counts.
            gone = (place / PID).exists() and not alive(int((place / PID).read_text()))
            if (place / OUTCOME).exists():
                return _OUTCOME.decode((place / OUTCOME).read_bytes())
            if gone:
                return Error("worker", "WorkerDied", f"the worker of {work.name} has died")
            await asyncio.sleep(0.02)

    async def forget(self, key: str) -> None:
        shutil.rmtree(self._place(key), ignore_errors=True)
        self._files.note("forgot", key)

    async def close(self) -> None:
        self._files.note("closed")

    def _place(self, key: str) -> Path:
        return self._files.folder / "work" / hashlib.sha256(key.encode()).hexdigest()


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
