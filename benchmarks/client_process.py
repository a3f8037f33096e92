"""The driver on Weft's client: `python -m benchmarks.client_process [file for a profile]`.

The broker is the one that WEFT_REDIS_URL names.
"""

from __future__ import annotations

import asyncio
import cProfile
import sys

import uvloop

from benchmarks.driver import serve
from runtime_core.client.client import Client


async def main() -> None:
    async with Client.connect() as client:

        async def ask(text: str) -> object:
            handle = await client.submit("asker", text)
            return (await handle.result(timeout=60)).value()

        await serve(ask)


if __name__ == "__main__":
    profile = cProfile.Profile() if len(sys.argv) > 1 else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile is None:
            runner.run(main())
        else:
            profile.runcall(runner.run, main())
            profile.dump_stats(sys.argv[1])
