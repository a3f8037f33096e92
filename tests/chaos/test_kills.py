"""Processes are killed and paused at random moments, and every task still ends correctly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from tests.chaos.harm import EVERY_SECONDS, LEASE_SECONDS, RESULT_SECONDS, TASKS, harm_broker, harm_services, under
from tests.chaos.invariants import check_broker, check_effects, check_ends, check_trajectories, held_of
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

OUTPUT = ["part0", "part1", "part2", "sub"]
CALLS = 4
LEAST_HARM = 20
"""How often processes must have been killed or paused, or a run has shown nothing."""
SPREAD_SECONDS = max(TASKS * 0.08, 2 * LEAST_HARM * EVERY_SECONDS)
"""Over which the tasks are submitted, so that many of them meet a kill."""
STEPS = 6
"""Rows of a task's trajectory where nothing was repeated: two agents and four tools."""


async def test_services_are_killed_and_paused(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    server = own_server()
    await journeys(server, namespace, tmp_path, chaos_seed)


@only_in_matrix("the broker is killed too")
async def test_the_broker_is_killed_too(own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int) -> None:
    server = own_server(append="always")
    await journeys(server, namespace, tmp_path, chaos_seed, broker_dies=True)


async def journeys(
    server: Server,
    namespace: str,
    folder: Path,
    seed: int,
    *,
    broker_dies: bool = False,
) -> None:
    """Run all tasks while processes are harmed, then check the invariants."""
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

            async def harm() -> None:
                async with asyncio.TaskGroup() as harms:
                    harms.create_task(harm_services(fleet, chance))
                    if broker_dies:
                        harms.create_task(harm_broker(server, chance, lambda: len(responses) / TASKS))

            async with under(harm()):
                try:
                    await asyncio.gather(*(one(task, chance.uniform(0, SPREAD_SECONDS)) for task in tasks))
                except TimeoutError as error:
                    missing = sorted(set(tasks) - {response.task_id for response in responses})
                    print(await held_of(server.port, namespace, missing[:3]))
                    raise AssertionError(f"{len(missing)} tasks did not end, such as {missing[:3]}: {error}") from error
        for name in fleet.names():
            fleet.resume(name)
        await fleet.ready()
        assert fleet.harmed >= LEAST_HARM
        check_ends(responses, OUTPUT)
        check_effects(effects, tasks, CALLS)
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace)
        await check_trajectories(fleet.trajectory_url, namespace, responses, STEPS)
