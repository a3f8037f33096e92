"""Whether the service in this container gets on: exit status 0, or 1 with the reason in one line."""

from __future__ import annotations

import http.client
import os
import sys


def main(path: str = "/healthz", port: str = "") -> int:
    """Asks this container's own service, or whatever listens on `port`."""
    number = int(port or os.environ.get("WEFT_METRICS_PORT") or 9464)
    connection = http.client.HTTPConnection("127.0.0.1", number, timeout=4)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        said = answer.read(200).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error!s:.200}".splitlines()[0])
        return 1
    print(said)
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
