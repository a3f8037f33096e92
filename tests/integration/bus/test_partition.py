"""Several partitions: each instance lives in one of them, whoever calls it; also on a real Cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.client.client import Client
from runtime_core.state_manager.publishers import Publisher, Publishers
from runtime_core.wire.commands import SUBMIT, parse_submit
from runtime_core.wire.envelope import Envelope
from runtime_core.wire.ids import instance_address, partition_of
from tests.fleet import Fleet, until
from tests.servers.cluster import CLUSTER_OPTIONS, join
from tests.servers.process import Server
from tests.servers.valkey import ValkeyServer
from weft import SubmitOptions

pytestmark = pytest.mark.timeout(300)

PARTITIONS = 4
KEYS = [f"k{number}" for number in range(12)]
SETTINGS = {"WEFT_PARTITIONS": str(PARTITIONS), "WEFT_APP": "tests.apps.partition_app:app"}


def place(agent: str, key: str) -> int:
    return partition_of(instance_address(agent, key), PARTITIONS)


async def instances(bus: EventBus) -> set[str]:
    return {key for key in KEYS if await bus.transport.call("EXISTS", bus.keys.instance("counter", key))}


async def empty(client: Client) -> bool:
    for bus in client.buses:
        for key in (bus.keys.asks, bus.keys.replies, bus.keys.stream("agent"), bus.keys.stream("tool")):
            if await bus.transport.call("XLEN", key):
                return False
    return True


async def ask_everywhere(client: Client) -> None:
    """Instances are called, answer, fail and get messages, each in its own partition and once."""
    for round_ in (1, 2, 3):
        response = await (await client.submit("asker", KEYS)).result(timeout=60)
        assert response.value() == [round_] * len(KEYS)
        assert response.usage == {"tokens": len(KEYS)}, "what instances elsewhere have used counts too"
        assert response.models == {"abacus": response.usage}
    direct = await client.submit("counter", 1, key=KEYS[0])
    assert (await direct.result(timeout=60)).value() == 4
    failed = await (await client.submit("fails", KEYS[1])).result(timeout=60)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "below zero" in failed.error["message"]
    await (await client.submit("sender", KEYS[2:6])).result(timeout=60)
    await until(lambda: empty(client), 60, "what was sent is handled")
    for key in KEYS[2:6]:
        task = await client.submit("counter", 0, key=key)
        assert (await task.result(timeout=60)).value() == 13
    assert await client.publish("count", 100, source=KEYS[6], message_id="m") == 1
    assert await client.publish("count", 100, source=KEYS[6], message_id="m") == 1
    await (await client.submit("publisher", KEYS[7:9])).result(timeout=60)
    await until(client.topics.idle, 60, "what was published is handled")
    for key in KEYS[6:9]:
        task = await client.submit("counter", 0, key=key)
        assert (await task.result(timeout=60)).value() == 103
    for bus in client.buses:
        found = await instances(bus)
        assert found == {key for key in KEYS if place("counter", key) == bus.keys.partition}


async def test_an_instance_lives_in_one_partition_for_every_caller(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    assert len({place("counter", key) for key in KEYS}) == PARTITIONS
    async with (
        Fleet(valkey.url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(valkey.url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        await ask_everywhere(client)


async def test_a_submit_with_another_partitionkey_starts_nothing(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    """From clients and by the ingress stream, at once and one after the other."""
    keys = [next(f"{n}" for n in range(99) if partition_of(f"{n}", PARTITIONS) == place) for place in range(PARTITIONS)]
    async with (
        Fleet(valkey.url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(valkey.url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        data = b'{"agent":"asker","input":[]}'
        submits = [
            parse_submit(Envelope(id="1", source="shop", type=SUBMIT, data=data, partitionkey=key)) for key in keys
        ]
        handles = await asyncio.gather(*(client.start(submit) for submit in submits))
        assert [(await handle.result(timeout=60)).status for handle in handles] == ["completed"] * PARTITIONS
        again = await client.start(submits[0])
        assert (await again.result(timeout=60)).status == "completed"
        edge = client.buses[0].transport
        for key in keys:
            await edge.call(
                "XADD", f"{namespace}:tasks", "*", "type", SUBMIT, "id", "1", "source", "shop", "replyto", "answers",
                "partitionkey", key, "data", data,
            )  # fmt: skip

        async def answered() -> bool:
            return await edge.call("XLEN", "answers") == PARTITIONS

        await until(answered, 30, "each is answered with the first one's end")
        found = [await bus.transport.call("KEYS", f"{bus.keys.base}task:*") for bus in client.buses]
        assert sum(len(tasks) for tasks in found if isinstance(tasks, list)) == 1


async def test_a_reentrant_call_through_another_partition_is_nested(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    near, far = KEYS[0], next(key for key in KEYS if place("mirror", key) != place("mirror", KEYS[0]))
    async with (
        Fleet(valkey.url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(valkey.url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        # near asks far, far asks near back, near asks far again: each sees what the others have made of it.
        task = await client.submit("mirror", [far, near, far], key=near, options=SubmitOptions(timeout_seconds=20))
        assert (await task.result(timeout=60)).value() == 1
        for key, asked in ((near, 2), (far, 1)):
            found = await client.submit("mirror", [], key=key)
            assert (await found.result(timeout=60)).value() == asked


async def test_a_cancel_reaches_requests_in_other_partitions(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(valkey.url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        task = await client.submit("patient", "far", task_id="t-0")
        home = partition_of("t-0", PARTITIONS)
        there = place("waiter", "far")
        assert home != there, "choose another key: this one lives where the task does"
        bus = client.buses[there]

        async def busy() -> bool:
            return bool(await bus.transport.call("HEXISTS", bus.keys.instance("waiter", "far"), "busy"))

        async def free() -> bool:
            return not await busy()

        await until(busy, 60, "the instance elsewhere waits for its human")
        assert await task.cancel("enough") == "cancelled"
        await until(free, 60, "the instance elsewhere is free again")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Server]]:
    """Three masters."""
    servers: list[Server] = []
    try:
        for number in range(3):
            folder = tmp_path / f"node{number}"
            folder.mkdir()
            server: Server = ValkeyServer(folder, append=None, options=CLUSTER_OPTIONS)
            server.start()
            servers.append(server)
        yield servers
    finally:
        for server in servers:
            server.kill()


async def test_partitions_spread_over_a_cluster(cluster: list[Server], namespace: str, tmp_path: Path) -> None:
    await join(cluster)
    url = cluster[1].url
    async with (
        Fleet(url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        await ask_everywhere(client)
        edge = RespTransport(parse_address(url))
        await edge.connect(10)
        body = b'{"agent":"asker","input":["k0"]}'
        await edge.call(
            "XADD", f"{namespace}:tasks", "*", "type", "weft.task.submit", "id", "c-1", "replyto", "answers",
            "data", body,
        )  # fmt: skip

        async def answered() -> bool:
            return await edge.call("XLEN", "answers") == 2

        await until(answered, 30, "accepted and completed are on the reply stream")
        await edge.close()


async def test_publishers_streams_lie_on_all_servers_of_a_cluster(
    cluster: list[Server], namespace: str, tmp_path: Path
) -> None:
    await join(cluster)
    url = cluster[1].url
    names = [f"shop-{number}" for number in range(6)]
    async with (
        Fleet(url, namespace, tmp_path, environ=SETTINGS),
        Client.connect(url, namespace=namespace, partitions=PARTITIONS) as client,
    ):
        for name in names:
            await Publishers(client.buses[0]).set(Publisher(name=name, tenant="acme"))
        edge = RespTransport(parse_address(url))
        await edge.connect(10)
        for name in names:
            body = json.dumps({"agent": "asker", "input": ["k0"], "task_id": name})
            await edge.call(
                "XADD", f"{namespace}:tasks:{name}", "*", "type", "weft.task.submit", "id", "e", "data", body
            )

        async def completed() -> bool:
            return all([await status(client, f"acme.{name}") == b"completed" for name in names])

        await until(completed, 60, "a task of each publisher completed")
        await edge.close()


async def status(client: Client, task: str) -> object:
    handle = await client.task(task)
    return await handle.bus.transport.call("HGET", handle.bus.keys.task(task), "status")
