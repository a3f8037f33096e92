"""The driver on Weft's client: `python -m benchmarks.client_process [file for a profile]`.

The broker is the one that WEFT_REDIS_URL names.
"""

from __future__ import annotations

import asyncio
import cProfile
import sys

import uvloop

from benchmarks.driver import Refused, serve
from runtime_core.client.client import Client
from runtime_core.errors import Rejected


async def main() -> None:
    async with Client.connect() as client:

        async def ask(text: str) -> object:
            try:
                handle = await client.submit("asker", text)
            except Rejected as rejected:
                if rejected.retry_after_seconds is None:
                    raise
                raise Refused from rejected
            return (await handle.result(timeout=600)).value()

        await serve(ask)


if __name__ == "__main__":
    profile = cProfile.Profile() if len(sys.argv) > 1 else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile is None:
            runner.run(main())
        else:
            profile.runcall(runner.run, main())
            profile.dump_stats(sys.argv[1])
