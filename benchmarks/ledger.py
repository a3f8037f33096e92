"""Checks after a measurement: no work left, nothing pending, every trajectory complete."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from benchmarks.stack import NAMESPACE, Stack
from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER, Keys, group_of
from runtime_core.bus.namespace import connect

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.02
STEPS = 2
"""Rows in the trajectory of one measured task: the agent's run and the tool's call."""


class Broken(Exception):
    """An invalid measurement, because not all of the work was done."""


class Ledger:
    """Checks the broker and the trajectories of a stack."""

    def __init__(self, stack: Stack, transport: Transport) -> None:
        self._stack = stack
        self._call = transport.call
        self.keys = Keys(NAMESPACE, 0)

    async def info(self, section: str) -> dict[str, str]:
        lines = cast(bytes, await self._call("INFO", section)).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    async def used_memory(self) -> int:
        """The size of the data in bytes, without the buffers of connections and of the append-only file."""
        told = await self.info("memory")
        return int(told["used_memory"]) - int(told["mem_clients_normal"]) - int(told["mem_aof_buffer"])

    async def record_length(self) -> int:
        return cast(int, await self._call("XLEN", self.keys.record))

    async def size_of(self, key: str) -> int:
        """Bytes of one key; 0 if it does not exist."""
        return cast(int, await self._call("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)

    async def until_recorded(self, tasks: int) -> None:
        """Wait until the store holds the ends of this many tasks. Raises Broken after a minute."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (there := _count(self._stack.trajectories)) < tasks:
            if time.monotonic() > deadline:
                raise Broken(f"the ends of {there} of {tasks} tasks were recorded within {SETTLE_SECONDS:g} s")
            await asyncio.sleep(POLL_SECONDS)

    async def until_trimmed(self) -> None:
        """Wait until nothing of the record is left on the broker. Raises Broken after a minute."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while await self.record_length():
            if time.monotonic() > deadline:
                raise Broken(f"{await self.record_length()} entries of the record were not trimmed")
            await asyncio.sleep(POLL_SECONDS)

    async def until_still(self) -> None:
        """Wait until no work stream holds anything. Raises Broken after a minute."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while left := await self._work_left():
            if time.monotonic() > deadline:
                raise Broken(f"work was left after {SETTLE_SECONDS:g} s: {left}")
            await asyncio.sleep(POLL_SECONDS)

    async def check(self, tasks: int) -> None:
        """Raises Broken unless exactly these tasks ended well, and none of their work is left."""
        if left := await self._work_left():
            raise Broken(f"work was left: {left}")
        dead = cast(int, await self._call("XLEN", self.keys.dead))
        if dead:
            raise Broken(f"{dead} dead letters")
        _check_trajectories(self._stack.trajectories, tasks)

    async def _work_left(self) -> dict[str, int]:
        """The entries on streams and in pending lists, by stream."""
        left = {}
        for stream in ("agent", "tool"):
            key = self.keys.stream(stream)
            left[stream] = cast(int, await self._call("XLEN", key))
            left[f"{stream}, pending"] = await self._pending(key, group_of(stream))
        for group in (STATE_MANAGER, TRAJECTORY_RECORDER):
            left[f"record, pending for {group}"] = await self._pending(self.keys.record, group)
        return {name: count for name, count in left.items() if count}

    async def _pending(self, key: str, group: str) -> int:
        return cast(int, cast(list[Reply], await self._call("XPENDING", key, group))[0])


@contextlib.asynccontextmanager
async def ledger_of(stack: Stack) -> AsyncIterator[Ledger]:
    transport = await connect(stack.url)
    try:
        yield Ledger(stack, transport)
    finally:
        await transport.close()


def _count(store: Path) -> int:
    """Tasks whose end is in the store; none while the recorder has not created its file or its tables."""
    try:
        with contextlib.closing(_open(store)) as database:
            return int(database.execute("SELECT count(*) FROM weft_tasks").fetchone()[0])
    except sqlite3.OperationalError as error:
        if "no such table" in str(error) or "unable to open" in str(error):
            return 0
        raise


def _check_trajectories(store: Path, tasks: int) -> None:
    with contextlib.closing(_open(store)) as database:
        ended, completed, promised, short = database.execute(
            "SELECT count(*), sum(status = 'completed'), sum(steps), sum(steps <> ?) FROM weft_tasks", (STEPS,)
        ).fetchone()
        rows, whole = database.execute("SELECT count(*), count(DISTINCT task) FROM weft_steps").fetchone()
    if not (ended == completed == whole == tasks and rows == promised == STEPS * tasks and short == 0):
        raise Broken(
            f"of {tasks} tasks {ended} are recorded as ended and {completed} as completed; {whole} of them have "
            f"{rows} rows, and {promised} were announced; {short} did not take {STEPS} steps"
        )


def _open(store: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)
