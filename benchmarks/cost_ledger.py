"""The cost of one task, in counts that do not depend on load: `python -m benchmarks.cost_ledger [process]`.

The measured task of `app.py` runs one at a time. Counted per task: calls of Python functions in each process, commands
that the broker runs inside each function, commands that clients send, and bytes. `cost_ledger.toml` bounds each.

A process that idles makes calls too (heartbeats, timers, reads that time out): those are counted first, per second, and
subtracted. Recorder and state-manager are stopped while tasks run, so that both read everything in full batches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import secrets
import signal
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis.asyncio

from benchmarks.child import ROOT, Child
from benchmarks.driver import Order
from benchmarks.figures import table
from benchmarks.ledger import Ledger, ledger_of
from benchmarks.profiler import CLIENT
from benchmarks.stack import SERVICES, Stack, started, where

BOUNDS = ROOT / "benchmarks" / "cost_ledger.toml"
PROCESSES = (CLIENT, *SERVICES)
BATCHED = ("state_manager", "trajectory_recorder")
"""Stopped while tasks run: otherwise the sizes of their reads would depend on timing."""
SETTINGS = {"WEFT_LEASE_SECONDS": "60"}
"""Long enough to measure, with rare heartbeats."""
WARM, TASKS, ROUNDS, WATCHED = 30, 40, 5, 10
IDLE_SECONDS = 1.0
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.005
BYTES = ("bytes_in", "bytes_out")
"""The share of heartbeats can only be estimated. All other counts of the broker are exact."""
ABOVE, BELOW = {"calls": 0.1, "bytes": 0.2}, {"calls": 0.2, "bytes": 0.3}
"""How far counts may lie above their bound, and below it before the bound has to be lowered."""
BY_THE_CLOCK = ("state_manager",)
"""Processes with periodic work: a slower machine counts more of their calls per task."""

_LIBRARY = re.compile(r"^weft_[0-9a-f]+_")


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of one task."""

    calls: dict[str, float]
    """Calls of Python functions, by process."""
    broker: dict[str, float]
    """Commands by name inside functions, `commands` in all, `round_trips` of clients, `bytes_in` and `bytes_out`."""
    functions: dict[str, Counter[str]]
    """Functions of the broker that a task calls, with the commands of one call by name."""
    by_function: dict[str, dict[str, float]]
    """Calls by process and Python function."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of the cost of one task, from `cost_ledger.toml`."""

    python: str
    """The version of Python that the bounds of calls are for: another one counts some calls otherwise."""
    calls: Mapping[str, float]
    broker: Mapping[str, float]

    @classmethod
    def read(cls, path: Path = BOUNDS) -> Self:
        with path.open("rb") as file:
            return cls(**tomllib.load(file))

    def differences(self, costs: Costs) -> list[str]:
        """Return a sentence with the remedy for each count that is over its bound, or well below it."""
        here = ".".join(platform.python_version_tuple()[:2])
        found = _differences("calls", self.calls, costs.calls) if here == self.python else []
        return found + _differences("broker", self.broker, costs.broker)


def _differences(section: str, bounds: Mapping[str, float], counts: Mapping[str, float]) -> list[str]:
    found = []
    for name in sorted({*bounds, *counts}):
        count, bound = counts.get(name, 0.0), bounds.get(name, 0.0)
        kind = "bytes" if name in BYTES else section
        if name in BY_THE_CLOCK:
            continue
        if count > bound * (1 + ABOVE.get(kind, 0)):
            found.append(f"{section}.{name} is {count:g} per task, over its bound of {bound:g}: make the task cheaper")
        elif count < bound * (1 - BELOW.get(kind, 0)):
            found.append(f"{section}.{name} is {count:g} per task, below its bound of {bound:g}: lower the bound")
    return found


async def measure() -> Costs:
    async with _counted_stack() as (stack, ledger, client):
        counted = _Counted(stack, client)
        await client.order(Order(0, WARM, 1))
        await ledger.until_recorded(WARM)
        await ledger.until_trimmed()
        with counted.batched():
            functions, round_trips = await _watched(stack, client)
        done = WARM + WATCHED
        await _until_read(ledger, done)
        idle = await _idle(counted, ledger)
        rounds = []
        for _ in range(ROUNDS):
            rounds.append(await _round(counted, ledger, client, done, idle))
            done += TASKS
        await ledger.check(done)
        await client.stop()
    by_function = {process: _usual([calls[process] for calls, _ in rounds]) for process in PROCESSES}
    commands = sum(functions.values(), Counter[str]())
    broker = {
        "commands": float(commands.total()),
        **{name: float(count) for name, count in sorted(commands.items())},
        "round_trips": round_trips,
        **{name: statistics.median(sizes[name] for _, sizes in rounds) for name in BYTES},
    }
    calls = {process: sum(counts.values()) for process, counts in by_function.items()}
    return Costs(calls, broker, functions, by_function)


async def _until_read(ledger: Ledger, tasks: int) -> None:
    """Wait until all readers of the record have read all of it."""
    await ledger.until_recorded(tasks)
    await ledger.until_trimmed()


async def _round(
    counted: _Counted, ledger: Ledger, client: Child, first: int, idle: _Look
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the calls per task by process and function, and the bytes per task."""
    before = await _look(counted, ledger)
    with counted.batched():
        await client.order(Order(first, TASKS, 1))
        after = await _look(counted, ledger, but=BATCHED)
    await _until_read(ledger, first + TASKS)
    last = await _look(counted, ledger)
    seconds = after.at - before.at
    calls = {}
    for process in PROCESSES:
        end = last if process in BATCHED else after
        spent = {name: count - before.calls[process].get(name, 0) for name, count in end.calls[process].items()}
        for name, in_a_second in idle.calls[process].items():
            # Batches of work and of idle reads cannot be distinguished.
            spent[name] = 0 if process in BATCHED else spent[name] - in_a_second * seconds
        calls[process] = {name: count / TASKS for name, count in spent.items()}
    return calls, {
        name: (last.bytes[name] - before.bytes[name] - idle.bytes[name] * (last.at - before.at)) / TASKS
        for name in BYTES
    }


def _usual(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the calls of each task, in whole numbers: occasional calls are left out.

    A busy machine only adds calls, such as second reads of a socket, so the lowest count of all rounds is the task's.
    """
    names = {name for calls in rounds for name in calls}
    usual = {name: min(calls.get(name, 0) for calls in rounds) for name in names}
    return {name: float(round(calls)) for name, calls in usual.items() if round(calls) > 0}


@dataclass(frozen=True, slots=True)
class _Look:
    """Counts at one time, or of one second."""

    at: float
    calls: dict[str, dict[str, float]]
    bytes: dict[str, float]


class _Counted:
    """The processes that count their calls."""

    def __init__(self, stack: Stack, client: Child) -> None:
        self._folder = stack.folder
        self._children = {CLIENT: client, **stack.services}

    async def calls(self, process: str) -> dict[str, float]:
        """Ask a process for its counts so far. Raises RuntimeError if it does not answer."""
        child, path = self._children[process], self._folder / f"{process}.counts"
        path.unlink(missing_ok=True)
        os.kill(child.pid, signal.SIGUSR1)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{process} has not counted within {ANSWER_SECONDS:g} s: {child.said()}")
            await asyncio.sleep(POLL_SECONDS)
        counts: dict[str, float] = json.loads(path.read_bytes())
        return counts

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Stop the processes that read in batches, for the time of the block."""
        try:
            for process in BATCHED:
                os.kill(self._children[process].pid, signal.SIGSTOP)
            yield
        finally:
            for process in BATCHED:
                os.kill(self._children[process].pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def _counted_stack() -> AsyncIterator[tuple[Stack, Ledger, Child]]:
    async with started(SETTINGS, counted=True) as stack, ledger_of(stack) as ledger:
        client = await stack.start_client(counted=True)
        try:
            yield stack, ledger, client
        finally:
            await client.kill()


async def _look(counted: _Counted, ledger: Ledger, *, but: tuple[str, ...] = ()) -> _Look:
    calls = {process: await counted.calls(process) for process in PROCESSES if process not in but}
    told = await ledger.info("stats")
    return _Look(
        time.monotonic(),
        calls,
        {"bytes_in": float(told["total_net_input_bytes"]), "bytes_out": float(told["total_net_output_bytes"])},
    )


async def _idle(counted: _Counted, ledger: Ledger) -> _Look:
    """Return what each process and the broker do in a second without any task."""
    first = await _look(counted, ledger)
    await asyncio.sleep(IDLE_SECONDS)
    second = await _look(counted, ledger)
    seconds = second.at - first.at
    return _Look(
        0,
        {
            process: {
                name: (count - first.calls[process].get(name, 0)) / seconds
                for name, count in counts.items()
                if count > first.calls[process].get(name, 0)
            }
            for process, counts in second.calls.items()
        },
        {name: (second.bytes[name] - first.bytes[name]) / seconds for name in first.bytes},
    )


async def _watched(stack: Stack, client: Child) -> tuple[dict[str, Counter[str]], float]:
    """Return the commands of the functions that a task calls, per task, and how many commands clients send for it."""
    inside: dict[str, Counter[str]] = {}
    calls: Counter[str] = Counter()
    function, mark = "", secrets.token_hex(8)
    server = redis.asyncio.from_url(stack.url)
    try:
        async with server.monitor() as monitor:
            await client.order(Order(WARM, WATCHED, 1))
            await server.echo(mark)
            async for seen in monitor.listen():
                words = str(seen["command"]).split(" ", 2)
                name = words[0].upper()
                if seen["client_type"] == "lua":
                    inside.setdefault(function, Counter())[name] += 1
                    continue
                function = _LIBRARY.sub("", words[1]) if name == "FCALL" else name
                if name == "ECHO" and words[1] == mark:
                    break
                calls[function] += 1
    finally:
        await server.aclose()
    # A heartbeat or a timer belongs to no task.
    of_tasks = {name: count for name, count in calls.items() if count >= WATCHED}
    commands = {
        name: Counter({command: round(count / WATCHED) for command, count in inside[name].items()})
        for name in of_tasks
        if name in inside
    }
    return commands, float(sum(round(count / WATCHED) for count in of_tasks.values()))


def report(costs: Costs, bounds: Bounds) -> str:
    def rows(counts: Mapping[str, float], bounds: Mapping[str, float]) -> list[tuple[object, ...]]:
        return [(name, count, bounds.get(name, "")) for name, count in counts.items()]

    return "\n\n".join(
        (
            table(("Python calls per task", "counted", "bound"), rows(costs.calls, bounds.calls)),
            table(("broker, per task", "counted", "bound"), rows(costs.broker, bounds.broker)),
            table(
                ("function", "commands", "by name"),
                [
                    (
                        name,
                        float(inside.total()),
                        ", ".join(f"{command} {count:g}" for command, count in sorted(inside.items())),
                    )
                    for name, inside in costs.functions.items()
                ],
            ),
        )
    )


def main(arguments: list[str]) -> int:
    """Return the exit status: 1 if a count is over its bound or well below it."""
    parser = argparse.ArgumentParser("python -m benchmarks.cost_ledger", description="Count what one task costs.")
    parser.add_argument("process", nargs="?", choices=PROCESSES, help="list the functions that this process calls")
    given = parser.parse_args(arguments)
    costs, bounds = asyncio.run(measure()), Bounds.read()
    print(report(costs, bounds))
    if given.process:
        listed = sorted(costs.by_function[given.process].items(), key=lambda item: -item[1])
        print("\n" + table(("function", "calls per task"), [item for item in listed if item[1] >= 0.1]))
    found = bounds.differences(costs)
    print("\n".join(("", *found)) if found else f"\nall within {where(BOUNDS)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
