"""A Ray cluster of one node on this machine, which tests may kill and start again where it was."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from runtime_core.engines.ray.cluster import LOCAL_ENVIRONMENT, LocalRay

PATIENCE_SECONDS = 150.0
"""Of whoever ends one; it decides nothing."""


class RayCluster(LocalRay):
    """One head; its processes are known by its folder."""

    def __init__(self, cpus: int = 4, *, dashboard: bool = False) -> None:
        super().__init__(cpus, 256 * 2**20, dashboard=dashboard)

    def __enter__(self) -> RayCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environ(self) -> dict[str, str]:
        """Return what a driver needs to use it."""
        return {**os.environ, **LOCAL_ENVIRONMENT, "WEFT_RAY_ADDRESS": self.address}

    def kill(self, *names: str) -> None:
        """Send SIGKILL to its processes with one of these in their command, and wait until they are gone."""
        until = time.monotonic() + PATIENCE_SECONDS
        for pid in self.pids(*names):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while pids := self.pids():
            assert time.monotonic() < until, f"processes of Ray remain: {pids}"
            time.sleep(0.05)
        assert self._process is not None
        self._process.wait()

    def pids(self, *names: str) -> list[int]:
        """Return the cluster's processes with one of these in their command; without any, all of its head."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                program = Path(command.partition("\0")[0]).name
                if str(self.folder) in command and (not names or program in names):
                    found.append(int(entry.name))
        return found
