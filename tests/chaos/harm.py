"""Random harm: kills and pauses processes of services, and kills the broker."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

from tests.fleet import Fleet
from tests.servers.process import Server

TASKS = int(os.environ.get("WEFT_CHAOS_TASKS") or 150)
FULL = TASKS > 500
LEASE_SECONDS = 3.0 if FULL else 1.0
EVERY_SECONDS = 0.3
MOST_HARM = 10_000 if FULL else 60
"""Where a process takes longer to start than the next kill to come, nothing would ever end; so the harm does."""
RESULT_SECONDS = 1800.0 if FULL else 300.0
PAUSED_AT_ONCE = 2
"""Of eight processes: a pause lasts much longer than the time between two harms."""


@asynccontextmanager
async def under(harm: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do harm while the block runs. Raises any error of the harm itself."""
    harming = asyncio.create_task(harm, name="harm")
    try:
        yield
    finally:
        harming.cancel()
        await asyncio.wait((harming,))
    if not harming.cancelled():
        harming.result()


async def harm_services(
    fleet: Fleet,
    chance: random.Random,
    every_seconds: float = EVERY_SECONDS,
    among: Callable[[], Sequence[str]] | None = None,
    most: int = MOST_HARM,
) -> None:
    """Every 300 ms one process is killed, or paused for longer than the lease, until that has been enough.

    One of all, or of those that `among` gives.
    """
    paused: set[asyncio.Task[None]] = set()

    async def pause(name: str) -> None:
        fleet.pause(name)
        await asyncio.sleep(fleet.lease_seconds * chance.uniform(1.2, 2.0))
        fleet.resume(name)

    try:
        while fleet.harmed < most:
            await asyncio.sleep(every_seconds)
            names = [name for name in (among or fleet.names)() if not fleet.members[name].paused]
            if not names:
                continue
            name = chance.choice(names)
            if chance.random() < 0.6 or len(paused) >= PAUSED_AT_ONCE:
                fleet.kill(name)
            else:
                task = asyncio.create_task(pause(name), name=f"pause {name}")
                paused.add(task)
                task.add_done_callback(paused.discard)
        if paused:
            await asyncio.wait(paused)
    finally:
        for task in list(paused):
            task.cancel()


async def harm_broker(server: Server, chance: random.Random, done: Callable[[], float]) -> None:
    """Twice in the course of the work the broker is killed, and comes back a moment later.

    `done` says which part of the work has ended.
    """
    for part in (0.25, 0.6):
        while done() < part:  # progress is a number, not an event
            await asyncio.sleep(0.02)
        server.kill()
        await asyncio.sleep(chance.uniform(0.05, 1.0))
        server.start()
