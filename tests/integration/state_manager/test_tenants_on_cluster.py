"""On a Cluster of three masters with the users of `weft acl`, all services work and tenants are isolated."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoPermissionError

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, find_users, lacking, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.bus.keys import Keys
from runtime_core.client.client import Client
from runtime_core.wire.ids import partition_of
from tests.conftest import OwnServer
from tests.fleet import SERVICES, Fleet, PlainRedis, until
from tests.integration.bus.test_partition import PARTITIONS, ask_everywhere
from tests.servers.cluster import CLUSTER_OPTIONS, join
from tests.servers.matrix import only_in_matrix, repeat_on
from tests.servers.process import HOST, Server

# What these promise on a Cluster, `test_publishers.py` promises on one server. That services work on a Cluster as their
# own users, `tests/integration/bus/acl/test_every_feature.py` shows.
pytestmark = [pytest.mark.timeout(300), only_in_matrix("publishers on a Cluster")]

PUBLISHERS = {"shop": "acme", "desk": "globex"}
FLOOD = 5_000
LONE_SECONDS = 10.0
"""Far less than the flood takes, and far more than a lone task takes on a busy machine."""
DEAD_MAX_BYTES = 4 * 1024 * 1024


@dataclass
class Cluster:
    """Servers that know all users, whose passwords are their names."""

    servers: list[Server]

    def url(self, user: str, server: int = 1) -> str:
        return f"redis://{user}:{user}@{HOST}:{self.servers[server].port}"

    @asynccontextmanager
    async def program(self, user: str) -> AsyncIterator[PlainRedis]:
        """A program without Weft, with a client library for Clusters."""
        client: PlainRedis
        async with RedisCluster.from_url(self.url(user), protocol=2) as client:
            yield client

    async def refusals(self) -> set[tuple[str, str]]:
        """Return what the servers have refused to whom.

        Left out are a setting that the operator need not see, and functions that a handler tried to load because it
        started before the state-manager had.
        """
        found: set[tuple[str, str]] = set()
        for number in range(len(self.servers)):
            admin: PlainRedis
            async with Redis.from_url(self.url("admin", number), protocol=2) as admin:
                found |= {(each["username"], each["object"]) for each in await admin.acl_log()}
        return {each for each in found if each != ("operator", "config|get") and each[1] != "function|load"}


@pytest.fixture(params=repeat_on("valkey-9", "redis-7.0"))
def cluster(request: pytest.FixtureRequest, own_server: OwnServer, tmp_path: Path) -> Cluster:
    kind: str = request.param
    target = Target(partitions=PARTITIONS, lacks=lacking(kind))
    users = find_users(USERS, PUBLISHERS)
    lines = [user_line(user, target, [hashlib.sha256(user.name.encode()).hexdigest()]) for user in users]
    file = tmp_path / "users.acl"
    file.write_text("\n".join([*lines, DEFAULT_OFF, ""]))
    options = (*CLUSTER_OPTIONS, "--aclfile", str(file))
    return Cluster([own_server(kind, append=None, options=options) for _ in range(3)])


@asynccontextmanager
async def services(cluster: Cluster, folder: Path, **environ: str) -> AsyncIterator[Fleet]:
    """Each service under its own user, and the publishers registered."""
    for server in cluster.servers:
        assert server.running
    await join(cluster.servers, lambda server: cluster.url("admin", cluster.servers.index(server)))
    async with Fleet(
        cluster.url("operator"),
        "weft",
        folder,
        app="tests.apps.cluster_app:app",
        urls={service: cluster.url(service) for service in SERVICES},
        environ={"WEFT_PARTITIONS": str(PARTITIONS), **environ},
    ) as fleet:
        for name, tenant in PUBLISHERS.items():
            assert (await fleet.weft("publisher", "set", name, "--tenant", tenant)).returncode == 0
        yield fleet


async def asked_for(fleet: Fleet, *arguments: str) -> Any:  # Any: JSON
    done = await fleet.weft(*arguments, "--json")
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)


async def send(publisher: PlainRedis, name: str, kind: str, data: object, **attributes: str) -> None:
    await publisher.xadd(f"weft:tasks:{name}", {"type": f"weft.{kind}", "data": json.dumps(data), **attributes})


async def answer(publisher: PlainRedis, stream: str, kind: str) -> dict[str, Any]:  # Any: JSON
    """Return the data of the first answer of this type."""
    found: list[dict[str, Any]] = []

    async def arrived() -> bool:
        for _, fields in await publisher.xrange(stream):
            if fields[b"type"].decode().endswith(kind):
                found.append(json.loads(fields[b"data"]))
        return bool(found)

    await until(arrived, 60, f"{kind} on {stream}")
    return found[0]


async def test_every_user_does_its_work_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        services(cluster, tmp_path / "fleet") as fleet,
        Client.connect(cluster.url("client"), namespace="weft", partitions=PARTITIONS) as client,
    ):
        await ask_everywhere(client)
        for number in range(2 * PARTITIONS):
            task = await client.submit("errand", "word", task_id=f"errand-{number}")
            assert (await task.result(timeout=60)).value() == "word"
        assert len({partition_of(f"errand-{number}", PARTITIONS) for number in range(2 * PARTITIONS)}) == PARTITIONS
        # Streams of one publisher's answers lie on all servers, as its own stream does not.
        async with cluster.program("shop") as shop, cluster.program("publisher") as trusted:
            for number in range(6):
                stream = f"shop:answers:{number}"
                wanted = {"agent": "errand", "input": f"word {number}"}
                await send(shop, "shop", "task.submit", wanted, id=f"{number}", replyto=stream)
                assert (await answer(shop, stream, "completed"))["output"] == f"word {number}"
                assert await shop.delete(stream) == 1
            wanted = {"agent": "echo", "input": "hello", "task_id": "trusted"}
            await trusted.xadd("weft:tasks", {"type": "weft.task.submit", "data": json.dumps(wanted)})
            await trusted.xadd("weft:tasks", {"nonsense": "x"})
        async with cluster.program("scaler") as scaler:

            async def all_admitted() -> bool:
                return not await scaler.xlen("weft:tasks")

            await until(all_admitted, 60, "the commands of the trusted publisher were taken")
        assert (await (await client.task("trusted")).result(timeout=60)).output == "hello"
        found = await asked_for(fleet, "doctor", "--clean")
        assert found["ok"], [check for check in found["checks"] if not check["ok"]]
        tasks = {each["task_id"] for each in await asked_for(fleet, "task", "list", "--limit", "500")}
        assert {"trusted", *(f"errand-{number}" for number in range(2 * PARTITIONS))} <= tasks
        [letter] = await asked_for(fleet, "dead", "list")
        assert letter["reason"] == "rejected"
        assert (await fleet.weft("dead", "drop", letter["letter_id"])).returncode == 0
        streams = {row["stream"] for row in (await asked_for(fleet, "lag"))["streams"]}
        assert {"tasks", "tasks:shop", "tasks:desk"} <= streams
        assert await cluster.refusals() == set()


async def test_no_tenant_reaches_another_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(services(cluster, tmp_path / "fleet"))
        shop, desk = [await stack.enter_async_context(cluster.program(name)) for name in PUBLISHERS]
        mine, theirs = "shop:answers:1", "desk:answers:1"
        # One task in each partition, each of which waits for its approval.
        names = {partition_of(f"acme.t{number}", PARTITIONS): f"t{number}" for number in range(30)}
        assert len(names) == PARTITIONS
        questions = {}
        for name in names.values():
            wanted = {"agent": "approver", "input": name, "task_id": name}
            await send(shop, "shop", "task.submit", wanted, id=name, replyto=f"{mine}:{name}")
            questions[name] = await answer(shop, f"{mine}:{name}", "human.requested")
            for task in (name, f"acme.{name}"):
                reply = {"task_id": task, "request_id": questions[name]["request_id"], "value": True}
                await send(desk, "desk", "task.cancel", {"task_id": task})
                await send(desk, "desk", "task.signal", reply)
                await send(desk, "desk", "task.submit", {**wanted, "task_id": task}, id=name, replyto=mine)
        await send(desk, "desk", "task.submit", {"agent": "executor", "input": "x"}, replyto=theirs)
        assert (await answer(desk, theirs, "rejected"))["message"] == "no agent is named executor"
        for key in ("weft:tasks", "weft:tasks:shop", "weft:{0}:agent", mine):
            for command in (("XADD", key, "*", "a", "b"), ("XRANGE", key, "-", "+"), ("DEL", key)):
                with pytest.raises(NoPermissionError):
                    await desk.execute_command(*command)
        for name, asked in questions.items():
            reply = {"task_id": name, "request_id": asked["request_id"], "value": True}
            await send(shop, "shop", "task.signal", reply)
            end = await answer(shop, f"{mine}:{name}", "task.completed")
            assert (end["task_id"], end["output"]) == (f"acme.{name}", ["acme", name])
        assert (await asked_for(fleet, "doctor"))["ok"]
        refused = await cluster.refusals()
        assert {user for user, _ in refused} == {"desk"}, refused


async def test_a_flood_delays_and_fills_nothing_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Send a flood of submits to all partitions and servers, and one of refused commands."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            services(cluster, tmp_path / "fleet", WEFT_DEAD_MAX_BYTES=str(DEAD_MAX_BYTES))
        )
        shop, desk, admin = [await stack.enter_async_context(cluster.program(name)) for name in (*PUBLISHERS, "admin")]
        fleet.pause("state-manager-1")
        for number in range(FLOOD):
            wanted = {"agent": "echo", "input": number, "task_id": f"{number}"}
            await send(desk, "desk", "task.submit", wanted, replyto=f"desk:answers:{number % 7}")
            if number % 50 == 0:
                await send(desk, "desk", "task.submit", {"agent": "nobody", "input": "x" * 500_000})
        fleet.resume("state-manager-1")
        left = await admin.xlen("weft:tasks:desk")

        async def under_way() -> bool:
            return bool(await admin.xlen("weft:tasks:desk") < left - 100)

        await until(under_way, 60, "the flood is being read")
        for number in range(5):
            began = time.monotonic()
            stream = f"shop:answers:{number}"
            await send(
                shop, "shop", "task.submit", {"agent": "echo", "input": "me too"}, id=f"{number}", replyto=stream
            )
            assert (await answer(shop, stream, "completed"))["output"] == "me too"
            assert time.monotonic() - began < LONE_SECONDS
        assert await admin.xlen("weft:tasks:desk") > 0, "the flood was over before"
        keys = Keys("weft", 0)
        sizes = [int(await admin.hget(Keys("weft", number).letters("bytes"), "") or 0) for number in range(PARTITIONS)]
        assert 0 < sum(sizes) <= DEAD_MAX_BYTES
        assert await admin.memory_usage(keys.dead) <= 1.5 * DEAD_MAX_BYTES
