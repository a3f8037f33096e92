"""Events of a task over HTTP: complete, resumable, bounded, and ended in order when a replica stops."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
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


async def test_a_stream_cut_at_random_loses_and_repeats_nothing(
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


async def test_a_task_without_its_own_stream_ends_once(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "quiet"})
        await ended(client, "quiet")
        status, found = await read(client, "quiet")
        assert status == 200
        assert [event.type for event in found] == ["weft.task.completed"]
        assert await read(client, "quiet", found[-1].id) == (204, [])


async def test_an_id_after_the_last_event_restarts_the_stream(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """A broker that has lost its last second gives lower ids to other events: waiting behind the id would lose them."""
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        body = {"agent": "murmurs", "input": {"pieces": 2, "seconds": 0}, "conf": {"streaming_mode": "all"}}
        await client.post("/v1/tasks", json={**body, "task_id": "m"})
        await ended(client, "m")
        found = await read(client, "m")
        assert {event.type for event in found[1]} == {"weft.output.delta", "weft.step.recorded", "weft.task.completed"}
        assert await read(client, "m", "9999999999999-0") == found
        await client.post("/v1/tasks", json={**body, "task_id": "n", "conf": {}})
        await ended(client, "n")
        assert {event.type for event in (await read(client, "n"))[1]} == {"weft.output.delta", "weft.task.completed"}


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


REPLICAS = ("gateway-1", "gateway-2")
READERS = 30


@dataclass
class Front:
    """Front ends that submit tasks and read their streams, at one replica until it stops, then at the other one."""

    fleet: Fleet
    client: httpx2.AsyncClient
    reading: Counter[str] = field(default_factory=Counter)
    """Open streams by replica."""
    cuts: Counter[str] = field(default_factory=Counter)
    """Streams that a replica ended before their task did."""
    tasks: list[str] = field(default_factory=list)
    stopped: bool = False

    async def work(self, reader: int) -> None:
        at = reader % 2
        while not self.stopped:
            # Some take so long that a replica stops in the middle of them, however busy the machine is.
            seconds = 6.0 if reader % 5 == 0 else 0.5
            at, task = await self._submit(at, f"{reader}-{len(self.tasks)}", seconds)
            self.tasks.append(task)
            at = await self._read(at, task)

    async def _submit(self, at: int, key: str, seconds: float) -> tuple[int, str]:
        body = {"agent": "murmurs", "input": {"pieces": 5, "seconds": seconds}}
        while True:
            try:
                url = f"{url_of(self.fleet, REPLICAS[at])}/v1/tasks"
                answer = await self.client.post(url, json=body, headers={"Idempotency-Key": key})
            except httpx2.TransportError:
                at = 1 - at
                continue
            if answer.status_code == 202:
                return at, str(answer.json()["task_id"])
            assert answer.status_code == 503, answer.text
            at = 1 - at

    async def _read(self, at: int, task: str) -> int:
        found: list[Event] = []
        while not found or found[-1].type != "weft.task.completed":
            name = REPLICAS[at]
            headers = {"Last-Event-ID": found[-1].id} if found else {}
            self.reading[name] += 1
            try:
                url = f"{url_of(self.fleet, name)}/v1/tasks/{task}/events"
                async with self.client.stream("GET", url, headers=headers) as response:
                    assert response.status_code in (200, 503)
                    async for event in events(response):
                        found.append(event)  # noqa: PERF401  # a cut stream keeps what it has sent
            except httpx2.TransportError:
                pass
            self.reading[name] -= 1
            if not found or found[-1].type != "weft.task.completed":
                self.cuts[name] += 1
                at = 1 - at
        assert [e.data["text"] for e in found if e.type == "weft.output.delta"] == [f"piece {n}" for n in range(5)]
        assert len({event.id for event in found}) == len(found)
        return at


async def test_a_rolling_update_loses_and_repeats_nothing(valkey: Server, namespace: str, tmp_path: Path) -> None:
    limits = httpx2.Limits(max_connections=4 * READERS)
    async with (
        gateway_fleet(valkey, namespace, tmp_path, gateways=2) as fleet,
        httpx2.AsyncClient(timeout=SECONDS, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        front = Front(fleet, client)
        working = [group.create_task(front.work(reader)) for reader in range(READERS)]
        for name in REPLICAS:

            async def has_readers(name: str = name) -> bool:
                return front.reading[name] >= READERS // 3

            await until(has_readers, SECONDS, f"readers at {name}")
            before, submitted = url_of(fleet, name), len(front.tasks)
            fleet.terminate(name)
            await _until_replaced(fleet, before, name)
            assert front.cuts[name], "no stream was open"

            async def goes_on(submitted: int = submitted) -> bool:
                return len(front.tasks) > submitted + READERS // 2

            await until(goes_on, SECONDS, "submits while a replica is replaced")
        front.stopped = True
        await asyncio.gather(*working)
        assert len(set(front.tasks)) == len(front.tasks)
        found: list[str] = []
        cursor = ""
        while True:
            query = {"agent": "murmurs", "limit": "200", **({"cursor": cursor} if cursor else {})}
            page = (await client.get(f"{url_of(fleet)}/v1/tasks", params=query)).json()
            found += [row["task_id"] for row in page["tasks"]]
            cursor = page.get("next_cursor") or ""
            if not cursor:
                break
        assert sorted(found) == sorted(front.tasks), "a submit that was repeated made two tasks, or none"


async def _until_replaced(fleet: Fleet, before: str, name: str = "gateway-1") -> None:
    async def is_replaced() -> bool:
        return url_of(fleet, name) != before and fleet.members[name].ready()

    await until(is_replaced, SECONDS, "the next gateway")
