"""A Sentinel that watches one server."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime_core.base.lifeline import tied
from tests.servers.process import HOST, Server, free_port
from tests.servers.valkey import valkey_command


@contextmanager
def sentinel(
    directory: Path, master: Server, *settings: str, port: int = 0, command: Sequence[str] = ()
) -> Iterator[int]:
    """Run a Sentinel that watches the server on `port` as `main`. Yields its own port."""
    directory.mkdir()
    own = free_port()
    file = directory / "sentinel.conf"
    file.write_text(
        f"port {own}\nbind {HOST}\ndir {directory}\n"
        f"sentinel monitor main {HOST} {port or master.port} 1\n"
        "sentinel down-after-milliseconds main 1000\n"
        "sentinel failover-timeout main 3000\n" + "".join(f"{line}\n" for line in settings).replace("{own}", str(own))
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            tied([*(command or valkey_command()), str(file), "--sentinel"], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield own
    finally:
        process.kill()
        process.wait()
