"""What is kept on the broker for a while goes again, at any rate of tasks."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.client import TRIM_EVERY, Client
from runtime_core.telemetry.metrics import Metrics
from services.state_manager.housekeeper import SWEEP, Housekeeper

LONG_AGO_MS = 1
DEADLINE_SECONDS = 20.0


async def test_one_round_of_chores_forgets_all_expired_tasks_of_the_index() -> None:
    transport = await connect("memory://")
    keys = (await open_namespace(transport, "weft", 1))[0]
    bus = EventBus(transport, keys)
    await bus.make_groups(())
    expired = [f"expired-{number}" for number in range(3 * SWEEP)]
    for task in (*expired, "kept"):
        await transport.call("ZADD", keys.index, LONG_AGO_MS, task)
    await transport.call("HSET", keys.task("kept"), "status", "waiting")

    chores = asyncio.create_task(Housekeeper(bus, Metrics(CollectorRegistry(), "state-manager"), 0.0).run())
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


async def test_a_client_removes_the_replies_that_it_has_read() -> None:
    async with Client.connect("memory://") as client:
        call = client.buses[0].transport.call
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := cast(list[bytes], await call("KEYS", "*reply:*"))):
            assert time.monotonic() < deadline, "the client made no reply stream"
            await asyncio.sleep(0)
        for number in range(3 * TRIM_EVERY):
            await call("XADD", found[0], "*", "t", f"task-{number}", "d", "{}")
        while cast(int, await call("XLEN", found[0])) > TRIM_EVERY:
            assert time.monotonic() < deadline, "replies that were read stay on the broker"
            await asyncio.sleep(0.01)
