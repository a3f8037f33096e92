"""Starts services with settings that cannot work, one after the other in this process, and reports how each ended.

`python -m tests.integration.refused_services SERVICE` reads a JSON list of environments, and answers with one
`[status, output]` for each. A separate process for each of them would take minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from runtime_core.bus.namespace import connect
from runtime_core.host.service import build_of, run_service

CONNECT_SECONDS = 0.3
"""How long a broker is waited for that does not answer."""


def main() -> None:
    service = sys.argv[1]
    build = build_of(service)
    assert connect.__kwdefaults__ is not None
    connect.__kwdefaults__["wait_seconds"] = CONNECT_SECONDS
    ends = []
    for environ in json.load(sys.stdin):
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            status = run_service(service, build, environ)
        ends.append((status, output.getvalue()))
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main()
