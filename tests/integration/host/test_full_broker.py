"""At the broker's memory limit, services can restart: only they can free memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.bus.partition import make_group
from runtime_core.client.client import Client
from runtime_core.errors import ConfigurationError, ServerError
from tests.chaos.invariants import check_broker, check_trajectories
from tests.fleet import Fleet, plain_redis
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)


async def test_services_that_come_back_to_a_full_broker_do_its_work(
    own_valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        Fleet(own_valkey.url, namespace, tmp_path) as fleet,
        Client.connect(own_valkey.url, namespace=namespace) as client,
        plain_redis(own_valkey.port) as redis,
    ):
        tasks = [await client.submit("naps", 1.0) for _ in range(3)]
        await redis.config_set("maxmemory", "1mb")
        with pytest.raises(ServerError, match="OOM"):
            await client.submit("naps", 0)
        await fleet.restart()
        ends = [await task.result(timeout=120) for task in tasks]
        assert [end.output for end in ends] == ["rested"] * len(tasks)
        assert "its stored limits stay as they are" in fleet.members["state-manager-1"].text()
        assert "is announced again when memory is free" in fleet.members["agent-handler-1"].text()
        await check_trajectories(fleet.trajectory_url, namespace, ends, 1, seconds=60.0)
        await check_broker(redis, namespace, seconds=60.0)


async def test_a_namespace_cannot_be_created_on_a_full_broker(own_valkey: Server, namespace: str) -> None:
    transport = await connect(own_valkey.url)
    try:
        await transport.call("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(
            ConfigurationError, match=r"^WEFT_REDIS_URL: the broker's memory is full.* raise maxmemory$"
        ):
            await open_namespace(transport, namespace, 1)
        with pytest.raises(ServerError, match="OOM"):
            await make_group(transport, f"{namespace}:x", "group")
    finally:
        await transport.close()
