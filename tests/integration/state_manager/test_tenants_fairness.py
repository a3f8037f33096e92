"""A tenant's flood does not delay another tenant's only task, with services as processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect
from runtime_core.client.client import Client
from runtime_core.wire.commands import Submission
from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.servers.process import Server
from weft import SubmitOptions

pytestmark = pytest.mark.timeout(300)

FLOOD = 20_000
OVERTAKEN = 1_000
"""Tasks of the flood that may end while the lone task runs: at most a second's worth."""


async def flood(url: str, namespace: str, count: int, tenant: str) -> None:
    """Submit tasks as fast as the broker accepts them, without reading answers."""
    transport = await connect(url)
    bus = EventBus(transport, Keys(namespace, 0))
    try:
        for start in range(0, count, 1000):
            await asyncio.gather(
                *(
                    bus.submit(
                        Submission(f"{tenant}-{n}", "flood", f"{n}", "d", "echo", b"1", tenant=tenant, in_turn=True)
                    )
                    for n in range(start, min(count, start + 1000))
                )
            )
    finally:
        await transport.close()


async def opened(redis: PlainRedis, namespace: str) -> int:
    return int(await redis.zcard(f"{namespace}:{{0}}:open:flood"))


async def test_a_lone_task_starts_behind_a_flood(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        plain_redis(valkey.port) as redis,
        Fleet(valkey.url, namespace, tmp_path, replicas={"agent-handler": 1, "state-manager": 1}) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        await (await client.submit("echo", "is everybody there?")).result(timeout=60)
        fleet.pause("agent-handler-1")  # a flood needs no more than one submitter this way
        await flood(valkey.url, namespace, FLOOD, "flood")
        stream = f"{namespace}:{{0}}:agent"
        assert int(await redis.xlen(stream)) < 500, "the work stream stays short"
        fleet.resume("agent-handler-1")

        async def under_way() -> bool:
            return await opened(redis, namespace) < FLOOD - 500

        await until(under_way, 60, "the flood is being worked on")
        before, began = await opened(redis, namespace), time.monotonic()
        answer = await (await client.submit("echo", "me too", options=SubmitOptions(tenant="lone"))).result(timeout=60)
        seconds, ended = time.monotonic() - began, before - await opened(redis, namespace)
        print(f"the lone task was answered in {seconds:.3f} s, while {ended} others ended")
        assert answer.value() == "me too"
        assert ended <= OVERTAKEN, f"{ended} tasks of the flood went first, in {seconds:.1f} s"
        assert int(await redis.xlen(stream)) < 500, "the work stream stays short"

        async def done() -> bool:
            return await opened(redis, namespace) == 0

        await until(done, 200, "the flood ends")
        assert not await redis.exists(f"{namespace}:{{0}}:turns:agent")


WIDE = 10_000
"""How many calls one turn of the flood makes."""


@pytest.mark.parametrize(("kind", "stream"), [("tool", "tool"), ("agent", "agent")])
async def test_a_lone_task_continues_behind_a_wide_turn(
    valkey: Server, namespace: str, tmp_path: Path, kind: str, stream: str
) -> None:
    """Its own calls, too. The flood itself is worked off as fast as handlers can."""
    services = {"agent-handler": 1, "tool-handler": 1, "state-manager": 1}
    queues = f"{namespace}:{{0}}:queues"
    async with (
        plain_redis(valkey.port) as redis,
        Fleet(valkey.url, namespace, tmp_path, replicas=services) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        await fleet.ready()
        await (await client.submit("steps", "is everybody there?")).result(timeout=60)
        wanted: dict[str, object] = {"count": WIDE, **({"tool": "slow"} if kind == "tool" else {})}
        wide = await client.submit("wide", wanted, options=SubmitOptions(tenant="flood"))

        async def waiting() -> int:
            return int(await redis.hget(queues, stream) or 0)

        async def under_way() -> bool:
            return 0 < await waiting() < WIDE - 500

        await until(under_way, 60, "the flood is being worked on")
        before, began = await waiting(), time.monotonic()
        answer = await (await client.submit("steps", "me too", options=SubmitOptions(tenant="lone"))).result(timeout=60)
        seconds, moved = time.monotonic() - began, before - await waiting()
        print(f"the lone task was answered in {seconds:.3f} s, while {moved} calls of the flood moved on")
        assert answer.value() == "me too"
        assert 0 < moved <= 5 * OVERTAKEN, f"{moved} calls of the flood went first, in {seconds:.1f} s"
        assert int(await redis.xlen(f"{namespace}:{{0}}:{stream}")) < 500, "the work stream stays short"
        assert (await wide.result(timeout=200)).value() == WIDE
        assert not await redis.exists(f"{namespace}:{{0}}:turns:{stream}", f"{namespace}:{{0}}:delayed")


async def test_no_kill_leaves_a_call_in_its_queue(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        plain_redis(valkey.port) as redis,
        Fleet(
            valkey.url, namespace, tmp_path, replicas={"agent-handler": 2, "tool-handler": 2, "state-manager": 1}
        ) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        await fleet.ready()
        tasks = [
            await client.submit("wide", {"count": 2_000, **more}, options=SubmitOptions(tenant="flood"))
            for more in ({"tool": "slow"}, {})
        ]
        left = 4_000
        for number in range(4):

            async def went_on(left: int = left) -> bool:
                return int(await redis.hget(f"{namespace}:{{0}}:meta", "queued") or 0) < max(1, left - 200)

            await until(went_on, 60, "the handlers work")
            left = int(await redis.hget(f"{namespace}:{{0}}:meta", "queued") or 0)
            fleet.kill(f"{'tool' if number % 2 else 'agent'}-handler-{number // 2 + 1}")
        assert [(await task.result(timeout=200)).value() for task in tasks] == [2_000, 2_000]
        assert await redis.hget(f"{namespace}:{{0}}:meta", "queued") is None


async def test_no_kill_leaves_a_task_in_its_queue(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        plain_redis(valkey.port) as redis,
        Fleet(valkey.url, namespace, tmp_path, replicas={"agent-handler": 2, "state-manager": 1}) as fleet,
    ):
        await fleet.ready()
        await flood(valkey.url, namespace, 5_000, "flood")
        for number in range(4):
            left = await opened(redis, namespace)

            async def went_on(left: int = left) -> bool:
                return await opened(redis, namespace) < max(1, left - 200)

            await until(went_on, 60, "the handlers work")
            fleet.kill(f"agent-handler-{number % 2 + 1}")

        async def done() -> bool:
            return await opened(redis, namespace) == 0

        await until(done, 200, "every task ends")
        meta, queues = f"{namespace}:{{0}}:meta", f"{namespace}:{{0}}:queues"
        assert await redis.hget(meta, "queued") is None
        assert await redis.hget(queues, "agent") is None


async def test_a_state_manager_alone_moves_tasks_on(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """During an update, all handlers may be of a release without queues."""
    stream = f"{namespace}:{{0}}:agent"
    async with (
        plain_redis(valkey.port) as redis,
        Fleet(valkey.url, namespace, tmp_path, replicas={"state-manager": 1}) as fleet,
    ):
        await fleet.ready()
        await redis.hset(f"{namespace}:{{0}}:agents", "echo", "agent")
        await redis.xgroup_create(stream, "agent-handler", "0", mkstream=True)
        await flood(valkey.url, namespace, 300, "flood")
        seen = 0

        async def all_read() -> bool:
            nonlocal seen
            for _, entries in await redis.xreadgroup("agent-handler", "old", {stream: ">"}, count=500) or []:
                seen += len(entries)
            return seen == 300

        await until(all_read, 60, "an old handler gets all of them")
