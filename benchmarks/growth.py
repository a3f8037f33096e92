"""Measures whether throughput and the broker's memory stay constant while tasks keep coming."""

from __future__ import annotations

from benchmarks.driver import Order
from benchmarks.figures import table
from benchmarks.ledger import ledger_of
from benchmarks.machine import Neighbours
from benchmarks.stack import started

RETENTION_SECONDS = 2
DEDUPE_MAX = 10_000
HEAD = (
    "tasks so far",
    "tasks/s",
    "p50 ms",
    "p99 ms",
    "broker, MB",
    "record, entries",
    "trajectories, MB",
    "cores of others",
)


async def growth(tasks: int, block: int, in_flight: int) -> dict[str, object]:
    """Measure and print, block by block. Finished tasks leave the broker soon, so its memory must level out."""
    settings = {"WEFT_RETENTION_SECONDS": str(RETENTION_SECONDS), "WEFT_DEDUPE_MAX": str(DEDUPE_MAX)}
    rows: list[tuple[float, ...]] = []
    async with started(settings) as stack, ledger_of(stack) as ledger:
        client = await stack.start_client()
        try:
            for first in range(0, tasks, block):
                before, neighbours = sum(stack.cpu_seconds().values()), Neighbours()
                done = await client.order(Order(first, min(block, tasks - first), in_flight))
                own = sum(stack.cpu_seconds().values()) - before + done.cpu_seconds
                others = neighbours.cores(own)
                # Before the recorder has caught up, so that a backlog shows.
                broker, record = await ledger.used_memory() / 1e6, await ledger.record_length()
                store = stack.trajectories.stat().st_size / 1e6
                times = (done.per_second, done.p50_ms, done.p99_ms)
                rows.append((first + done.tasks, *times, broker, record, store, others))
                print(table(HEAD, rows).splitlines()[-1], flush=True)
            await ledger.until_recorded(tasks)
            await ledger.until_still()
            await ledger.check(tasks)
            await client.stop()
        finally:
            await client.kill()
    print("\n" + table(HEAD, rows) + "\n")
    return {"in_flight": in_flight, "blocks": [dict(zip(HEAD, row, strict=True)) for row in rows]}
