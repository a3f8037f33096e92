"""Calls a tool of the hostile server in little memory: `python -m tests.integration.calls.mcp.hostile_client TOOL`.

Prints a line of JSON: the error of the call, the reason that the session gives, and the most milliseconds for which the
event loop was blocked.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

from runtime_core.calls.mcp.connection import Lost, MCPSession
from runtime_core.declare.declaration import Place
from runtime_core.declare.mcp_server import MCPServer

MEMORY_BYTES = 160 * 1024 * 1024
CALL_SECONDS = 3.0


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))


async def nothing(*_: object) -> None:
    """Progress is not shown."""


async def call(tool: str) -> dict[str, object]:
    declared = MCPServer(
        "hostile", Place("app.py", 1), command=[sys.executable, "-m", "tests.mcp_servers.hostile"], mode="legacy"
    )
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - before - 0.01)

    error = ""
    async with MCPSession(declared) as session:
        limit_memory()
        watching = asyncio.create_task(watch())
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await session.call(tool, {"mib": 8}, {}, nothing)
        except Lost as lost:
            error = str(lost)
        except TimeoutError:
            error = "timeout"
        watching.cancel()
    return {"error": error, "why": session.why, "blocked_ms": round(worst * 1000)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(call(sys.argv[1]))))
