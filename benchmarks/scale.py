"""How costs change with size: partitions, tasks with keys, calls of one run, steps of a replay, and waking a task."""

from __future__ import annotations

import asyncio
import time

from benchmarks.driver import Order, drive
from benchmarks.figures import percentile, table
from benchmarks.ledger import ledger_of
from benchmarks.stack import BROKER, Stack, started
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.wire.events import HUMAN_REQUESTED

PARTITIONS = (1, 2, 4)
IN_FLIGHT = 64
LIMIT_SECONDS = 300.0
WAKES = 200
TIMES = 5
"""Repetitions of one large task; the median counts."""


async def scale(tasks: int, calls: int, steps: int) -> dict[str, object]:
    """Measure and print. `tasks` also is the number of keys, each with one task."""
    figures: dict[str, object] = {"tasks": tasks, "calls": calls, "steps": steps}
    rows = [(f"{count} partition{'s' if count > 1 else ''}", *await _partitions(tasks, count)) for count in PARTITIONS]
    async with started() as stack, Client.connect(stack.url) as client:
        rows += [(f"{tasks:,} keys", *await _keys(stack, client, tasks))]
        wakes = await _wakes(client)
        few, many = [await _calls(client, count) for count in (1, calls)]
        fresh, replayed = [await _replay(stack, client, count) for count in (1, steps)]
    print("\n" + table(("64 in flight, one broker", "tasks/s", "broker, CPU ms per 1,000"), rows))
    figures["rows"] = [list(row) for row in rows]
    single = {
        f"from a signal until the function goes on, p50 of {WAKES}": percentile(wakes, 50),
        "the same, p99": percentile(wakes, 99),
        "a run with one tool call": few,
        f"a run with {calls} tool calls at once": many,
        "from a signal to the end, in a new handler, after 1 step": fresh,
        f"the same after {steps:,} steps": replayed,
    }
    print("\n" + table(("one task at a time", "ms"), list(single.items())) + "\n")
    return {**figures, "ms": single}


async def _partitions(tasks: int, count: int) -> tuple[float, float]:
    """Return tasks per second, and the broker's CPU time."""
    async with started({"WEFT_PARTITIONS": str(count)}) as stack, ledger_of(stack) as ledger:
        driver = await stack.start_client()
        try:
            await driver.order(Order(0, tasks // 10, IN_FLIGHT))
            before = stack.cpu_seconds()[BROKER]
            done = await driver.order(Order(tasks // 10, tasks, IN_FLIGHT))
            await ledger.until_recorded(tasks // 10 + tasks)
            used = stack.cpu_seconds()[BROKER] - before
            await driver.stop()
        finally:
            await driver.kill()
    return done.per_second, used * 1e6 / tasks


async def _keys(stack: Stack, client: Client, tasks: int) -> tuple[float, float]:
    """The same for tasks with a key each."""
    number = 0

    async def ask(text: str) -> object:
        nonlocal number
        number += 1
        return (await (await client.submit("asker", text, key=f"key-{number}")).result(LIMIT_SECONDS)).value()

    before = stack.cpu_seconds()[BROKER]
    done = await drive(ask, Order(0, tasks, IN_FLIGHT))
    return done.per_second, (stack.cpu_seconds()[BROKER] - before) * 1e6 / tasks


async def _wakes(client: Client) -> list[float]:
    """Return how long waiting runs took to continue, in milliseconds, in ascending order."""
    took = []
    for number in range(WAKES):
        task = await client.submit("waker", f"question {number}")
        asked = await _question(task)
        began = time.time_ns()
        await task.signal(asked, "yes")
        went_on = (await task.result(LIMIT_SECONDS)).value()
        took.append((went_on - began) / 1e6)
    return sorted(took)


async def _calls(client: Client, count: int) -> float:
    """Return the median time of a run that calls a tool this many times at once, in milliseconds."""
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        found = (await (await client.submit("spreader", count)).result(LIMIT_SECONDS)).value()
        took.append((time.perf_counter() - began) * 1000)
        if found != count:
            raise RuntimeError(f"{found!r} of {count} calls were answered")
    return percentile(sorted(took), 50)


async def _replay(stack: Stack, client: Client, steps: int) -> float:
    """Return how long a run takes from an answer to its end, in a handler that first has to replay its steps."""
    took = []
    for _ in range(TIMES):
        task = await client.submit("stepper", steps)
        asked = await _question(task)
        await stack.services.pop("agent_handler").stop()
        await stack.start_service("agent_handler")
        await stack.until_alive()
        await _calls(client, 1)  # a new handler's first turns are slow
        began = time.perf_counter()
        await task.signal(asked, "yes")
        if (await task.result(LIMIT_SECONDS)).value() != steps:
            raise RuntimeError(f"the run did not take {steps} steps")
        took.append((time.perf_counter() - began) * 1000)
    return percentile(sorted(took), 50)


async def _question(task: TaskHandle) -> str:
    """Wait until the task asks a person, and return the id of the question."""
    async with asyncio.timeout(LIMIT_SECONDS):
        async for event in task.stream():
            if event.type == HUMAN_REQUESTED:
                return event.request_id
    raise RuntimeError(f"{task!r} ended without a question")
