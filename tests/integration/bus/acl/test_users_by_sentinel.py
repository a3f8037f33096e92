"""The services work under their users through a Sentinel, even after a failover."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from redis.asyncio import Redis

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.client.client import Client
from tests.conftest import OwnServer
from tests.fleet import SERVICES, Fleet, PlainRedis, until
from tests.servers.matrix import only_in_matrix
from tests.servers.process import HOST
from tests.servers.sentinel import sentinel

pytestmark = pytest.mark.timeout(300)

# As docs/operations.md gives them, "Users".
SENTINEL = (
    "user sentinel on >sentinel resetchannels -@all +multi +slaveof +ping +exec +subscribe +config|rewrite +role"
    " +publish +info +client|setname +client|kill +script|kill allchannels"
)
REPLICA = "user replica on >replica resetchannels -@all +psync +replconf +ping"


@only_in_matrix("by a Sentinel")
async def test_the_services_work_by_a_sentinel_also_after_a_failover(own_server: OwnServer, tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    lines = [user_line(user, Target(), [hashlib.sha256(user.name.encode()).hexdigest()]) for user in USERS.values()]
    file.write_text("\n".join([*lines, SENTINEL, REPLICA, DEFAULT_OFF, ""]))
    options = ("--aclfile", str(file), "--masteruser", "replica", "--masterauth", "replica")
    master = own_server(options=(*options, "--repl-diskless-sync-delay", "0"))
    replica = own_server(options=(*options, "--replicaof", HOST, str(master.port)))
    signs_in = ("sentinel auth-user main sentinel", "sentinel auth-pass main sentinel")
    admin: PlainRedis
    watcher: PlainRedis
    async with Redis(host=HOST, port=replica.port, username="admin", password="admin", protocol=2) as admin:
        with sentinel(tmp_path / "sentinel", master, *signs_in) as port:
            async with Redis(host=HOST, port=port, protocol=2) as watcher:

                async def ready() -> bool:
                    up = (await admin.info("replication"))["master_link_status"] == "up"
                    return up and bool(await watcher.execute_command("SENTINEL", "REPLICAS", "main"))

                await until(ready, 60, "the Sentinel knows the replica")
            urls = {name: f"redis+sentinel://{name}:{name}@{HOST}:{port}/main" for name in (*SERVICES, "client")}
            async with (
                Fleet(urls["client"], "weft", tmp_path / "fleet", urls=urls) as fleet,
                Client.connect(urls["client"], namespace="weft") as client,
            ):
                before = await client.submit("echo", "before")
                assert (await before.result(timeout=60)).output == "before"

                async def copied() -> bool:
                    return (await admin.info("replication"))["master_link_status"] == "up" and bool(
                        await admin.exists("weft:{0}:task:" + before.task_id)
                    )

                await until(copied, 60, "the replica has the task")
                master.kill()
                after = await client.submit("echo", "after")
                assert (await asyncio.wait_for(after.result(timeout=120), 120)).output == "after"
                assert (await admin.execute_command("ROLE"))[0] in (b"master", "master")
                assert fleet.names()
            refused = {(each["username"], each["object"]) for each in await admin.acl_log()}
            assert refused <= {(name, "function|load") for name in SERVICES}
