"""Processes are killed at random while agents use every call of their context."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from tests.chaos.harm import EVERY_SECONDS, LEASE_SECONDS, RESULT_SECONDS, harm_services, under
from tests.chaos.invariants import check_broker, check_trajectories
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis, until

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

TASKS = max(20, int(os.environ.get("WEFT_CHAOS_TASKS") or 150) // 5)
LEAST_HARM = 10
EFFECTS = ("{}-job", "{}-tool", "{}-helper", "{}-branch1", "{}-branch2", "{}-sent", "heard-{}")
OUTPUT = {"at_once": 42, "sums": [1, 3], "answered": "yes", "silent": "by default", "late": False}


async def answered(client: Client, path: str, task: str) -> tuple[TaskResponse, list[object]]:
    """Run one task and answer its first question, as a person who reads its stream. Return the end and the deltas."""
    handle = await client.submit(
        "every-call", path, task_id=task, session_id="shared", stream=True, timeout=RESULT_SECONDS
    )
    deltas: dict[str, object] = {}
    async for event in handle.stream():
        if event.type == "weft.human.requested" and "default" not in event.data:
            verdict = {"verdict": "edit", "value": "edited"}
            await handle.signal(event.data["request_id"], verdict if "expects" in event.data else "yes")
        elif event.type == "weft.output.delta":
            # A delta of a later attempt replaces what an earlier one said.
            deltas[str(event.data.get("text") or event.data.get("value"))] = event.data["attempt"]
    return await handle.result(timeout=RESULT_SECONDS), list(deltas)


async def test_every_call_survives_kills(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    server = own_server()
    chance = random.Random(chaos_seed)
    effects = tmp_path / "effects"
    tasks = [f"every-{number}" for number in range(TASKS)]
    ends: list[tuple[TaskResponse, list[object]]] = []
    async with (
        Fleet(
            server.url,
            namespace,
            tmp_path,
            replicas=2,
            lease_seconds=LEASE_SECONDS,
            app="tests.apps.every_call_app:app",
        ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):

        async def one(task: str) -> None:
            await asyncio.sleep(chance.uniform(0, LEAST_HARM * EVERY_SECONDS + TASKS * 0.05))
            ends.append(await answered(client, str(effects), task))

        async with under(harm_services(fleet, chance)), asyncio.timeout(RESULT_SECONDS):
            await asyncio.gather(*(one(task) for task in tasks))
        for name in fleet.names():
            fleet.resume(name)
        await fleet.ready()
        assert fleet.harmed >= LEAST_HARM
        await until(client.topics.idle, RESULT_SECONDS, "what was sent and published is handled")

        responses = [response for response, _ in ends]
        bad = [response for response in responses if response.status != "completed" or response.output != OUTPUT]
        assert not bad, f"{len(bad)} of {len(responses)} did not complete as they should; the first: {bad[0]}"
        assert all(deltas == ["half way", "{'sums': [1, 3]}"] for _, deltas in ends), ends
        # The helper that was asked and the one that was sent to are of different tasks.
        assert {response.usage["tokens"] for response in responses} == {11}
        check_keys(effects, tasks)
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace)
        await check_trajectories(fleet.trajectory_url, namespace, responses, 15)


def check_keys(path: Path, tasks: list[str]) -> None:
    """Check that each named effect has one unique key, those of sent and published messages too."""
    keys: dict[str, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        name, key = line.split(" ", 1)
        keys[name].add(key)
    wanted = {pattern.format(task) for task in tasks for pattern in EFFECTS}
    assert set(keys) == wanted, sorted(set(keys) ^ wanted)[:5]
    twice = {name: found for name, found in keys.items() if len(found) != 1}
    assert not twice, f"effects with more than one key: {list(twice.items())[:3]}"
    every = [key for found in keys.values() for key in found]
    assert len(set(every)) == len(every), "one key for different effects"
