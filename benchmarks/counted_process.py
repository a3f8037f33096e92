"""Counts the Python calls of a service, or the client: `python -m benchmarks.counted_process <name> <file>`.

At each SIGUSR1 it writes all counts so far into the file: JSON, function to number of calls.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

import uvloop

from benchmarks import client_process
from benchmarks.profiler import CLIENT
from runtime_core.host.service import build_of, run_service

FOLDERS = re.compile(r"^.*/(src|site-packages|lib/python3\.\d+)/")
"""Everything before a module's own path."""


class Counter:
    """Counts the calls of Python functions in all threads that start after it. A coroutine counts at each resume."""

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []

    def start(self) -> None:
        threading.setprofile(self._join)
        self._join()

    def _join(self, *_: object) -> None:
        """Called by a new thread at its first event: from here on the profile in C takes the place of this function."""
        profile = cProfile.Profile(subcalls=False, builtins=False)
        self._profiles.append(profile)
        profile.enable()

    def counts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for profile in self._profiles:
            entries: list[Any] = profile.getstats()  # Any: the types of `_lsprof` are not public
            for entry in entries:
                if isinstance(entry.code, CodeType):
                    name = f"{FOLDERS.sub('', entry.code.co_filename)}:{entry.code.co_qualname}"
                    total[name] = total.get(name, 0) + entry.callcount
        return total

    def write(self, path: Path) -> None:
        """Write the counts so that a reader sees all of them or none."""
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.counts()))
        os.replace(unfinished, path)


def main(process: str, path: Path) -> int:
    counter = Counter()
    # A plain handler runs in the main thread, between two instructions of what is counted there.
    signal.signal(signal.SIGUSR1, lambda *_: counter.write(path))
    counter.start()
    if process == CLIENT:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(client_process.main())
        return 0
    return run_service(process.replace("_", "-"), build_of(process))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
