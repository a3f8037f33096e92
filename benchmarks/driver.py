"""Asks questions, a given number concurrently, checks the answers and takes the times.

It runs in a separate process next to the system that it asks, and needs only the standard library, since each system
has its own environment. Orders come as lines of JSON on standard input, and each is answered by one line on standard
output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from benchmarks.figures import percentile
from benchmarks.question import answer, question

Ask = Callable[[str], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Order:
    """Questions `first` to `first + tasks - 1`, `in_flight` at a time."""

    first: int
    tasks: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Drive:
    """The result of an order. Times of single tasks in milliseconds."""

    tasks: int
    seconds: float
    cpu_seconds: float
    """CPU time of the asking process."""
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        return self.tasks / self.seconds


async def drive(ask: Ask, order: Order) -> Drive:
    """Carry out an order. Raises ValueError for a wrong answer."""
    numbers = iter(range(order.first, order.first + order.tasks))
    took: list[float] = []

    async def keep_asking() -> None:
        for number in numbers:
            began = time.perf_counter()
            given = await ask(question(number))
            took.append(time.perf_counter() - began)
            if given != answer(number):
                raise ValueError(f"question {number} was answered wrongly: {given!r:.200}")

    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(order.in_flight):
            group.create_task(keep_asking())
    seconds = time.perf_counter() - began
    if len(took) != order.tasks:
        raise ValueError(f"{order.tasks} questions were asked and {len(took)} answered")
    took.sort()
    return Drive(
        order.tasks,
        seconds,
        time.process_time() - cpu,
        percentile(took, 50) * 1000,
        percentile(took, 99) * 1000,
    )


async def serve(ask: Ask) -> None:
    """Carry out orders until standard input ends. Ends the process with one line if an order fails."""
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = Order(**json.loads(line))
        try:
            done = await drive(ask, order)
        except ExceptionGroup as failures:
            # One of them says it all: they are of the same kind, one for each task under way.
            raise SystemExit(f"{order} failed: {failures.exceptions[0]!r}") from None
        print(json.dumps(asdict(done)), flush=True)
