"""The HTTP gateway: submits per second, what it adds to the time of a submit, and many open streams."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from contextlib import closing
from typing import Any

from benchmarks.child import ROOT
from benchmarks.figures import percentile, table
from benchmarks.stack import BROKER, Stack, started
from runtime_core.client.client import Client
from runtime_core.gateway.keys import ROLES, ApiKeys
from runtime_core.wire.commands import submission_of

AGENT = "replier"
SUBMITS_GOAL = 1_500
ADDED_P50_GOAL_MS, ADDED_P99_GOAL_MS = 1.5, 10.0
CONNECTIONS = 32
BATCH = 500
RATE = 200
"""Submits per second while the added time is measured."""
READY_SECONDS = 20.0

Figures = dict[str, Any]
"""Figures by name. (Any: JSON.)"""


async def gateway(tasks: int, streams: int, rounds: int) -> dict[str, object]:
    """Measure and print."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bounds = {"WEFT_HTTP_STREAMS_MAX": str(streams + 1), "WEFT_HTTP_CALLER_STREAMS_PERCENT": "100"}
    settings = {"WEFT_HTTP_AUTH": "keys", "WEFT_HTTP_PORT": str(port), **bounds}
    async with started(settings) as stack, Client.connect(stack.url) as client:
        await stack.start_service("gateway")
        await _until_it_listens(port)
        _, key = await ApiKeys(client.buses[0]).create("benchmark", ROLES)
        load = await _Load.start({"url": f"http://127.0.0.1:{port}", "key": key, "agent": AGENT})
        try:
            await load.do("submits", tasks=max(100, tasks // 10), connections=CONNECTIONS)  # warms everything up
            rows = [await _capacity(stack, load, tasks) for _ in range(rounds)]
            batches = await load.do("batches", tasks=tasks, batch=BATCH)
            added = await _added(client, load, min(tasks, 2_000))
            waiting = await load.do("submits", tasks=streams, connections=CONNECTIONS, agent="doubter", ids=True)
            opened = await load.do("streams", tasks=waiting.pop("ids"))
        finally:
            await load.end()
    rows.sort(key=lambda row: row["per_second"])
    best = rows[len(rows) // 2]
    head = ("submits per second", "p50 ms", "p99 ms", "gateway, CPU µs a task", "broker", "client", "others")
    names = ("per_second", "p50_ms", "p99_ms", "gateway_us", "broker_us", "client_us", "others_us")
    print("\n" + table(head, [[row[name] for name in names] for row in rows], words=0))
    print(f"\nsubmits per second over {CONNECTIONS} connections, to reach: {SUBMITS_GOAL:,}")
    print(f"in batches of {BATCH}: {batches['per_second']:,.0f} tasks per second\n")
    print(table(tuple(added), [tuple(added.values())], words=0))
    print(
        f"\nadded to a submit at {RATE} per second, to reach: p50 {ADDED_P50_GOAL_MS} ms, p99 {ADDED_P99_GOAL_MS} ms\n"
    )
    print(table(tuple(opened), [tuple(opened.values())], words=0) + "\n")
    return {"median": best, "batch_per_second": batches["per_second"], **added, **opened}


class _Load:
    """The process that sends the requests."""

    def __init__(self, process: asyncio.subprocess.Process, always: Figures) -> None:
        self._process = process
        self._always = always

    @classmethod
    async def start(cls, always: Figures) -> _Load:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.gateway_client", cwd=ROOT, limit=2**24,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(process, always)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def do(self, do: str, **order: object) -> Figures:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**self._always, "do": do, **order}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client of the gateway failed at {do}")
        found: Figures = json.loads(line)
        return found

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def _capacity(stack: Stack, load: _Load, tasks: int) -> Figures:
    """Return submits per second, and the CPU time of each process per task."""
    from benchmarks.child import cpu_seconds

    before, client = stack.cpu_seconds(), cpu_seconds(load.pid)
    done = await load.do("submits", tasks=tasks, connections=CONNECTIONS)
    used = {name: (value - before[name]) * 1e6 / tasks for name, value in stack.cpu_seconds().items()}
    done["gateway_us"], done["broker_us"] = used.pop("gateway"), used.pop(BROKER)
    done["client_us"], done["others_us"] = (cpu_seconds(load.pid) - client) * 1e6 / tasks, sum(used.values())
    return done


async def _added(client: Client, load: _Load, tasks: int) -> Figures:
    """Return how long a submit takes over HTTP and directly, at the same rate."""
    over_http = await load.do("submits", tasks=tasks, connections=CONNECTIONS, rate=RATE)
    times: list[float] = []

    async def one(due: float, number: int) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        data: dict[str, object] = {"agent": AGENT, "input": f"question {number}", "metadata": {"order": number}}
        new = submission_of(data, source="benchmark", event_id=f"direct-{number}")
        await client.start(new, expects_answer=False)
        times.append((time.perf_counter() - due) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(one(began + number / RATE, number) for number in range(tasks)))
    times.sort()
    direct = {"direct_p50_ms": percentile(times, 50), "direct_p99_ms": percentile(times, 99)}
    found = {"http_p50_ms": over_http["p50_ms"], "http_p99_ms": over_http["p99_ms"], **direct}
    found["added_p50_ms"] = found["http_p50_ms"] - found["direct_p50_ms"]
    found["added_p99_ms"] = found["http_p99_ms"] - found["direct_p99_ms"]
    return found


async def _until_it_listens(port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not listen within {READY_SECONDS:g} s") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
