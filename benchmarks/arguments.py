"""The benchmarks and their sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison.systems import SYSTEMS
from benchmarks.profiler import CLIENT
from benchmarks.results import FOLDER
from benchmarks.stack import SERVICES

ALL = "all"
"""The default benchmarks: throughput, latency, recovery and memory, in less than six minutes."""
LOCKS = tuple(dict.fromkeys(system.lock for system in SYSTEMS))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """`command` and its numbers. Ends the process with status 2 for invalid arguments."""
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measures Weft on this machine.")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder for the figures (default: %(default)s)")
    parser.set_defaults(command=ALL)
    commands = parser.add_subparsers(title="what to do (default: throughput, latency, recovery, memory)", metavar="")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=name)
        return added

    def number(added: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
        added.add_argument(f"--{name}", type=_whole, default=default, help=f"{text} (default: {default})")

    one = command("throughput", "tasks per second beside AutoGen in memory, in turn; CPU time by process")
    number(one, "tasks", 12_000, "tasks of one round")
    number(one, "in-flight", 64, "tasks in flight")
    number(one, "rounds", 3, "rounds of each system; medians are shown")
    one = command("comparison", "Weft beside AutoGen, FastStream, taskiq, Celery, LangGraph, DBOS and Restate, in turn")
    number(one, "percent", 100, "share of each system's usual number of tasks")
    number(one, "in-flight", 64, "tasks in flight")
    number(one, "rounds", 3, "rounds of each system; medians are shown")
    one.add_argument("--without", action="append", default=[], choices=LOCKS, help="a system to leave out; repeatable")
    one = command("page", "write the comparison into docs/performance.md")
    one.add_argument("figures", type=Path, nargs="?", help="a file of figures (default: the newest with a comparison)")
    one = command("latency", "how long a task takes, one at a time")
    number(one, "tasks", 2_000, "tasks")
    one = command("load", "how long tasks take at 25, 50 and 75 %% of the capacity, asked at a fixed rate")
    number(one, "seconds", 20, "at each rate")
    one = command("overload", "twice the capacity: how much is refused, how long the rest takes, when all is done")
    number(one, "seconds", 300, "at twice the capacity")
    number(one, "stream-max", 100, "WEFT_STREAM_MAX: open work of a stream before submits are refused")
    one = command("growth", "tasks per second and the broker's memory, block by block")
    number(one, "tasks", 200_000, "tasks in all")
    number(one, "block", 10_000, "tasks of one block")
    number(one, "in-flight", 64, "tasks in flight")
    one = command("recovery", "how long until another handler continues the deliveries of a killed one")
    number(one, "rounds", 2, "kills of each kind of handler")
    one = command("memory", "bytes on the broker per finished and per waiting task")
    number(one, "tasks", 10_000, "tasks of each kind")
    one = command("streaming", "how long a piece of output takes to its readers, and how many a second one run emits")
    number(one, "pieces", 100_000, "pieces")
    number(one, "readers", 1_000, "readers of one task")
    one = command("gateway", "submits per second over HTTP, what the gateway adds to a submit, and many open streams")
    number(one, "tasks", 6_000, "tasks of one round")
    number(one, "streams", 2_000, "streams that are open at once")
    number(one, "rounds", 3, "rounds of submits; their median counts")
    one = command("scale", "partitions, 10,000 keys, 300 calls at once, replays of 1,000 steps, waking a task")
    number(one, "tasks", 10_000, "tasks of one round, and keys")
    number(one, "calls", 300, "calls of one run at once")
    number(one, "steps", 1_000, "steps of a run that is replayed")
    one = command("objects", "requests between agents as objects in one process, beside AutoGen's, in turn")
    number(one, "tasks", 5_000, "tasks of one round")
    number(one, "rounds", 3, "rounds of each system; medians are shown")
    one = command("profile", "the functions with the most own time in one process")
    one.add_argument("process", choices=(*SERVICES, CLIENT))
    number(one, "tasks", 6_000, "tasks")
    number(one, "in-flight", 64, "tasks in flight")
    number(one, "lines", 40, "functions to show")
    return parser.parse_args(arguments)


def defaults(command: str) -> argparse.Namespace:
    """The default numbers of a command."""
    return parse([command])


def _whole(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value
