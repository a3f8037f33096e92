"""`python -m benchmarks [command]`: measures, prints tables, and writes the figures to a file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from benchmarks.arguments import ALL, defaults, parse
from benchmarks.comparison.measure import comparison
from benchmarks.comparison.page import publish
from benchmarks.gateway import gateway
from benchmarks.growth import growth
from benchmarks.latency import latency
from benchmarks.ledger import Broken
from benchmarks.load import load, overload
from benchmarks.machine import check, commit
from benchmarks.memory import memory
from benchmarks.objects import objects
from benchmarks.profiler import profile
from benchmarks.recovery import recovery
from benchmarks.results import write
from benchmarks.scale import scale
from benchmarks.stack import where
from benchmarks.streaming import streaming
from benchmarks.throughput import throughput

Figures = dict[str, object]

MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Awaitable[Figures]]] = {
    "throughput": lambda given: throughput(given.tasks, given.in_flight, given.rounds),
    "comparison": lambda given: comparison(given.percent, given.in_flight, given.rounds, given.without),
    "latency": lambda given: latency(given.tasks),
    "recovery": lambda given: recovery(given.rounds),
    "memory": lambda given: memory(given.tasks),
    "load": lambda given: load(given.seconds),
    "overload": lambda given: overload(given.seconds, given.stream_max),
    "streaming": lambda given: streaming(given.pieces, given.readers),
    "gateway": lambda given: gateway(given.tasks, given.streams, given.rounds),
    "scale": lambda given: scale(given.tasks, given.calls, given.steps),
    "objects": lambda given: objects(given.tasks, given.rounds),
    "growth": lambda given: growth(given.tasks, given.block, given.in_flight),
}
IN_ALL = ("throughput", "latency", "recovery", "memory")


async def run(given: argparse.Namespace) -> None:
    if given.command == "profile":
        await profile(given.process, given.tasks, given.in_flight, given.lines, given.results)
        return
    if given.command == "page":
        publish(given.figures)
        return
    wanted = {name: defaults(name) for name in IN_ALL} if given.command == ALL else {given.command: given}
    figures: Figures = {}
    before = commit()
    for name, numbers in wanted.items():
        print(f"== {name}", flush=True)
        figures[name] = await MEASUREMENTS[name](numbers)
    print(f"figures are in {where(write(given.results, figures, (before, commit())))}")


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 if a measurement is invalid, because not all of the work was done."""
    given = parse(arguments)
    check()
    try:
        asyncio.run(run(given))
    except (Broken, RuntimeError, TimeoutError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
