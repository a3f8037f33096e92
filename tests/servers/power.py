"""A Valkey whose power can be cut: its disk keeps only what was synced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.servers.process import Append, Server
from tests.servers.unavailable import Unavailable
from tests.servers.valkey import valkey_command

SOURCE = Path(__file__).with_name("power.c")
SYNC = re.compile(r"^(\d+) ([+-]) (\d+)$", re.MULTILINE)


class PowerServer(Server):
    """A Valkey 9 of its own whose power a test can cut; see `Server` for the other arguments.

    A library in the server logs, for each file, how much of it the disk held after each fsync and fdatasync. It runs in
    all threads, so also in the one that syncs in the background. Names of files are kept as they are: a file system
    with a journal stores them in order. So the worst that is simulated is a file that exists and is empty.
    """

    def __init__(self, directory: Path, *, append: Append = "everysec", sync_delay_ms: int = 0) -> None:
        """`sync_delay_ms` delays each sync, as a busy disk does. Raises Unavailable without a C compiler."""
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "synced.log"
        settings = [f"LD_PRELOAD={_library(directory)}", f"WEFT_SYNC_LOG={self._log}"]
        if sync_delay_ms:
            settings.append(f"WEFT_SYNC_DELAY_MS={sync_delay_ms}")
        super().__init__(("/usr/bin/env", *settings, *valkey_command()), directory, append=append)

    def cut_power(self) -> int:
        """Kill the server, and cut each file of its data off behind what was synced. Return the bytes that are lost."""
        self.kill()
        lost = 0
        for path, size, held in self._files():
            lost += size - held
            os.truncate(path, held)
        return lost

    def pause_unsynced(self) -> bool:
        """Pause the server if a power cut would lose something now. Otherwise return False, and the server goes on."""
        self.pause()
        if any(size > held for _, size, held in self._files()):
            return True
        self.resume()
        return False

    def _files(self) -> list[tuple[Path, int, int]]:
        """Return each file of the data with its size, and how much of it the disk holds."""
        held = self._held()
        found = [(path, path.stat()) for path in (self.directory / "appendonlydir").iterdir()]
        return [(path, file.st_size, min(file.st_size, held.get(file.st_ino, 0))) for path, file in found]

    def _held(self) -> dict[int, int]:
        """Return how many bytes of each file the disk holds, by inode."""
        held: dict[int, int] = {}
        for inode, what, size in SYNC.findall(self._log.read_text()):
            before = held.get(int(inode), 0)
            held[int(inode)] = max(before, int(size)) if what == "+" else min(before, int(size))
        return held


def _library(folder: Path) -> Path:
    """Compile the library that the server loads."""
    compiler = shutil.which("cc")
    if compiler is None or not os.path.exists("/proc/self/fd"):
        raise Unavailable("cutting the power needs Linux and a C compiler (cc): install gcc")
    library = folder / "power.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True, capture_output=True)
    return library
