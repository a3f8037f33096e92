"""Output while a task runs: the time of a piece from `ctx.emit` to its readers, and pieces per second of one run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import percentile, table
from benchmarks.stack import Stack, started
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.wire.events import OUTPUT_DELTA

HOP_GOAL_MS = 5.0
RATE_GOAL = 20_000
SLOWLY_SECONDS = 0.01
"""The time between two pieces where their way is measured."""
OUTPUT_MAX = 4 * 1024**3
LIMIT_SECONDS = 300.0


async def streaming(pieces: int, readers: int) -> dict[str, object]:
    """Measure and print; `pieces` of the fast output, and a hundredth of them slowly."""
    async with started({"WEFT_OUTPUT_MAX_BYTES": str(OUTPUT_MAX)}) as stack, Client.connect(stack.url) as client:
        slow = max(10, pieces // 100)
        await _hops(client, slow // 10, 1)  # warms everything up
        one, many = await _hops(client, slow, 1), await _hops(client, max(10, slow // 10), readers)
        few = await _rate(stack, client, pieces // 10)
        all_ = await _rate(stack, client, pieces)
    rows = [(count, percentile(hops, 50), percentile(hops, 99)) for count, hops in ((1, one), (readers, many))]
    head = ("readers of a task", "p50 ms from emit to a reader", "p99 ms")
    print("\n" + table(head, rows, words=0) + f"\n\np99 of one reader, to reach: {HOP_GOAL_MS} ms")
    head = ("small pieces of one run", "per second", "peak memory of the handler, MiB")
    print("\n" + table(head, [(pieces // 10, *few), (pieces, *all_)], words=0))
    print(f"\npieces per second, to reach: {RATE_GOAL:,}\n")
    return {
        "pieces": pieces,
        "readers": readers,
        "hop_p50_ms": rows[0][1],
        "hop_p99_ms": rows[0][2],
        "hop_p99_ms_of_all_readers": rows[1][2],
        "pieces_per_second": all_[0],
        "handler_peak_mib": all_[1],
        "handler_peak_mib_of_a_tenth": few[1],
    }


async def _hops(client: Client, pieces: int, readers: int) -> Sequence[float]:
    """Return the sorted times in milliseconds of all pieces to all readers."""
    task = await client.submit("speaker", [pieces, SLOWLY_SECONDS], stream=True)
    async with asyncio.timeout(LIMIT_SECONDS):
        found = await asyncio.gather(*(_read(task) for _ in range(readers)))
    if any(len(times) != pieces for times in found):
        raise RuntimeError(f"the readers got {sorted({len(times) for times in found})} pieces, not {pieces}")
    return sorted(hop for times in found for hop in times)


async def _read(task: TaskHandle) -> list[float]:
    """Return how long each piece took, in milliseconds."""
    return [(time.time_ns() - event.data["value"]) / 1e6 async for event in task.stream() if event.type == OUTPUT_DELTA]


async def _rate(stack: Stack, client: Client, pieces: int) -> tuple[float, float]:
    """Return pieces per second, until the task has ended, and the peak memory of the handler in MiB."""
    began = time.perf_counter()
    task = await client.submit("speaker", [pieces, 0])
    await task.result(timeout=LIMIT_SECONDS)
    took = time.perf_counter() - began
    written = await task.bus.transport.call("XLEN", task.bus.keys.out(task.task_id))
    if written != pieces + 1:
        raise RuntimeError(f"the stream has {written!r} entries, not {pieces} pieces and the end")
    return pieces / took, _peak_mib(stack.services["agent_handler"].pid)


def _peak_mib(pid: int) -> float:
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
