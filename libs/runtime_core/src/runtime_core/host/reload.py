"""`weft up --reload`: checks the app in a process of its own, and restarts its services when its code changes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from runtime_core.errors import ConfigurationError
from runtime_core.host.supervisor import Supervisor
from runtime_core.lifeline import tied

POLL_SECONDS = 0.5
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that are not searched, besides those whose names begin with a dot."""
FILES_MAX = 10_000


async def check_app(reference: str) -> None:
    """Import and check the app in another process. Raises ConfigurationError, on one line."""
    # Not in this process: importing runs the user's code, and a later change needs a fresh import.
    # -P: the user's folder must not shadow our modules. The loader adds it for the app itself.
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-P", "-m", "runtime_core.app", reference], signal.SIGKILL),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, written = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = written.decode(errors="replace").strip().splitlines() or [f"app {reference!r} cannot be imported"]
        raise ConfigurationError(lines[-1])


async def reload_on_change(reference: str, supervisor: Supervisor, names: frozenset[str]) -> None:
    """Restart the children `names` after each change of a Python file below this folder, if the app can be imported.

    Runs until it is cancelled.
    """
    folder = Path(os.getcwd())
    known = await asyncio.to_thread(_files, folder)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        found = await asyncio.to_thread(_files, folder)
        if found == known:
            continue
        changed = sorted(path for path in found.keys() | known.keys() if found.get(path) != known.get(path))
        known = found
        shown = ", ".join(Path(path).relative_to(folder).as_posix() for path in changed[:3]) + (
            ", …" if len(changed) > 3 else ""
        )
        try:
            await check_app(reference)
        except ConfigurationError as error:
            supervisor.note(f"{shown} changed, and the old code runs on: {error}")
            continue
        supervisor.note(f"{shown} changed: restarting the handlers")
        supervisor.restart(names)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the Python files below a folder, with their times and sizes."""
    found: dict[str, tuple[int, int]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if _is_source(name, root)]
        for name in files:
            if name.endswith(".py") and len(found) < FILES_MAX:
                try:
                    status = os.stat(os.path.join(root, name))
                except FileNotFoundError:  # an editor has just replaced it
                    continue
                found[os.path.join(root, name)] = (status.st_mtime_ns, status.st_size)
    return found


def _is_source(name: str, root: str) -> bool:
    # An environment has any name, and this file.
    return name not in SKIPPED and name[:1] != "." and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
