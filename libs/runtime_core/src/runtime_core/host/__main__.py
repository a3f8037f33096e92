"""A service as a process: `python -m runtime_core.host NAME`.

`python -m runtime_core.host wait-for-broker` ends when the broker at WEFT_REDIS_URL answers, for containers that start
before a service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from runtime_core.base.lazy import collect_seldom

if __name__ == "__main__":
    collect_seldom()  # before the imports below

from runtime_core.bus.namespace import connect
from runtime_core.errors import ConfigurationError

WAIT_FOR_BROKER = "wait-for-broker"
POLL_SECONDS = 0.5
REPEAT_SECONDS = 30.0
"""How often the same reason is printed again, in seconds."""


async def wait_for_broker(url: str) -> None:
    """Return when the broker answers, and print why it does not yet."""
    printed, printed_at = "", 0.0
    while True:
        try:
            transport = await connect(url)
        except ConfigurationError as error:
            reason = str(error)
        else:
            await transport.close()
            return
        if reason != printed or time.monotonic() > printed_at + REPEAT_SECONDS:
            printed, printed_at = reason, time.monotonic()
            print(f"weft {WAIT_FOR_BROKER}: {reason}", flush=True)
        await asyncio.sleep(POLL_SECONDS)


def main() -> int:
    """Run the service, or wait."""
    if sys.argv[1:] == [WAIT_FOR_BROKER]:
        # As the first process of a container, Python would ignore the signal.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if not (url := os.environ.get("WEFT_REDIS_URL")):
            print(f"weft {WAIT_FOR_BROKER}: WEFT_REDIS_URL is not set", file=sys.stderr)
            return 1
        asyncio.run(wait_for_broker(url))
        return 0
    from runtime_core.host.service import main as serve  # here: it takes half a second, which waiting does not need

    return serve(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
