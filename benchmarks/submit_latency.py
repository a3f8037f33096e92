"""How long a submit takes under each durability: `python -m benchmarks.submit_latency`.

One client submits one task after the other; nothing handles them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect
from runtime_core.wire.commands import Submission
from tests.servers.process import Append
from tests.servers.valkey import ValkeyServer

SUBMITS = 1000
NAMESPACE = "latency"


async def main() -> None:
    cases: list[tuple[str, Append | None]] = [
        ("fast", None), ("fast", "no"), ("fast", "everysec"), ("fast", "always"), ("fsync", "always"),
        ("quorum", "everysec"),
    ]  # fmt: skip
    print(f"{SUBMITS} submits each, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(f"memory://              fast    {await measure('memory://', 'fast')}")
    for durability, append in cases:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            server = stack.enter_context(ValkeyServer(Path(folder) / "master", append=append))
            if durability == "quorum":
                replica = ValkeyServer(
                    Path(folder) / "replica", append=append, options=("--replicaof", f"127.0.0.1 {server.port}")
                )
                stack.enter_context(replica)
                await in_sync(server.url)
            told = await measure(server.url, durability)
        print(f"appendfsync {append or 'off':10} {durability:7} {told}")


async def in_sync(url: str) -> None:
    transport = await connect(url)
    while b"state=online" not in bytes(str(await transport.call("INFO", "replication")), "utf-8"):
        await asyncio.sleep(0.05)
    await transport.close()


async def measure(url: str, durability: str) -> str:
    transport = await connect(url)
    bus = EventBus(transport, Keys(NAMESPACE, 0), durability=durability)
    await bus.check_durability()
    await transport.call("HSET", bus.keys.agents, "writer", "agent")
    times = []
    for number in range(SUBMITS):
        new = Submission(
            task_id=f"t{number}", source="bench", event_id=str(number), digest="d", agent="writer", input_json=b"1"
        )
        began = time.perf_counter()
        await bus.submit(new)
        times.append((time.perf_counter() - began) * 1000)
    await transport.close()
    times.sort()
    return f"p50 {statistics.median(times):6.2f} ms   p99 {times[int(len(times) * 0.99)]:6.2f} ms"


if __name__ == "__main__":
    asyncio.run(main())
