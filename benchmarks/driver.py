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
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass

from benchmarks.figures import percentile
from benchmarks.question import answer, question

Ask = Callable[[str], Awaitable[object]]
PROBE_SECONDS = 2.0


class Refused(Exception):
    """The system asks to try again later. Only an order at a fixed rate may meet it: it counts these answers."""


@dataclass(frozen=True, slots=True)
class Order:
    """Questions `first` to `first + tasks - 1`: `in_flight` at a time, or `per_second`, whatever is in flight."""

    first: int
    tasks: int
    in_flight: int
    per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Drive:
    """The result of an order. Times of single tasks in milliseconds."""

    tasks: int
    """Those that were answered."""
    seconds: float
    cpu_seconds: float
    """CPU time of the asking process."""
    p50_ms: float
    p99_ms: float
    p999_ms: float = 0.0
    refused: int = 0

    @property
    def per_second(self) -> float:
        return self.tasks / self.seconds


async def drive(ask: Ask, order: Order) -> Drive:
    """Carry out an order. Raises ValueError for a wrong answer."""
    took: list[float] = []
    refused = 0

    async def ask_one(number: int, began: float) -> None:
        nonlocal refused
        try:
            given = await ask(question(number))
        except Refused:
            if not order.per_second:
                raise
            refused += 1
            return
        took.append(time.perf_counter() - began)
        if given != answer(number):
            raise ValueError(f"question {number} was answered wrongly: {given!r:.200}")

    cpu, began = time.process_time(), time.perf_counter()
    await (_at_rate(order, ask_one) if order.per_second else _in_turn(order, ask_one))
    seconds = time.perf_counter() - began
    if len(took) + refused != order.tasks:
        raise ValueError(f"{order.tasks} questions were asked and {len(took)} answered")
    took.sort()
    p50, p99, p999 = (percentile(took, percent) * 1000 if took else 0.0 for percent in (50, 99, 99.9))
    return Drive(len(took), seconds, time.process_time() - cpu, p50, p99, p999, refused)


AskOne = Callable[[int, float], Coroutine[None, None, None]]
"""Asks a question, by its number and the time at which it was due."""


async def _in_turn(order: Order, ask_one: AskOne) -> None:
    """Ask the next question when one has been answered, so at most `in_flight` wait."""
    numbers = iter(range(order.first, order.first + order.tasks))

    async def keep_asking() -> None:
        for number in numbers:
            await ask_one(number, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(order.in_flight):
            group.create_task(keep_asking())


async def _at_rate(order: Order, ask_one: AskOne) -> None:
    """Ask each question when it is due. Its time counts from then, even if the driver is late."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for place in range(order.tasks):
            due = began + place / order.per_second
            while (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            group.create_task(ask_one(order.first + place, due))
            if place % 16 == 15:
                await asyncio.sleep(0)  # a driver that is late still reads answers


async def until_answered(ask: Ask) -> None:
    """Wait until a system's workers are there: some systems never answer earlier questions."""
    while True:
        try:
            await asyncio.wait_for(ask("Is anybody there?"), PROBE_SECONDS)
        except Exception:
            await asyncio.sleep(0.1)
        else:
            return


async def serve(ask: Ask) -> None:
    """Carry out orders until standard input ends. Ends the process with one line if an order fails."""
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = Order(**json.loads(line))
        try:
            done = await drive(ask, order)
        except ExceptionGroup as failures:
            # One of them is enough: they are of the same kind, one for each task under way.
            raise SystemExit(f"{order} failed: {failures.exceptions[0]!r}") from None
        print(json.dumps(asdict(done)), flush=True)
