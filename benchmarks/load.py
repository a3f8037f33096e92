"""Measures how long tasks take at a fixed rate, below and above the capacity."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from benchmarks.child import Child
from benchmarks.driver import Drive, Order
from benchmarks.figures import table
from benchmarks.ledger import ledger_of
from benchmarks.stack import started

SHARES = (25, 50, 75)
"""Per cent of the capacity."""
CLOSED = Order(0, 6_000, 64)
"""Measures the capacity."""
HEAD = ("load", "asked per second", "answered", "refused", "p50 ms", "p99 ms", "p99.9 ms")


async def load(seconds: int) -> dict[str, object]:
    """Measure each share of the capacity for some seconds, and print."""
    async with started() as stack, ledger_of(stack) as ledger:
        client = await stack.start_client()
        try:
            capacity, asked = await _capacity(client)
            rows: list[tuple[object, ...]] = []
            found: dict[str, object] = {"capacity_per_second": capacity}
            for share in SHARES:
                rate = capacity * share / 100
                done = await client.order(Order(asked, int(rate * seconds), 0, rate))
                asked += int(rate * seconds)
                rows.append(_row(f"{share} %", rate, done))
                found[f"{share}_percent"] = asdict(done)
            await ledger.until_recorded(asked)
            await ledger.until_still()
            await ledger.check(asked)
            await client.stop()
        finally:
            await client.kill()
    print("\n" + table(HEAD, rows) + "\n")
    return found


async def overload(seconds: int, stream_max: int) -> dict[str, object]:
    """Ask for twice the capacity; then wait until everything that was accepted has been done and recorded."""
    settings = {"WEFT_STREAM_MAX": str(stream_max)}
    async with started(settings) as stack, ledger_of(stack) as ledger:
        client = await stack.start_client()
        try:
            capacity, asked = await _capacity(client, min(CLOSED.in_flight, stream_max))
            half = await client.order(Order(asked, int(capacity * 5), 0, capacity / 2))
            asked += half.tasks
            done = await client.order(Order(asked, int(capacity * 2 * seconds), 0, capacity * 2))
            began = time.perf_counter()
            await ledger.until_recorded(asked + done.tasks)
            drained = time.perf_counter() - began
            await ledger.until_still()
            peak = int((await ledger.info("memory"))["used_memory_peak"])
            await client.stop()
        finally:
            await client.kill()
    rows = [_row("50 %", capacity / 2, half), _row("200 %", capacity * 2, done)]
    print("\n" + table(HEAD, rows))
    print(f"\nall was recorded {drained:.1f} s after the last answer; the broker held at most {peak / 1e6:.0f} MB\n")
    return {
        "capacity_per_second": capacity, "stream_max": stream_max, "half": asdict(half), "twice": asdict(done),
        "drained_seconds": drained, "peak_bytes": peak,
    }  # fmt: skip


async def _capacity(client: Child, in_flight: int = CLOSED.in_flight) -> tuple[float, int]:
    """Tasks per second with so many in flight, and how many were asked so far."""
    done = await client.order(replace(CLOSED, in_flight=in_flight))
    return done.per_second, CLOSED.tasks


def _row(what: str, rate: float, done: Drive) -> tuple[object, ...]:
    return (what, rate, done.tasks, done.refused, done.p50_ms, done.p99_ms, done.p999_ms)
