"""Becomes a command once another pod is well: `wait_for.py http://ray-head:52365/healthz ray start …`.

What needs another program would else fail, be started again from nothing, and cost the other the processor that it
starts on. The standard library is all it needs, so that waiting costs nothing.
"""

from __future__ import annotations

import http.client
import os
import sys
import time
from urllib.parse import urlsplit

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
TELL_EVERY = 30
"""The number of tries between two log lines."""


def trouble(url: str) -> str:
    """Why the program at `url` is not well; empty: it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:  # its name or its address may not be there yet
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if status == 200 else f"status {status}"


def main(url: str, *command: str) -> None:
    """Waits forever: whatever supervises this process decides how long is too long."""
    tries = 0
    while why := trouble(url):
        if tries % TELL_EVERY == 0:
            print(f"waiting for {url}: {why}", flush=True)
        tries += 1
        time.sleep(INTERVAL_SECONDS)
    os.execvp(command[0], command)  # noqa: S606 - it is what this program is told to become


if __name__ == "__main__":
    main(*sys.argv[1:])
