"""Schedules with services whose leader dies, and in an app in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from runtime_core.host.local import LocalApp
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server
from weft import AgentContext, App, Client
from weft.errors import InvalidInput

app = App("clockwork")


@app.agent("tick")
async def tick(ctx: AgentContext, text: str) -> str:
    return text


async def ended(client: Client, task_id: str) -> str:
    """Return the output of a task that may not have started."""
    while True:
        try:
            return str((await (await client.task(task_id)).result(timeout=60)).value())
        except InvalidInput:
            await asyncio.sleep(0.02)


async def test_a_local_app_has_schedules_too() -> None:
    async with asyncio.timeout(60), LocalApp(app) as client:
        await client.schedule("often", "tick", "again", every=timedelta(seconds=1))
        later = await client.schedule("once", "tick", "late", delay=0.05)
        assert await ended(client, later.next_task_id) == "late"
        (often,) = [schedule for schedule in await client.schedules() if schedule.schedule_id == "often"]
        assert await ended(client, often.next_task_id) == "again"
        task = await client.run_schedule("often")
        assert (await task.result(timeout=60)).value() == "again"
        assert await client.unschedule("often")
        assert not await client.unschedule("often")


async def test_a_time_in_the_past_starts_at_once() -> None:
    async with asyncio.timeout(60), LocalApp(app) as client:
        schedule = await client.schedule("past", "tick", "now", at=datetime.now(UTC) - timedelta(days=1))
        assert await ended(client, schedule.next_task_id) == "now"
        with pytest.raises(InvalidInput, match="no time zone"):
            await client.schedule("naive", "tick", at=datetime(2030, 1, 1))  # the mistake that is meant
        with pytest.raises(InvalidInput, match=r'^at: "tomorrow" is not a time'):
            await client.schedule("wordy", "tick", at="tomorrow")  # type: ignore[call-overload]  # what a user may give
        with pytest.raises(InvalidInput, match=r"^task_id: 3 is not text"):
            await client.task(3)  # type: ignore[arg-type]  # as above


@pytest.mark.timeout(300)
async def test_each_time_starts_one_task_even_if_leaders_die(
    shared_server: Callable[[str], Server], namespace: str, tmp_path: Path
) -> None:
    """State-managers are killed repeatedly while a schedule fires every second."""
    server = shared_server("valkey-9")
    replicas = {"agent-handler": 1, "state-manager": 2}
    fleet = Fleet(
        server.url, namespace, tmp_path, replicas=replicas, app="tests.integration.state_manager.test_scheduler:app"
    )
    async with fleet, Client.connect(server.url, namespace=namespace) as client, plain_redis(server.port) as redis:
        data = {"schedule_id": "often", "agent": "tick", "input": "again", "every_seconds": 1, "overlap": "start"}
        await redis.xadd(f"{namespace}:tasks", {"type": "weft.schedule.set", "data": json.dumps(data)})

        async def started() -> int:
            found = await client.schedules()
            return found[0].started if found else 0

        async def removed() -> bool:
            return not await client.schedules()

        for _ in range(3):
            before = await started()
            await until(partial(_more, started, before), 30, "the schedule comes again")
            for name in fleet.names("state-manager"):
                fleet.kill(name)
            await fleet.ready()
        await until(partial(_more, started, await started()), 30, "the schedule comes after the last kill")
        counted = await started()
        await redis.xadd(f"{namespace}:tasks", {"type": "weft.schedule.delete", "data": '{"schedule_id":"often"}'})
        await until(removed, 60, "the schedule is removed")
        tasks = [key.decode().rpartition(":")[2] async for key in redis.scan_iter(match=f"{namespace}:*:task:often-*")]
        times = sorted(int(task.removeprefix("often-")) for task in tasks)
        assert {(time - times[0]) % 1000 for time in times} == {0}, "each is one of the schedule's times"
        assert counted <= len(times) <= (times[-1] - times[0]) // 1000 + 1, "one task for each start, and no other"
        for task in tasks:
            assert await ended(client, task) == "again"


async def _more(count: Callable[[], Awaitable[int]], than: int) -> bool:
    return await count() > than
