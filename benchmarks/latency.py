"""How long one task takes while no other is in flight."""

from __future__ import annotations

from benchmarks.driver import Order
from benchmarks.figures import table
from benchmarks.ledger import ledger_of
from benchmarks.stack import started

P50_GOAL_MS = 0.8


async def latency(tasks: int) -> dict[str, object]:
    """Measure and print; warmed up by a tenth of the tasks."""
    warm = max(1, tasks // 10)
    async with started() as stack, ledger_of(stack) as ledger:
        client = await stack.start_client()
        try:
            await client.order(Order(0, warm, 1))
            done = await client.order(Order(warm, tasks, 1))
            await ledger.until_recorded(warm + tasks)
            await ledger.until_still()
            await ledger.check(warm + tasks)
            await client.stop()
        finally:
            await client.kill()
    head = ("one task at a time", "tasks", "p50 ms", "p99 ms", "p50, to reach")
    print("\n" + table(head, [("Weft", tasks, done.p50_ms, done.p99_ms, P50_GOAL_MS)]) + "\n")
    return {"tasks": tasks, "p50_ms": done.p50_ms, "p99_ms": done.p99_ms}
