"""Processes are killed and paused at random moments, and every task still ends as it should."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol

import pytest

from runtime_core.client import Client, TaskResponse
from tests.chaos.invariants import check_broker, check_effects, check_ends, check_trajectories, held_of
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis
from tests.servers.process import Server

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

TASKS = int(os.environ.get("WEFT_CHAOS_TASKS") or 150)
FULL = TASKS > 500
LEASE_SECONDS = 3.0 if FULL else 1.0
EVERY_SECONDS = 0.3
RESULT_SECONDS = 1800.0 if FULL else 40.0
SPREAD_SECONDS = TASKS * 0.08
"""Over which the tasks are submitted, so that many of them meet a kill."""
OUTPUT = ["part0", "part1", "part2", "sub"]
CALLS = 4
PAUSED_AT_ONCE = 2
"""Of eight processes: a pause lasts much longer than the time between two harms."""
LEAST_HARM = 20
"""How often processes must have been killed or paused, or a run has shown nothing."""
STEPS = 6
"""Rows of a task's trajectory where nothing was repeated: two agents and four tools."""


class Harm(Protocol):
    """Does harm until it is cancelled. `done` says which part of the tasks has ended."""

    def __call__(
        self, fleet: Fleet, chance: random.Random, done: Callable[[], float]
    ) -> Coroutine[None, None, None]: ...


async def test_services_are_killed_and_paused(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    server = own_server()
    await journeys(server, namespace, tmp_path, chaos_seed, harm_services)


async def test_the_broker_is_killed_too(own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int) -> None:
    server = own_server(append="always")

    async def harm(fleet: Fleet, chance: random.Random, done: Callable[[], float]) -> None:
        await asyncio.gather(harm_services(fleet, chance, done), harm_broker(server, chance, done))

    await journeys(server, namespace, tmp_path, chaos_seed, harm)


async def journeys(
    server: Server,
    namespace: str,
    folder: Path,
    seed: int,
    harm: Harm,
) -> None:
    """Run all tasks while `harm` goes on, then check what must be true."""
    chance = random.Random(seed)
    effects = folder / "effects"
    tasks = [f"task-{number}" for number in range(TASKS)]
    responses: list[TaskResponse] = []

    async with Fleet(server.url, namespace, folder, replicas=2, lease_seconds=LEASE_SECONDS) as fleet:
        async with Client.connect(server.url, namespace=namespace) as client:

            async def one(task: str, after_seconds: float) -> None:
                await asyncio.sleep(after_seconds)
                handle = await client.submit("journey", str(effects), task_id=task, timeout=RESULT_SECONDS)
                responses.append(await handle.result(timeout=RESULT_SECONDS))

            harming = asyncio.ensure_future(harm(fleet, chance, lambda: len(responses) / TASKS))
            try:
                await asyncio.gather(*(one(task, chance.uniform(0, SPREAD_SECONDS)) for task in tasks))
            except TimeoutError as error:
                missing = sorted(set(tasks) - {response.task_id for response in responses})
                print(await held_of(server.port, namespace, missing[:3]))
                raise AssertionError(f"{len(missing)} tasks did not end, such as {missing[:3]}: {error}") from error
            finally:
                harming.cancel()
                await asyncio.wait((harming,))
            if not harming.cancelled():
                harming.result()
        for name in fleet.names():
            fleet.resume(name)
        await fleet.ready()
        assert fleet.harmed >= LEAST_HARM
        check_ends(responses, OUTPUT)
        check_effects(effects, tasks, CALLS)
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace)
        await check_trajectories(fleet.trajectory_url, namespace, responses, STEPS)


async def harm_services(fleet: Fleet, chance: random.Random, done: Callable[[], float]) -> None:
    """Every 300 ms one process is killed, or paused for longer than the lease."""
    paused: set[asyncio.Task[None]] = set()

    async def pause(name: str) -> None:
        fleet.pause(name)
        await asyncio.sleep(LEASE_SECONDS * chance.uniform(1.2, 2.0))
        fleet.resume(name)

    try:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            name = chance.choice([name for name in fleet.names() if not fleet.members[name].paused])
            if chance.random() < 0.6 or len(paused) >= PAUSED_AT_ONCE:
                fleet.kill(name)
            else:
                task = asyncio.create_task(pause(name), name=f"pause {name}")
                paused.add(task)
                task.add_done_callback(paused.discard)
    finally:
        for task in list(paused):
            task.cancel()


async def harm_broker(server: Server, chance: random.Random, done: Callable[[], float]) -> None:
    """Twice in the course of the tasks the broker is killed, and comes back a moment later."""
    for part in (0.25, 0.6):
        while done() < part:  # progress is a number, not an event
            await asyncio.sleep(0.02)
        server.kill()
        await asyncio.sleep(chance.uniform(0.05, 1.0))
        server.start()
