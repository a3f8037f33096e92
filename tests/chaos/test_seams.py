"""Handlers are replaced, terminated and killed one by one under load, with cancels and redrives in flight.

Every task ends, no step runs again once the journal has its result, and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.dead_letters import DeadLetters
from tests.chaos.harm import FULL, TASKS, under
from tests.chaos.invariants import check_broker, check_instances, check_ledger, check_once, held_of
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600 if FULL else 300)]

COUNT = max(30, TASKS // 5)
LEASE_SECONDS = 3.0 if FULL else 1.5
SPREAD_SECONDS = COUNT * 0.25
ENDED_SECONDS = 1800.0 if FULL else 60.0
"""How long the last task may take once all are submitted."""
HARMED_SECONDS = SPREAD_SECONDS + ENDED_SECONDS / 2
"""How long harm is done. Deliveries that were delivered too often run one at a time: on a busy machine, each may take
as long as its process lives, and the rest of them must end undisturbed."""
PAUSE_SECONDS = 2.0
"""Between two harms of a service. A process must often live for longer than a step takes, or no task would ever end."""
LEAST_HARM = 3
HANDLERS = ("agent-handler", "tool-handler")
REPLICAS = {"agent-handler": 2, "tool-handler": 2, "state-manager": 1, "trajectory-recorder": 1}
KEYS = ("a", "b", "c")
APP = "tests.apps.seams_app:app"
# So short that steps under way are handed back, and not finished.
ENVIRON = {"WEFT_SHUTDOWN_SECONDS": "2"}
ALLOWED = ("Deadlock", "Poison")
"""Errors with which a task may end here: it asked round in a circle, or was killed five times."""


async def harm_handlers(fleet: Fleet, chance: random.Random) -> None:
    """Replace handlers as a rollout does, or end them with SIGTERM or SIGKILL: one of each service at a time."""
    async with asyncio.TaskGroup() as group:
        for service in HANDLERS:
            if fleet.names(service):
                group.create_task(harm_one_by_one(fleet, service, chance))


async def harm_one_by_one(fleet: Fleet, service: str, chance: random.Random) -> None:
    until = asyncio.get_running_loop().time() + HARMED_SECONDS
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(PAUSE_SECONDS)
        names = fleet.names(service)
        await fleet.ready(names)
        name = chance.choice(names)
        starts = fleet.members[name].starts
        match chance.choice(("replace", "replace", "terminate", "kill")):
            case "replace":
                await fleet.replace(name)
            case "terminate":
                fleet.terminate(name)
            case "kill":
                fleet.kill(name)
        while fleet.members[name].starts == starts:  # a second SIGTERM would cut off its clean stop
            await asyncio.sleep(0.02)


async def redrive_all(client: Client, chance: random.Random) -> None:
    """Redrive whatever fails, and reopen its task, again and again."""
    letters = DeadLetters(client.buses)
    while True:
        for letter in [letter async for letter in letters.all()]:
            with suppress(InvalidInput):  # its task may have gone on, or have been cancelled
                await letters.redrive(letter.letter_id, reopen=True)
        await asyncio.sleep(chance.uniform(0.1, 0.5))


class Load:
    """Tasks of all kinds, submitted over a while; some are cancelled."""

    def __init__(self, client: Client, folder: Path, chance: random.Random) -> None:
        self._client = client
        self._chance = chance
        self.ledger = folder / "ledger"
        self.mended = folder / "mended"
        self.ended: dict[str, TaskResponse] = {}
        self.tasks: list[str] = []
        self.cancelled: set[str] = set()

    async def run(self) -> None:
        """Submit all tasks and wait for all of them. Raises TimeoutError if one does not end."""
        loop = asyncio.get_running_loop()
        loop.call_later(SPREAD_SECONDS * 0.6, self.mended.touch)
        agents = ("teller", "teller", "teller", "clerk", "flaky")
        async with asyncio.timeout(SPREAD_SECONDS + ENDED_SECONDS), asyncio.TaskGroup() as group:
            for number in range(COUNT):
                agent = self._chance.choice(agents)
                wanted = {
                    "path": str(self.ledger),
                    "mended": str(self.mended),
                    "first": self._chance.choice((0, 0, 1)),
                    # Half of them outlast what a process may finish after SIGTERM.
                    "waits": [self._chance.uniform(*self._chance.choice(((0.1, 0.5), (3.0, 5.0)))) for _ in range(2)],
                }
                key = self._chance.choice(("", "", "", "", "", *KEYS)) if agent == "teller" else ""
                cancel_after = self._chance.uniform(0.0, 3.0) if self._chance.random() < 0.2 else None
                after = self._chance.uniform(0.0, SPREAD_SECONDS)
                task = f"{agent}-{number}"
                self.tasks.append(task)
                group.create_task(self._one(agent, task, key, wanted, after, cancel_after))

    async def _one(
        self, agent: str, task: str, key: str, wanted: Mapping[str, object], after: float, cancel_after: float | None
    ) -> None:
        await asyncio.sleep(after)
        handle = await self._client.submit(agent, dict(wanted), task_id=task, key=key)
        if cancel_after is not None:
            self.cancelled.add(task)
            await asyncio.sleep(cancel_after)
            await handle.cancel()
        while True:
            # A handle keeps the first end that it learns of, and a redrive may take that back.
            response = await (await self._client.task(task)).result()
            if response.status != "failed" or allowed(response):
                self.ended[task] = response
                return
            await asyncio.sleep(0.1)


def allowed(response: TaskResponse) -> bool:
    said = json.dumps(response.error)
    return any(word in said for word in ALLOWED)


async def test_no_finished_step_runs_again(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    server = own_server()
    chance = random.Random(chaos_seed)
    async with (
        Fleet(
            server.url,
            namespace,
            tmp_path,
            replicas=REPLICAS,
            lease_seconds=LEASE_SECONDS,
            app=APP,
            environ=ENVIRON,
        ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        load = Load(client, tmp_path, chance)
        try:
            async with under(harm_handlers(fleet, chance)), under(redrive_all(client, chance)):
                await load.run()
        except TimeoutError:
            await report_missing(server, namespace, set(load.tasks) - set(load.ended))
        await fleet.ready()
        print(f"{fleet.harmed} processes were killed or terminated, {fleet.replacements} replaced")
        assert fleet.harmed + fleet.replacements >= LEAST_HARM, (fleet.harms, fleet.replacements)
        wrong = [
            response
            for task, response in load.ended.items()
            if response.status != "completed" and not allowed(response) and task not in load.cancelled
        ]
        assert not wrong, f"{len(wrong)} did not end as they should: {wrong[0]}"
        check_ledger(load.ledger, fleet.declared_dead())
        check_once(load.ledger)
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace, spare_letters_of=[t for t, r in load.ended.items() if allowed(r)])
            await check_instances(redis, namespace)


@only_in_matrix("agents under crossed keys")
async def test_agents_that_ask_each_other_under_crossed_keys_all_end(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    """Two tasks wait for each other: one of them gets a Deadlock error, and both end."""
    server = own_server()
    chance = random.Random(chaos_seed)
    ledger = tmp_path / "ledger"
    ended: dict[str, TaskResponse] = {}
    tasks = [f"chain-{number}" for number in range(COUNT)]
    async with (
        Fleet(
            server.url,
            namespace,
            tmp_path,
            replicas={**REPLICAS, "tool-handler": 1},
            lease_seconds=LEASE_SECONDS,
            app=APP,
            environ=ENVIRON,
        ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):

        async def one(task: str, chain: list[str], after: float) -> None:
            await asyncio.sleep(after)
            wanted = {"path": str(ledger), "chain": chain[1:], "seconds": chance.uniform(0.05, 0.2)}
            handle = await client.submit("asks", wanted, task_id=task, key=chain[0])
            ended[task] = await handle.result()

        try:
            async with (
                under(harm_handlers(fleet, chance)),
                asyncio.timeout(SPREAD_SECONDS + ENDED_SECONDS),
                asyncio.TaskGroup() as group,
            ):
                for task in tasks:
                    chain = chance.sample(KEYS, chance.randint(1, len(KEYS)))
                    group.create_task(one(task, chain, chance.uniform(0.0, SPREAD_SECONDS)))
        except TimeoutError:
            await report_missing(server, namespace, set(tasks) - set(ended))
        await fleet.ready()
        print(Counter(response.status for response in ended.values()))
        wrong = [response for response in ended.values() if response.status != "completed" and not allowed(response)]
        assert not wrong, f"{len(wrong)} did not end as they should: {wrong[0]}"
        check_ledger(ledger, fleet.declared_dead())
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace, spare_letters_of=[t for t, r in ended.items() if allowed(r)])
            await check_instances(redis, namespace)


async def report_missing(server: Server, namespace: str, missing: set[str]) -> None:
    """Fail, with what the broker holds of some tasks that did not end."""
    print(await held_of(server.port, namespace, sorted(missing)[:3]))
    raise AssertionError(f"{len(missing)} tasks did not end, such as {sorted(missing)[:5]}")
