"""CPU time and commands of the broker per function of a task: `python -m benchmarks.broker_cost [--against COMMIT]`.

One process plays all roles: it submits, reads and commits with the arguments of the measured task, one kind of call at
a time, and reads the server's CPU time and its counts of commands between them. Its own CPU time does not count.
`--against` measures another commit in turn with this one, each round on a fresh server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.child import ROOT
from benchmarks.figures import table
from benchmarks.question import answer, question
from runtime_core.bus.connection import Argument, Transport
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.embedded import EmbeddedServer
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER, Keys
from runtime_core.bus.namespace import connect
from runtime_core.consumer.heartbeat import Owner
from runtime_core.wire.commands import Submission
from runtime_core.wire.envelope import ANONYMOUS

READ_AT_ONCE = 48
RECORD_AT_ONCE = 1000
KINDS = ("submit", "read", "commit_turn that waits", "commit_call", "commit_turn that ends", "read the record")
ALL = "all of them"


class Server:
    """Runs calls of one kind at a time, and measures the server's cost."""

    def __init__(self, transport: Transport, bus: EventBus) -> None:
        self._transport = transport
        self._bus = bus
        self.spent: dict[str, float] = {}
        self.commands: dict[str, Counter[str]] = {}
        """Commands that ran inside functions, by kind of call and name."""

    async def run(self, kind: str, calls: Sequence[Awaitable[object]]) -> None:
        counted, before = await self._commands(), await self._cpu_us()
        await asyncio.gather(*calls)
        self.spent[kind] = self.spent.get(kind, 0) + await self._cpu_us() - before
        self.commands[kind] = await self._commands() - counted

    async def read(self, stream: str, tasks: int) -> list[Delivery]:
        before = await self._cpu_us()
        taken: list[Delivery] = []
        while len(taken) < tasks:
            found, _ = await self._bus.read([stream], READ_AT_ONCE, 500)
            if not found:
                raise RuntimeError(f"{len(taken)} of {tasks} entries were on the stream {stream!r}")
            taken += found
        self.spent["read"] = self.spent.get("read", 0) + await self._cpu_us() - before
        return taken

    async def read_record(self) -> None:
        """Read the record as its two readers do, and trim it."""
        before, keys = await self._cpu_us(), self._bus.keys
        for group in (STATE_MANAGER, TRAJECTORY_RECORDER):
            last = b"-"
            while found := cast(
                list[list[bytes]], await self._transport.call("XRANGE", keys.record, last, "+", "COUNT", RECORD_AT_ONCE)
            ):
                last = b"(" + found[-1][0]
                await self._bus.publish_cursor(group, last[1:].decode())
        await self._bus.trim_record()
        self.spent["read the record"] = await self._cpu_us() - before

    async def _cpu_us(self) -> float:
        lines = cast(bytes, await self._transport.call("INFO", "cpu")).decode().splitlines()
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        return (float(told["used_cpu_user"]) + float(told["used_cpu_sys"])) * 1e6

    async def _commands(self) -> Counter[str]:
        lines = cast(bytes, await self._transport.call("INFO", "commandstats")).decode().splitlines()
        found = (re.match(r"cmdstat_([^:]+):calls=(\d+)", line) for line in lines)
        counts = Counter({each[1].upper(): int(each[2]) for each in found if each})
        return Counter({name: count for name, count in counts.items() if name not in ("FCALL", "INFO")})


async def measure(tasks: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return microseconds of the server's CPU time per task, and the commands per task, by kind of call."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        server = EmbeddedServer(Path(folder))
        await server.start()
        transport = await connect(server.url)
        try:
            bus = EventBus(transport, Keys("weft", 0))
            await _prepare(bus, transport)
            await _round(Server(transport, bus), bus, "w", tasks // 4)  # the server's allocator and caches
            measured = Server(transport, bus)
            await _round(measured, bus, "t", tasks)
        finally:
            await transport.close()
            await server.stop()
    spent = {kind: measured.spent[kind] / tasks for kind in KINDS}
    commands = {
        kind: {name: count / tasks for name, count in counts.items() if count >= tasks}
        for kind, counts in measured.commands.items()
    }
    return {**spent, ALL: sum(spent.values())}, commands


class _CountedServer(EmbeddedServer):
    """A server under Valgrind, which counts the instructions that it executes."""

    async def _spawn(self, binary: Path, port: int) -> None:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self.folder / 'counts'}", str(binary)]
        counted = self.folder / "counted"
        counted.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        counted.chmod(0o700)
        await super()._spawn(counted, port)

    def instructions(self) -> int:
        found = re.search(r"^totals: (\d+)", (self.folder / "counts").read_text(), re.MULTILINE)
        if found is None:
            raise RuntimeError("Valgrind has counted nothing")
        return int(found[1])


async def count_instructions(tasks: int) -> float:
    """Return how many instructions of user code the server executes per task. Other programs do not change it."""
    counts = []
    for rounds in (1, 2):
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
            server = _CountedServer(Path(folder))
            await server.start()
            transport = await connect(server.url)
            try:
                bus = EventBus(transport, Keys("weft", 0))
                await _prepare(bus, transport)
                for number in range(rounds):
                    await _round(Server(transport, bus), bus, str(number), tasks)
            finally:
                await transport.close()
                await server.stop()
            counts.append(server.instructions())
    return (counts[1] - counts[0]) / tasks


async def _prepare(bus: EventBus, transport: Transport) -> None:
    await bus.load_library()
    await bus.make_groups(["agent", "tool"])
    # As a state-manager stores its settings, but no task waits for its turn.
    await transport.call(
        "HSET", bus.keys.meta, "retention", 3600, "stream_max", 1_000_000, "ready_max", 1_000_000,
        "record_max", 1_000_000, "mailbox_max", 10_000, "dedupe_max", 1_000_000,
    )  # fmt: skip
    await transport.call("HSET", bus.keys.agents, "asker", "agent")
    await transport.call("HSET", bus.keys.tools, "look_up", "tool")
    await transport.call("XADD", bus.keys.reply("client"), "*", "seen", "1")
    await Owner(bus, "agent-handler", 3600).enter()


async def _round(server: Server, bus: EventBus, prefix: str, tasks: int) -> None:
    numbers = range(tasks)
    asked = [json.dumps(question(number)).encode() for number in numbers]
    found = [json.dumps(answer(number)).encode() for number in numbers]
    new = [_new(bus, f"{prefix}{number:031x}", asked[number]) for number in numbers]
    await server.run("submit", [bus.submit(one) for one in new])
    place = {one.task_id: number for number, one in enumerate(new)}
    turns = await server.read("agent", tasks)
    now = time.time_ns() // 1_000_000
    waits = []
    for turn in turns:
        data = b'{"text":' + asked[place[turn.task]] + b"}"
        part: list[Argument] = ["c", "tool", "1", "look_up", "", "6a8af7c2", "!", data, b""]
        waits.append(bus.commit_turn(turn, "w", now, b"", 0, b"", b"", part, 1))
    await server.run("commit_turn that waits", waits)
    calls = await server.read("tool", tasks)
    rows = [_row(call, "tool", call.data, found[place[call.task]], now, bus.owner) for call in calls]
    results = [
        bus.commit_call(call, b"K", now, found[place[call.task]], row, 1) for call, row in zip(calls, rows, strict=True)
    ]
    await server.run("commit_call", results)
    turns = await server.read("agent", tasks)
    ends = []
    for turn in turns:
        output = found[place[turn.task]]
        row = _row(turn, "agent", asked[place[turn.task]], output, now, bus.owner)
        ends.append(bus.commit_turn(turn, "c", now, row, 1, output, b"", [], 0))
    await server.run("commit_turn that ends", ends)
    await server.read_record()


def _new(bus: EventBus, task: str, data: bytes) -> Submission:
    reply = bus.keys.reply("client")
    return Submission(
        task, ANONYMOUS, task, "34104537011a779b", "asker", data, replyto=reply, in_turn=True, epoch="-",
    )  # fmt: skip


def _row(delivery: Delivery, kind: str, data: bytes, output: bytes, now: int, owner: str) -> bytes:
    return (
        b'[{"run":"%s","kind":"%s","name":"%s","status":"completed","started":%d,"ended":%d,"input":%s,"output":%s,'
        b'"owner":"%s"}]'
        % (
            delivery.run.encode(), kind.encode(), delivery.name.encode(), now, now, data, output, owner.encode(),
        )
    )  # fmt: skip


Spent = dict[str, dict[str, list[float]]]
Commands = dict[str, dict[str, float]]


def _once(source: Path, tasks: int, *flags: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.broker_cost", "--once", "--tasks", str(tasks), *flags]
    environ = {**os.environ, "PYTHONPATH": str(source)}
    return json.loads(subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True).stdout)


def _in_turn(tasks: int, rounds: int, against: str, *, instructions: bool) -> tuple[Spent, dict[str, Commands]]:
    """Measure this tree, and another commit if one is named, each round in a separate process."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        sources = {"here": ROOT / "libs/runtime_core/src"}
        if against:
            archive = subprocess.run(["git", "archive", against, "libs"], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            sources = {against: Path(folder) / "libs/runtime_core/src", **sources}
        if instructions:
            for name, source in sources.items():
                print(f"{name}: {_once(source, tasks, '--instructions'):,.0f} instructions per task")
            return {}, {}
        spent: Spent = {name: {} for name in sources}
        commands: dict[str, Commands] = {}
        for _ in range(rounds):
            for name, source in sources.items():
                times, commands[name] = _once(source, tasks)
                for kind, microseconds in times.items():
                    spent[name].setdefault(kind, []).append(microseconds)
    return spent, commands


def _counted(commands: Commands) -> list[list[object]]:
    rows: list[list[object]] = [
        [kind, sum(counts.values()), ", ".join(f"{name} {count:g}" for name, count in sorted(counts.items()))]
        for kind, counts in commands.items()
    ]
    total = sum((Counter(counts) for counts in commands.values()), Counter[str]())
    return [*rows, [ALL, float(total.total()), f"XADD {total['XADD']:g}"]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.broker_cost", description="Measure the broker alone.")
    parser.add_argument("--tasks", type=int, default=4000, help="tasks of one round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are shown (default: %(default)s)")
    parser.add_argument("--against", default="", metavar="COMMIT", help="measure this commit too, in turn")
    parser.add_argument(
        "--instructions", action="store_true", help="count the server's instructions, which needs Valgrind"
    )
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.once:
        print(json.dumps(asyncio.run((count_instructions if given.instructions else measure)(given.tasks))))
        return 0
    spent, commands = _in_turn(given.tasks, given.rounds, given.against, instructions=given.instructions)
    if given.instructions:
        return 0
    medians = {name: {kind: statistics.median(each) for kind, each in kinds.items()} for name, kinds in spent.items()}
    rows = [[kind, *(medians[name][kind] for name in medians)] for kind in (*KINDS, ALL)]
    if given.against:
        for row in rows:
            row.append(
                statistics.median(
                    new / old
                    for old, new in zip(spent[given.against][str(row[0])], spent["here"][str(row[0])], strict=True)
                )
            )
    print(table(("µs of the broker per task", *medians, *(["ratio"] if given.against else [])), rows))
    for name, counts in commands.items():
        print("\n" + table((f"commands in functions, {name}", "per task", "by name"), _counted(counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
