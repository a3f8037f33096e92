"""A Spark Connect server for tests: prints its address and process id, and ends with its standard input."""

from __future__ import annotations

import asyncio
import os
import sys

from runtime_core.engines.spark.connect import ConnectServer


async def main() -> None:
    server = ConnectServer(os.environ)
    await server.start()
    try:
        print(server.url, server.pid, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
