"""A submit in `weft:tasks` is answered as accepted once it is durable, whatever happens to the state-manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import OwnServer
from tests.fleet import Fleet, PlainRedis, plain_redis, until

WAIT = 60.0
REPLICAS = {"agent-handler": 1, "state-manager": 1}
SLICES = 5
"""Waits of the server that nobody confirms: a wait that covers nothing is over at once."""


async def submit(redis: PlainRedis, namespace: str, task: str) -> None:
    fields = (
        "type",
        "weft.task.submit",
        "id",
        task,
        "replyto",
        task,
        "data",
        json.dumps({"agent": "naps", "input": 600}),
    )
    await redis.execute_command("XADD", f"{namespace}:tasks", "*", *fields)


async def accepted(redis: PlainRedis, task: str) -> bool:
    return "weft.task.accepted" in [fields["type"] for _, fields in await redis.xrange(task)]


@pytest.mark.slow
async def test_no_repeat_is_accepted_while_the_replica_lags(
    own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    """Neither by the next state-manager, nor over a new connection, nor if the sender repeats it."""
    master = own_server(options=("--repl-diskless-sync-delay", "0"))
    replica = own_server(options=("--replicaof", f"127.0.0.1 {master.port}"))
    async with (
        plain_redis(master.port, text=True) as redis,
        plain_redis(replica.port, text=True) as copy,
    ):

        async def in_sync() -> bool:
            return bool((await redis.info("replication")).get("slave0", {}).get("state") == "online")

        await until(in_sync, WAIT, "the replica is in sync")
        environ = {"WEFT_DURABILITY": "quorum"}
        async with Fleet(master.url, namespace, tmp_path, replicas=REPLICAS, environ=environ) as fleet:

            async def first() -> bool:
                return await accepted(redis, "first")

            async def second() -> bool:
                return await accepted(redis, "second")

            async def waited_in_vain() -> None:
                begun = await waits()

                async def tried() -> bool:
                    return await waits() > begun + SLICES

                await until(tried, WAIT, "the submit waits")
                assert not await second()

            async def waits() -> int:
                return int((await redis.info("commandstats")).get("cmdstat_wait", {}).get("calls", 0))

            await submit(redis, namespace, "first")
            await until(first, WAIT, "the first submit is accepted")
            replica.pause()
            await submit(redis, namespace, "second")
            await waited_in_vain()
            fleet.kill("state-manager-1")
            await fleet.ready(["state-manager-1"])
            await waited_in_vain()
            await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await submit(redis, namespace, "second")
            await waited_in_vain()
            replica.resume()
            await until(second, WAIT, "the second submit is accepted")
            assert await copy.hget(f"{namespace}:{{0}}:task:second", "status")
