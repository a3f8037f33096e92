"""Queued work of a cancelled task never starts, in any process."""

from __future__ import annotations

from pathlib import Path

from runtime_core.client.client import Client
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server

WAIT = 60.0


async def test_a_tool_handler_that_starts_later_runs_no_call_of_a_cancelled_task(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    async with plain_redis(valkey.port) as redis, Client.connect(valkey.url, namespace=namespace) as client:

        async def queued() -> int:
            return int(await redis.xlen(f"{namespace}:{{0}}:tool"))

        async with Fleet(valkey.url, namespace, tmp_path / "asks", replicas={"agent-handler": 1, "state-manager": 1}):
            task = await client.submit("journey", str(effects))

            async def waits() -> bool:
                return await queued() == 3

            await until(waits, WAIT, "three calls wait")
            await task.cancel()
            assert (await task.result(timeout=WAIT)).status == "cancelled"
            assert await waits()
        async with Fleet(valkey.url, namespace, tmp_path / "runs", replicas={"tool-handler": 1}):

            async def settled() -> bool:
                return await queued() == 0

            await until(settled, WAIT, "the calls are settled")
    assert not effects.exists()
