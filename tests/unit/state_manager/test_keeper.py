"""Housekeeping removes expired data from the broker, at any rate of tasks."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.bus.replies import TRIM_EVERY
from runtime_core.client.client import Client
from runtime_core.host.local import LocalApp
from runtime_core.state_manager.keeper import SWEEP_BATCH, Keeper, RecordFollower
from runtime_core.state_manager.measures import Measures
from runtime_core.telemetry.metrics import Metrics
from weft import AgentContext, App, Reject

LONG_AGO_MS = 1
DEADLINE_SECONDS = 60.0


async def test_one_round_of_chores_forgets_all_expired_tasks_of_the_index(namespace: str) -> None:
    transport = await connect("memory://")
    keys = (await open_namespace(transport, namespace, 1))[0]
    bus = EventBus(transport, keys)
    await bus.make_groups(())
    expired = [f"expired-{number}" for number in range(3 * SWEEP_BATCH)]
    for task in (*expired, "kept"):
        await transport.call("ZADD", keys.index, LONG_AGO_MS, task)
    await transport.call("HSET", keys.task("kept"), "status", "waiting")

    metrics = Metrics(CollectorRegistry(), "state-manager")
    measures = Measures(bus, metrics.measured, lambda: True, transport)
    keeper = Keeper(
        bus, retention_seconds=0.0, follow_record=RecordFollower(bus, metrics).follow, measure=measures.refresh
    )
    chores = asyncio.create_task(keeper.run())
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        first_look = cast(int, await transport.call("ZCARD", keys.index))
        while (left := cast(int, await transport.call("ZCARD", keys.index))) == first_look:
            assert time.monotonic() < deadline, "the index was never swept"
            await asyncio.sleep(0)
        # The sweep is under way: it does not stop before all that is due is gone, and waits for nothing else.
        last_change = time.monotonic()
        while left > 1 and time.monotonic() - last_change < 0.3:
            now = cast(int, await transport.call("ZCARD", keys.index))
            if now != left:
                left, last_change = now, time.monotonic()
            await asyncio.sleep(0)
        assert cast(list[bytes], await transport.call("ZRANGE", keys.index, 0, -1)) == [b"kept"]
    finally:
        chores.cancel()
        await asyncio.wait((chores,))
        await transport.close()


def objects_of_the_runtime() -> Counter[str]:
    """Count the live objects of each of our classes."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        module = getattr(type(each), "__module__", "")
        if isinstance(module, str) and module.startswith("runtime_core."):
            found[f"{module}.{type(each).__qualname__}"] += 1
    return found


async def test_the_line_of_a_failed_task_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = App("refusing")

    @app.agent("refuses")
    async def refuses(ctx: AgentContext) -> None:
        raise Reject("no such order")

    async with LocalApp(app) as client:
        assert (await (await client.submit("refuses", task_id="t-1")).result(timeout=60)).status == "failed"
        follower = RecordFollower(client.buses[0], Metrics(CollectorRegistry(), "state-manager"))
        await client.buses[0].publish_cursor("state-manager", "0-0")
        await follower.follow()
    lines = [record.message for record in caplog.records if record.message.startswith("task t-1 (refuses) failed in")]
    assert lines
    assert lines[-1].endswith(", 1 step: Reject: no such order")


async def test_hundreds_of_tasks_leave_nothing_behind_in_their_process() -> None:
    app = App("many")

    @app.tool
    async def double(number: int) -> int:
        return 2 * number

    @app.agent("child")
    async def child(ctx: AgentContext, number: int) -> int:
        return int(await ctx.tool(double, number=number))

    @app.agent("parent")
    async def parent(ctx: AgentContext, number: int) -> int:
        ctx.context.put("number", number)
        return int(await ctx.agent("child", number))

    async with LocalApp(app) as client:

        async def run(count: int) -> None:
            for number in range(count):
                task = await client.submit("parent", number, session_id=f"s-{number}")
                assert (await task.result(timeout=60)).value() == 2 * number

        await run(20)
        before = objects_of_the_runtime()
        await run(300)
        # Rings and caches of a fixed size may still fill; an object kept for each task would count 300.
        grown = {name: count for name, count in (objects_of_the_runtime() - before).items() if count > 100}
        assert not grown
        # The broker keeps ended tasks only for their retention time.
        call = client.buses[0].transport.call
        tasks = cast(list[bytes], await call("KEYS", f"{client.namespace}:*task:*"))
        assert len(tasks) == 320
        assert all([cast(int, await call("PTTL", task)) > 0 for task in tasks])


async def test_a_client_removes_the_replies_that_it_has_read(namespace: str) -> None:
    async with Client.connect("memory://", namespace=namespace) as client:
        call = client.buses[0].transport.call
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := cast(list[bytes], await call("KEYS", f"{namespace}:*reply:*"))):
            assert time.monotonic() < deadline, "the client made no reply stream"
            await asyncio.sleep(0)
        for number in range(3 * TRIM_EVERY):
            await call("XADD", found[0], "*", "t", f"task-{number}", "d", "{}")
        while cast(int, await call("XLEN", found[0])) > TRIM_EVERY:
            assert time.monotonic() < deadline, "replies that were read stay on the broker"
            await asyncio.sleep(0.01)
