"""Requests between agents as objects, in one process: Weft's runtime and AutoGen's in turn."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.child import Child
from benchmarks.comparison.environment import environment
from benchmarks.comparison.running import running
from benchmarks.comparison.systems import AUTOGEN
from benchmarks.driver import Drive, Order
from benchmarks.figures import table
from benchmarks.machine import Neighbours

WEFT = "Weft"
OF_WEFT = (sys.executable, "-m", "benchmarks.objects_process")
MANY = 64


async def objects(tasks: int, rounds: int) -> dict[str, object]:
    """Measure and print. Each round has fresh processes, and is warmed up by a tenth of its tasks."""
    environment(AUTOGEN.lock)
    alone: dict[str, list[Drive]] = {WEFT: [], AUTOGEN.name: []}
    many: dict[str, list[Drive]] = {WEFT: [], AUTOGEN.name: []}
    for number in range(1, rounds + 1):
        for name in many:
            neighbours = Neighbours()
            async with _driver(name) as driver:
                await driver.order(Order(0, max(MANY, tasks // 10), MANY))
                used = driver.cpu_seconds()
                many[name].append(await driver.order(Order(0, tasks, MANY)))
                alone[name].append(await driver.order(Order(0, max(1, tasks // 10), 1)))
                others = neighbours.cores(driver.cpu_seconds() - used)
            print(
                f"round {number} of {rounds}: {name}: {many[name][-1].per_second:,.0f} tasks/s, one at a time "
                f"{alone[name][-1].p50_ms:.2f} ms (other programs, with Weft's private server, kept {others:.2f} "
                "cores busy)",
                flush=True,
            )
    figures = {name: _summary(many[name], alone[name]) for name in many}
    rows = [(name, *found.values()) for name, found in figures.items()]
    head = ("agents as objects", f"tasks/s, {MANY} in flight", "p50 ms", "p99 ms", "one at a time, p50 ms", "p99 ms")
    print("\n" + table(head, rows) + "\n")
    return {"tasks": tasks, "rounds": rounds, "systems": figures}


@asynccontextmanager
async def _driver(name: str) -> AsyncIterator[Child]:
    if name == AUTOGEN.name:
        async with running(AUTOGEN) as started:
            yield started.driver
        return
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        driver = await Child.start("client", OF_WEFT, dict(os.environ), Path(folder) / "driver.log")
        try:
            await driver.ready()
            yield driver
            await driver.stop()
        finally:
            await driver.kill()


def _summary(many: list[Drive], alone: list[Drive]) -> dict[str, float]:
    """Medians over the rounds."""
    return {
        "tasks_per_second": statistics.median(one.per_second for one in many),
        "p50_ms": statistics.median(one.p50_ms for one in many),
        "p99_ms": statistics.median(one.p99_ms for one in many),
        "alone_p50_ms": statistics.median(one.p50_ms for one in alone),
        "alone_p99_ms": statistics.median(one.p99_ms for one in alone),
    }
