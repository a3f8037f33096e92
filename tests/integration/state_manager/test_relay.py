"""In a Cluster, a partition's master dies before its replica has the last writes: requests to and from it continue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from runtime_core.bus.keys import Keys
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.client.task_view import read_task
from runtime_core.wire.ids import instance_address, partition_of
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis, until
from tests.servers.cluster import CLUSTER_OPTIONS, SLOTS, follow, join
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PARTITIONS = 2
ASKER, ASKED = 0, 1
"""The partition of the task that asks, and that of the agent that it asks."""
MASTERS = 3
WAIT = 100.0
SETTINGS = {"WEFT_PARTITIONS": str(PARTITIONS), "WEFT_APP": "tests.apps.partition_app:app"}
REPLICAS = {"agent-handler": 1, "state-manager": 1}
TASK = next(f"t{n}" for n in range(99) if partition_of(f"t{n}", PARTITIONS) == ASKER)
KEY = next(f"k{n}" for n in range(99) if partition_of(instance_address("waiter", f"k{n}"), PARTITIONS) == ASKED)


@dataclass
class Pair:
    """The master of a partition, and its replica."""

    master: Server
    replica: Server
    base: str
    """What the partition's keys begin with."""

    async def lag(self) -> None:
        """Let the replica have what the master has now, and nothing that comes later."""
        async with plain_redis(self.master.port) as master, plain_redis(self.replica.port) as replica:
            await master.set(f"{self.base}caught-up", 1)
            assert await master.wait(1, 60_000) == 1
            await master.acl_setuser("default", enabled=True, commands=["-psync", "-sync"])
            await replica.execute_command("CLIENT", "KILL", "TYPE", "master")

            async def down() -> bool:
                return bool((await replica.info("replication"))["master_link_status"] == "down")

            await until(down, WAIT, "the replica is cut off")

    async def lose_tail(self, task: str) -> str | None:
        """Kill the master, and let the replica take its place. Return the task's status as the replica knows it."""
        self.master.kill()
        async with plain_redis(self.replica.port, text=True) as replica:
            await replica.execute_command("READONLY")
            status: str | None = await replica.hget(f"{self.base}task:{task}", "status")
            await replica.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

            async def leads() -> bool:
                return bool((await replica.info("replication"))["role"] == "master")

            await until(leads, WAIT, "the replica is the master")
        return status


@dataclass
class World:
    """A Cluster whose partitions lie on two masters with a replica each, and the services on it."""

    fleet: Fleet
    client: Client
    pairs: list[Pair]

    async def ask(self) -> TaskHandle:
        """Start a task that calls an agent in the other partition, which asks a person."""
        return await self.client.submit("patient", KEY, task_id=TASK)

    async def question(self) -> dict[str, Any]:  # Any: JSON
        """Wait until a person is asked."""
        bus = self.client.buses[ASKED]
        found: list[dict[str, Any]] = []

        async def asked() -> bool:
            for task in await bus.transport.call("ZRANGE", bus.keys.index, 0, -1) or ():  # type: ignore[union-attr]
                view = await read_task(bus, task.decode())  # type: ignore[union-attr]
                found.extend(view["questions"] if view and view["agent"] == "waiter" and "questions" in view else ())
            return bool(found)

        await until(asked, WAIT, "a person is asked")
        return found[-1]

    async def answer(self, value: str) -> None:
        asked = await self.question()
        await (await self.client.task(asked["task_id"])).signal(asked["request_id"], value)


@pytest.fixture
async def world(own_server: OwnServer, namespace: str, tmp_path: Path) -> AsyncIterator[World]:
    masters = [own_server(append=None, options=CLUSTER_OPTIONS) for _ in range(MASTERS)]
    await join(masters)
    async with _services(masters, own_server, namespace, tmp_path) as world:
        yield world


@asynccontextmanager
async def _services(masters: list[Server], own_server: OwnServer, namespace: str, folder: Path) -> AsyncIterator[World]:
    pairs = []
    for partition in range(PARTITIONS):
        base = Keys(namespace, partition).base
        master = masters[key_slot(base.encode()) * MASTERS // SLOTS]
        assert master is not masters[0], "it is the one that clients begin with"
        replica = own_server(append=None, options=(*CLUSTER_OPTIONS, "--cluster-replica-validity-factor", "0"))
        await follow(master, replica)
        pairs.append(Pair(master, replica, base))
    async with (
        Fleet(masters[0].url, namespace, folder, replicas=REPLICAS, environ=SETTINGS) as fleet,
        Client.connect(masters[0].url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        yield World(fleet, client, pairs)


@only_in_matrix("what the partition loses")
async def test_the_asked_partition_loses_the_request(world: World) -> None:
    """It is sent again, and starts a task with the same id."""
    await world.pairs[ASKED].lag()
    task = await world.ask()
    lost = await world.question()
    assert await world.pairs[ASKED].lose_tail(lost["task_id"]) is None
    assert (await world.question())["task_id"] == lost["task_id"]
    await world.answer("go")
    assert (await task.result(timeout=WAIT)).value() == "go"


@only_in_matrix("what the partition loses")
async def test_the_askers_partition_loses_the_answer(world: World) -> None:
    """The task in the other partition has ended: its result answers the step again."""
    task = await world.ask()
    await world.question()
    await world.pairs[ASKER].lag()
    await world.answer("go")
    assert (await task.result(timeout=WAIT)).value() == "go"
    assert await world.pairs[ASKER].lose_tail(TASK) == "waiting"
    assert (await (await world.client.task(TASK)).result(timeout=WAIT)).value() == "go"


async def test_the_askers_partition_loses_the_request_and_its_answer(world: World) -> None:
    """The turn is repeated and asks again. The other partition knows the task, which has ended, and its result."""
    world.fleet.pause("agent-handler-1")
    task = await world.ask()
    await world.pairs[ASKER].lag()
    world.fleet.resume("agent-handler-1")
    await world.answer("go")
    assert (await task.result(timeout=WAIT)).value() == "go"
    assert await world.pairs[ASKER].lose_tail(TASK) == "accepted"
    assert (await (await world.client.task(TASK)).result(timeout=WAIT)).value() == "go"
