"""On SIGTERM a handler hands back work that outlasts its stop time; others continue it, without counting an attempt."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.wire.events import StreamingMode
from tests.chaos.invariants import check_broker
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HANDLERS = ("agent-handler-1", "tool-handler-1")
TOOLS = {"waits": "waited", "holds_a_thread": "held", "stubborn": "stayed", "once": "UnknownOutcome"}
"""The end of a task that calls this tool."""
LONG = [*TOOLS, "computes", "streams"]


async def test_long_work_of_all_kinds_is_handed_back(valkey: Server, namespace: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.touch()
    folder = str(tmp_path)

    def lines() -> Counter[str]:
        return Counter(begun.read_text().splitlines())

    fleet = Fleet(
        valkey.url, namespace, tmp_path, app="tests.apps.stopping_app:app", environ={"WEFT_SHUTDOWN_SECONDS": "12"}
    )
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        tasks = {name: await client.submit("calls", {"tool": name, "folder": folder}) for name in TOOLS}
        tasks["computes"] = await client.submit("steps", folder)
        tasks["streams"] = await client.submit("streams", folder, stream=StreamingMode.ALL)
        tasks["asks"] = await client.submit("asks", folder, stream=StreamingMode.ALL)
        tasks["naps"] = await client.submit("naps", 1.0)
        first = Counter({f"{name} 1": 1 for name in LONG})

        async def all_begun() -> bool:
            return lines() == first

        await until(all_begun, 60, "all work has begun")
        request = ""
        async for event in tasks["asks"].stream():
            if event.type == "weft.human.requested":
                request = str(event.data["request_id"])
                break

        # Each ends with status 0, or the fleet says so; nothing is left to wait for its lease.
        await asyncio.gather(*(fleet.replace(name) for name in HANDLERS))
        async with plain_redis(valkey.port) as redis:
            alive = b" ".join(await redis.zrange(f"{namespace}:{{0}}:alive", 0, -1)).decode()
        for name in HANDLERS:
            [pid] = fleet.members[name].replaced
            assert f".{pid}." not in alive, f"{name} left without a word"
        assert "ignored their cancellation" in fleet.members["tool-handler-1"].text()

        # All but what may not be repeated begins again, as the same attempt.
        second = Counter({f"{name} 1": 1 if name == "once" else 2 for name in LONG})

        def second_lines() -> Counter[str]:
            """A turn that finds the output of another process runs once more, from its top."""
            found = lines()
            found["streams 1"] = min(found["streams 1"], 2)
            return found

        async def all_begun_again() -> bool:
            return second_lines() == second

        await until(all_begun_again, 60, "others go on with it")
        (tmp_path / "gate").touch()
        await tasks["asks"].signal(request, "yes")
        ends = {name: await task.result(timeout=120) for name, task in tasks.items()}
        wanted = {**TOOLS, "computes": "computed", "streams": "streamed", "asks": "yes", "naps": "rested"}
        assert {name: (end.status, end.output) for name, end in ends.items()} == {
            name: ("completed", output) for name, output in wanted.items()
        }
        assert second_lines() == second
        async with plain_redis(valkey.port) as redis:
            await check_broker(redis, namespace, seconds=60.0)
