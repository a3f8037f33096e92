"""Tasks per second of Weft and of the other systems, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.comparison.environment import environment, restate_server
from benchmarks.comparison.page import tables
from benchmarks.comparison.running import running
from benchmarks.comparison.systems import SYSTEMS, System
from benchmarks.driver import Drive, Order
from benchmarks.machine import Neighbours
from benchmarks.throughput import weft_round

ALONE = 200
"""Tasks of a round that are asked one at a time."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round of one system: many tasks at once, then some one at a time."""

    loaded: Drive
    alone: Drive
    cpu_seconds: float
    """Of all its processes, for the tasks at once."""
    others: float
    """Cores that other programs of the machine kept busy meanwhile."""


WEFT = "Weft"
TASKS = 12_000
"""Of a round on Weft."""
KEEPS = "each step, the task's state, its trajectory"


async def round_of(system: System, tasks: int, in_flight: int) -> Round:
    """Start a system, warm it up by a tenth of the tasks, and measure it."""
    warm = max(in_flight, tasks // 10)
    async with running(system) as started:
        await started.driver.order(Order(0, warm, in_flight))
        before, neighbours = started.cpu_seconds(), Neighbours()
        loaded = await started.driver.order(Order(warm, tasks, in_flight))
        used = started.cpu_seconds() - before
        others = neighbours.cores(used)
        alone = await started.driver.order(Order(warm + tasks, ALONE, 1))
    return Round(loaded, alone, used, others)


async def round_of_weft(tasks: int, in_flight: int) -> Round:
    done = await weft_round(tasks, in_flight, ALONE)
    assert done.alone is not None
    return Round(done.drive, done.alone, sum(done.cpu_ms.values()) * tasks / 1e6, done.others)


async def comparison(percent: int, in_flight: int, rounds: int, without: Sequence[str]) -> dict[str, object]:
    """Measure and print. `percent` scales each system's number of tasks; `without` names locks to leave out."""
    systems = [system for system in SYSTEMS if system.lock not in without]
    for system in systems:  # all installations first: one beside a measurement would slow it down
        environment(system.lock)
        if system.restate:
            restate_server()
    measured: dict[str, list[Round]] = {name: [] for name in (WEFT, *(system.name for system in systems))}

    def note(number: int, name: str, done: Round) -> None:
        measured[name].append(done)
        print(
            f"round {number} of {rounds}: {name}: {done.loaded.per_second:,.0f} tasks/s, one at a time "
            f"{done.alone.p50_ms:.2f} ms (other programs kept {done.others:.2f} cores busy)",
            flush=True,
        )

    for number in range(1, rounds + 1):
        note(number, WEFT, await round_of_weft(TASKS * percent // 100, in_flight))
        for system in systems:
            note(number, system.name, await round_of(system, system.tasks * percent // 100, in_flight))
    figures = {WEFT: summary(KEEPS, "", measured[WEFT])}
    figures.update({one.name: summary(one.keeps, one.settings, measured[one.name]) for one in systems})
    found: dict[str, object] = {"in_flight": in_flight, "rounds": rounds, "systems": figures}
    print("\n" + tables(found) + "\n")
    return found


def summary(keeps: str, settings: str, rounds: Sequence[Round]) -> dict[str, object]:
    """Medians over the rounds."""
    return {
        "keeps": keeps,
        "settings": settings,
        "tasks": rounds[0].loaded.tasks,
        "tasks_per_second": statistics.median(one.loaded.per_second for one in rounds),
        "p50_ms": statistics.median(one.loaded.p50_ms for one in rounds),
        "p99_ms": statistics.median(one.loaded.p99_ms for one in rounds),
        "alone_p50_ms": statistics.median(one.alone.p50_ms for one in rounds),
        "alone_p99_ms": statistics.median(one.alone.p99_ms for one in rounds),
        "cpu_ms_per_1000_tasks": statistics.median(one.cpu_seconds * 1e6 / one.loaded.tasks for one in rounds),
        "cores_busy_by_others": [one.others for one in rounds],
    }
