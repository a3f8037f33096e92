"""Bytes on the broker per task: finished and within its retention time, and waiting."""

from __future__ import annotations

import asyncio
import time

from benchmarks.driver import Order
from benchmarks.figures import table
from benchmarks.ledger import Ledger, ledger_of
from benchmarks.question import question
from benchmarks.stack import Stack, started
from runtime_core.client.client import Client

GOAL_BYTES = 1229
"""1.2 KiB."""
IN_FLIGHT = 64
WAITING = {"a timer": "sleeper", "a human": "doubter"}
LIMIT_SECONDS = 60.0


async def memory(tasks: int) -> dict[str, object]:
    """Measure and print. A finished task counts with its share of everything that is stored for it."""
    figures: dict[str, object] = {"tasks": tasks, "goal_bytes": GOAL_BYTES}
    async with started() as stack, ledger_of(stack) as ledger:
        per_finished, parts = await _finished(stack, ledger, tasks)
        figures["finished_bytes"], figures["finished_parts"] = per_finished, parts
        rows: list[tuple[object, ...]] = [("finished", per_finished, GOAL_BYTES)]
        for what, agent in WAITING.items():
            size = await _waiting(stack, ledger, tasks, agent)
            figures[f"waiting_for_{what.split()[-1]}_bytes"] = size
            rows.append((f"waits for {what}", size, GOAL_BYTES))
    print("\n" + table((f"a task of {tasks:,} that", "bytes on the broker", "to reach"), rows))
    print("\n" + table(("a finished task's share of", "bytes"), list(parts.items())) + "\n")
    return figures


async def _finished(stack: Stack, ledger: Ledger, tasks: int) -> tuple[float, dict[str, float]]:
    await _work(stack, Order(0, IN_FLIGHT, IN_FLIGHT))
    await _settled(ledger, IN_FLIGHT)
    before = await ledger.used_memory()
    await _work(stack, Order(IN_FLIGHT, tasks, IN_FLIGHT))
    await _settled(ledger, IN_FLIGHT + tasks)
    per_task = (await ledger.used_memory() - before) / tasks
    keys = ledger.keys
    parts = {name: await ledger.size_of(keys.base + name) / (IN_FLIGHT + tasks) for name in ("open", "index")}
    return per_task, {**parts, "its own hash, and the table of keys": per_task - sum(parts.values())}


async def _work(stack: Stack, order: Order) -> None:
    """Submit through a client that leaves, since its reply stream goes with it."""
    client = await stack.start_client()
    try:
        await client.order(order)
        await client.stop()
    finally:
        await client.kill()


async def _settled(ledger: Ledger, tasks: int) -> None:
    await ledger.until_recorded(tasks)
    await ledger.until_still()
    await ledger.check(tasks)
    await ledger.until_trimmed()


async def _waiting(stack: Stack, ledger: Ledger, tasks: int, agent: str) -> float:
    before = await ledger.used_memory()
    async with Client.connect(stack.url) as client:
        for first in range(0, tasks, IN_FLIGHT):
            numbers = range(first, min(first + IN_FLIGHT, tasks))
            await asyncio.gather(*(client.submit(agent, question(number)) for number in numbers))
        last = await client.submit(agent, question(tasks))
        deadline = time.monotonic() + LIMIT_SECONDS
        while (await last.show())["status"] != "waiting":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{last!r} did not wait after {LIMIT_SECONDS:g} s")
            await asyncio.sleep(0.02)
        await ledger.until_still()
        await ledger.until_trimmed()
    return (await ledger.used_memory() - before) / (tasks + 1)
