"""The machine of the measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.child import ROOT
from runtime_core.bus.embedded import find_binary

TICKS = os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """The checked-out commit, with `-dirty` if files differ from it; empty outside a repository."""
    return _said("git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def machine() -> dict[str, object]:
    """Processor, cores, memory and versions; nothing that identifies the owner."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    version = re.search(r"v=(\S+)", _said(str(find_binary()), "--version"))
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "broker": f"Valkey {version[1]}" if version else "",
    }


def check() -> None:
    """Raises SystemExit if CPU times cannot be read."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("the benchmarks read CPU times from /proc: run them on Linux")


class Neighbours:
    """The CPU use of other programs since this object was created: it makes figures smaller."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), _used_seconds()

    def cores(self, own_seconds: float) -> float:
        """The number of cores that they kept busy, if the measured processes used `own_seconds` of CPU time."""
        others = _used_seconds() - self._used - own_seconds
        return max(0.0, others / (time.perf_counter() - self._began))


def _used_seconds() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    idle, waiting_for_disk = fields[3:5]
    return (sum(fields) - idle - waiting_for_disk) / TICKS


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
