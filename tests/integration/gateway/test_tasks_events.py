"""Events of a task over HTTP: complete, resumable, bounded, and ended in order when a replica stops."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx2
import pytest

from tests.fleet import Fleet, until
from tests.integration.gateway.gateways import SECONDS, Event, ended, events, gateway_fleet, http, problem, url_of
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)
PIECES = 60


async def read(client: httpx2.AsyncClient, task: str, after: str = "", most: int = 10_000) -> tuple[int, list[Event]]:
    """Read at most this many events behind `after`; return the status too."""
    found: list[Event] = []
    headers = {"Last-Event-ID": after} if after else {}
    async with client.stream("GET", f"/v1/tasks/{task}/events", headers=headers) as response:
        if response.status_code == 200:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for event in events(response):
                found.append(event)
                if len(found) == most:
                    break
        return response.status_code, found


async def test_a_stream_that_is_cut_at_random_loses_and_doubles_nothing(
    valkey: Server, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    chance = random.Random(chaos_seed)
    async with gateway_fleet(valkey, namespace, tmp_path, gateways=2) as fleet:
        wanted = {"pieces": PIECES, "seconds": 3}
        async with http(fleet) as client:
            body = {"agent": "murmurs", "input": wanted, "task_id": "m", "conf": {"streaming_mode": "all"}}
            assert (await client.post("/v1/tasks", json=body)).status_code == 202
        found: list[Event] = []
        while not found or found[-1].type != "weft.task.completed":
            async with http(fleet, chance.choice(["gateway-1", "gateway-2"])) as client:
                last = found[-1].id if found else ""
                found += (await read(client, "m", last, chance.randint(1, 12)))[1]
        async with http(fleet) as client:
            assert (await read(client, "m"))[1] == found
            assert (await read(client, "m", found[-1].id)) == (204, [])
        pieces = [event.data for event in found if event.type == "weft.output.delta"]
        assert [piece["text"] for piece in pieces] == [f"piece {n}" for n in range(PIECES)]
        assert len({event.id for event in found}) == len(found)
        assert all({"run_id", "attempt", "seq"} <= piece.keys() for piece in pieces)


async def test_a_task_without_a_stream_of_its_own_ends_once(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "quiet"})
        await ended(client, "quiet")
        status, found = await read(client, "quiet")
        assert status == 200
        assert [event.type for event in found] == ["weft.task.completed"]
        assert await read(client, "quiet", found[-1].id) == (204, [])


async def test_a_replica_that_stops_ends_its_streams_and_readers_continue_at_another_one(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path, gateways=2) as fleet:
        async with http(fleet) as client, http(fleet, "gateway-2") as other:
            body = {"agent": "asks", "input": "Go on?", "task_id": "a"}
            await client.post("/v1/tasks", json=body)
            got: list[Event] = []
            asked = asyncio.Event()

            async def follow() -> None:
                async with client.stream("GET", "/v1/tasks/a/events") as response:
                    async for event in events(response):
                        got.append(event)
                        asked.set()

            following = asyncio.create_task(follow())
            await asyncio.wait_for(asked.wait(), SECONDS)
            before = url_of(fleet)
            fleet.terminate("gateway-1")
            await asyncio.wait_for(following, SECONDS)
            answer = {"request_id": got[-1].data["request_id"], "value": 1}
            assert (await other.post("/v1/tasks/a/answers", json=answer)).status_code == 200
            rest = (await read(other, "a", got[-1].id))[1]
            await _until_replaced(fleet, before)
        assert [event.type for event in got + rest] == ["weft.human.requested", "weft.task.completed"]


async def test_streams_are_bounded_and_a_reader_that_leaves_makes_room(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    environ = {"WEFT_HTTP_STREAMS_MAX": "1"}
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:
        await client.post("/v1/tasks", json={"agent": "asks", "input": "Go on?", "task_id": "a"})
        async with client.stream("GET", "/v1/tasks/a/events") as response:
            reading = events(response)  # named: the end of this generator closes the response
            assert (await anext(reading)).type == "weft.human.requested"
            refused = await client.get("/v1/tasks/a/events")
            assert problem(refused) == (429, "streams", "")
            assert refused.headers["retry-after"] == "1"

        async def has_room() -> bool:
            async with client.stream("GET", "/v1/tasks/a/events") as response:
                return response.status_code == 200

        await until(has_room, SECONDS, "room for a stream")


async def test_a_kill_of_a_replica_loses_no_event(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet:
        async with http(fleet) as client:
            body = {"agent": "murmurs", "input": {"pieces": PIECES, "seconds": 3}, "task_id": "m"}
            await client.post("/v1/tasks", json=body)
            got = (await read(client, "m", most=10))[1]
            before = url_of(fleet)
            fleet.kill("gateway-1")
        await _until_replaced(fleet, before)
        async with http(fleet) as client:
            rest = (await read(client, "m", got[-1].id))[1]
        pieces = [event.data["text"] for event in got + rest if event.type == "weft.output.delta"]
        assert pieces == [f"piece {n}" for n in range(PIECES)]


async def _until_replaced(fleet: Fleet, before: str) -> None:
    async def is_replaced() -> bool:
        return url_of(fleet) != before and fleet.members["gateway-1"].ready()

    await until(is_replaced, SECONDS, "the next gateway")
