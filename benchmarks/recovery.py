"""How long until another process continues the deliveries that a killed handler held."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.app import RELEASE
from benchmarks.figures import table
from benchmarks.stack import Stack, started
from runtime_core.client.client import Client, TaskHandle

TASKS = 40
LEASE_SECONDS = 3.0
GOAL_SECONDS = LEASE_SECONDS + 1
LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.01
KINDS = {"agent_handler": "agent_holder", "tool_handler": "tool_holder"}
"""Service → the agent whose tasks it holds."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """One kill. Seconds from the kill to the answers of the first and the last held task."""

    held: int
    first_seconds: float
    last_seconds: float


async def recovery(rounds: int) -> dict[str, object]:
    """Measure and print: two replicas of each handler, one of them killed in each round."""
    figures: dict[str, object] = {"goal_seconds": GOAL_SECONDS}
    rows = []
    settings = {"WEFT_LEASE_SECONDS": str(LEASE_SECONDS)}
    async with started(settings, but=tuple(KINDS)) as stack, Client.connect(stack.url) as client:
        for service in KINDS:
            for replica in (1, 2):
                await stack.start_service(service, f"{service}-{replica}")
        await stack.until_alive()
        for service, agent in KINDS.items():
            kills = [await _kill(stack, client, service, agent, number) for number in range(rounds)]
            worst = max(kill.last_seconds for kill in kills)
            figures[service] = {
                "held": [kill.held for kill in kills],
                "first_seconds": [kill.first_seconds for kill in kills],
                "last_seconds": [kill.last_seconds for kill in kills],
            }
            rows.append((service, rounds, sum(kill.held for kill in kills), worst, GOAL_SECONDS))
    print("\n" + table(("killed", "kills", "deliveries in hand", "slowest, s", "to reach, s"), rows) + "\n")
    return figures


async def _kill(stack: Stack, client: Client, service: str, agent: str, number: int) -> Recovered:
    """Have tasks held, kill who holds most of them, and wait for these tasks' answers."""
    folder = stack.folder / f"held-{service}-{number}"
    folder.mkdir()
    names = [f"task-{place}" for place in range(TASKS)]
    tasks = {name: await client.submit(agent, [str(folder), name]) for name in names}
    holders = await _until_held(folder)
    pid, _ = Counter(holders.values()).most_common(1)[0]
    name, victim = next((name, child) for name, child in stack.services.items() if child.pid == pid)
    del stack.services[name]
    killed = time.monotonic()
    await victim.kill()
    held = [tasks[task] for task, holder in holders.items() if holder == pid]
    seconds = sorted(await asyncio.gather(*(_answered(handle, killed) for handle in held)))
    (folder / RELEASE).touch()
    await asyncio.gather(*(handle.result(timeout=LIMIT_SECONDS) for handle in tasks.values()))
    await stack.start_service(service, name)
    await stack.until_alive()
    return Recovered(len(held), seconds[0], seconds[-1])


async def _answered(handle: TaskHandle, since: float) -> float:
    again = (await handle.result(timeout=LIMIT_SECONDS)).value()
    if again is not True:
        raise RuntimeError(f"{handle!r} was answered by a process that had been killed")
    return time.monotonic() - since


async def _until_held(folder: Path) -> dict[str, int]:
    """Wait until all tasks are held; task → process id of its holder."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(files := list(folder.iterdir())) < TASKS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(files)} of {TASKS} tasks were held after {LIMIT_SECONDS:g} s")
        await asyncio.sleep(POLL_SECONDS)
    return {file.stem: int(file.suffix[1:]) for file in files}
