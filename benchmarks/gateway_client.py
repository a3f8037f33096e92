"""The load on a gateway, as a process: `python -m benchmarks.gateway_client`.

It reads orders (JSON lines) and prints one result for each. It speaks HTTP itself, since a complete client would take
more CPU time than the gateway that it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.figures import percentile

HEAD_END = b"\r\n\r\n"
FINAL = b"event: weft.task.cancelled\n"
SECONDS = 300.0

Order = dict[str, Any]
"""What to do. (Any: JSON.)"""


class Connection:
    """One connection that sends a request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._head = head

    @classmethod
    async def open(cls, url: str, key: str) -> Connection:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        return cls(reader, writer, b"Host: localhost\r\nAuthorization: Bearer %s\r\n" % key.encode())

    async def request(self, line: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request and return status and body of the response, which names its length."""
        self._send(line, body)
        head = await self._reader.readuntil(HEAD_END)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), await self._reader.readexactly(length)

    async def follow(self, line: bytes) -> None:
        """Open a stream: return when its first bytes are here."""
        self._send(line, b"")
        await self._reader.readuntil(HEAD_END)
        await self._reader.readuntil(b"retry: ")

    async def until_final(self) -> None:
        await self._reader.readuntil(FINAL)

    def _send(self, line: bytes, body: bytes) -> None:
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) if body else b""
        self._writer.write(b"%s HTTP/1.1\r\n%s%s\r\n%s" % (line, self._head, length, body))

    def close(self) -> None:
        self._writer.close()


def task(agent: str, number: int) -> bytes:
    return json.dumps({"agent": agent, "input": f"question {number}", "metadata": {"order": number}}).encode()


async def submits(order: Order) -> Order:
    """Submit tasks over some connections, as fast as they are answered, or at a fixed rate."""
    left = iter(range(order["tasks"]))
    rate, began = order.get("rate", 0), time.perf_counter()
    times: list[float] = []
    ids: list[str] = []

    async def one(connection: Connection) -> None:
        for number in left:
            sent = time.perf_counter()
            if rate and (due := began + number / rate) > sent:
                await asyncio.sleep(due - sent)
            sent = began + number / rate if rate else sent
            status, body = await connection.request(b"POST /v1/tasks", task(order["agent"], number))
            if status != 202:
                raise RuntimeError(f"{status} {body!r}")
            times.append((time.perf_counter() - sent) * 1000)
            ids.append(json.loads(body)["task_id"])

    connections = [await Connection.open(order["url"], order["key"]) for _ in range(order["connections"])]
    began = time.perf_counter()
    await asyncio.gather(*map(one, connections))
    took = time.perf_counter() - began
    for each in connections:
        each.close()
    times.sort()
    return {
        "per_second": len(times) / took,
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "ids": ids if order.get("ids") else [],
    }


async def batches(order: Order) -> Order:
    """Submit tasks in batches, one batch after the other."""
    connection = await Connection.open(order["url"], order["key"])
    began, started = time.perf_counter(), 0
    while started < order["tasks"]:
        tasks = [json.loads(task(order["agent"], started + place)) for place in range(order["batch"])]
        status, body = await connection.request(b"POST /v1/batches", json.dumps({"tasks": tasks}).encode())
        results = json.loads(body)["results"]
        if status != 200 or any("task_id" not in each for each in results):
            raise RuntimeError(f"{status} {body[:300]!r}")
        started += len(results)
    took = time.perf_counter() - began
    connection.close()
    return {"per_second": started / took}


async def streams(order: Order) -> Order:
    """Follow tasks, request and submit others meanwhile, cancel the tasks, and wait for all final events."""
    tasks = order["tasks"]
    followers = [await Connection.open(order["url"], order["key"]) for _ in tasks]
    together = asyncio.Semaphore(100)

    async def open_one(connection: Connection, name: str) -> None:
        async with together:
            await connection.follow(b"GET /v1/tasks/%s/events" % name.encode())

    began = time.perf_counter()
    await asyncio.gather(*map(open_one, followers, tasks))
    opened = time.perf_counter() - began
    other = await Connection.open(order["url"], order["key"])
    times = []
    for name in tasks[:200]:
        began = time.perf_counter()
        await other.request(b"GET /v1/tasks/%s" % name.encode())
        times.append((time.perf_counter() - began) * 1000)
    meanwhile = await submits({**order, "tasks": 1000, "connections": 32, "agent": order["agent"]})
    ends = asyncio.gather(*(each.until_final() for each in followers))
    began = time.perf_counter()
    for name in tasks:
        status, body = await other.request(b"POST /v1/tasks/%s/cancel" % name.encode(), b"{}")
        if status != 200:
            raise RuntimeError(f"{status} {body!r}")
    async with asyncio.timeout(SECONDS):
        await ends
    took = time.perf_counter() - began
    for each in (*followers, other):
        each.close()
    times.sort()
    return {
        "streams": len(tasks),
        "opened_seconds": opened,
        "get_p50_ms": percentile(times, 50),
        "get_p99_ms": percentile(times, 99),
        "submits_per_second_meanwhile": meanwhile["per_second"],
        "ended_seconds": took,
    }


ORDERS: dict[str, Callable[[Order], Awaitable[Order]]] = {"submits": submits, "batches": batches, "streams": streams}


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        async with asyncio.timeout(SECONDS):
            print(json.dumps(await ORDERS[order["do"]](order)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
