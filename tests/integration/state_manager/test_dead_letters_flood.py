"""A flood of refused commands does not fill the broker, and another sender's task completes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from redis.exceptions import OutOfMemoryError

from runtime_core.bus.keys import Keys, ingress
from runtime_core.client.client import Client
from runtime_core.errors import Rejected, ServerError
from tests.conftest import OwnServer
from tests.fleet import Fleet, PlainRedis, plain_redis

pytestmark = pytest.mark.timeout(300)

SECONDS = 120.0
MEMORY = 64 * 1024**2
BOUND = MEMORY // 10
SUBMIT = "weft.task.submit"


async def append(redis: PlainRedis, key: str, fields: Mapping[str, str | bytes]) -> None:
    """Append an entry as soon as the server has memory for it."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            await redis.xadd(key, fields)
            return
        except OutOfMemoryError:
            assert time.monotonic() < deadline, "the broker stays full"
            await asyncio.sleep(0.1)


async def answered(client: Client, value: int) -> object:
    """Submit a task as soon as the server has memory for it, and return its output."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            task = await client.submit("echo", value)
            return (await task.result(timeout=SECONDS)).output
        except (ServerError, Rejected):
            assert time.monotonic() < deadline, "no task gets through"
            await asyncio.sleep(0.1)


async def test_a_flood_of_refused_commands_does_not_fill_the_broker(
    own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    server = own_server(append=None)
    keys, stream = Keys(namespace, 0), ingress(namespace)
    async with (
        Fleet(server.url, namespace, tmp_path, lease_seconds=3.0) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
        plain_redis(server.port) as redis,
    ):
        await redis.config_set("maxmemory", MEMORY)
        assert await answered(client, 0) == 0

        oversized = b"x" * (8 * 1024**2)
        for number in range(100):
            await append(redis, stream, {"type": SUBMIT, "id": f"large-{number}", "data": oversized})
            if number == 50:
                assert await answered(client, 1) == 1
        # Within the size limit, so their letters are whole: more than fit.
        unknown = json.dumps({"agent": "nobody", "input": "x" * 1_000_000})
        for number in range(20):
            await append(redis, stream, {"type": SUBMIT, "id": f"unknown-{number}", "data": unknown})
        deadline = time.monotonic() + SECONDS
        while await redis.xlen(stream):
            assert time.monotonic() < deadline, "commands are left"
            await asyncio.sleep(0.05)
        assert await answered(client, 2) == 2

        assert int(await redis.hget(keys.letters("bytes"), "")) <= BOUND
        assert int(await redis.memory_usage(keys.dead)) <= 1.5 * BOUND
        trimmed = int(await redis.hget(keys.letters("trimmed"), "bytes tasks"))
        assert trimmed + await redis.xlen(keys.dead) == 120, "each is kept, or was trimmed and is counted"
        assert (await redis.info("memory"))["used_memory"] < MEMORY / 2
        deadline = time.monotonic() + SECONDS
        while "WEFT_DEAD_MAX_BYTES" not in fleet.members["state-manager-1"].text():
            assert time.monotonic() < deadline, "what was trimmed is not in the log"
            await asyncio.sleep(0.05)
