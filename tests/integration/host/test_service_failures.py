"""Failing handlers, services that die or freeze, unavailable brokers, and invalid settings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from runtime_core.trajectory.store import TrajectoryStore
from tests.chaos.invariants import check_broker, check_effects, check_ends, check_trajectories
from tests.conftest import OwnServer
from tests.fleet import SERVICES, Fleet, PlainRedis, plain_redis, until
from tests.servers.matrix import first_of
from tests.servers.process import Server
from tests.servers.proxy import Proxy
from tests.service_forks import SOURCES, start

pytestmark = pytest.mark.timeout(300)

LEASE = 1.0


@asynccontextmanager
async def connected(url: str, namespace: str) -> AsyncIterator[Client]:
    async with Client.connect(url, namespace=namespace) as client:
        yield client


async def letters_of(server: Server, namespace: str) -> list[dict[str, str]]:
    """Return the dead letters, oldest first."""
    async with plain_redis(server.port, text=True) as redis:
        return [fields for _, fields in await redis.xrange(f"{namespace}:{{0}}:dead")]


async def run(client: Client, agent: str, input: object, *, task_id: str, seconds: float = 60.0) -> TaskResponse:
    handle = await client.submit(agent, input, task_id=task_id)
    return await handle.result(timeout=seconds)


# -- handlers that fail ----------------------------------------------------------------------------------------


FAILING = {
    "tool-raises": ("use", {"tool": "raises"}, "tool", "ValueError", "attempt 3 went wrong"),
    "tool-hangs": ("use", {"tool": "hangs"}, "tool", "Time", "0.3"),
    "tool-unspeakable": ("use", {"tool": "unspeakable"}, "tool", "", "JSON"),
    "agent-raises": ("agent-raises", None, "agent", "ValueError", "attempt 3 went wrong"),
    "agent-hangs": ("agent-hangs", None, "agent", "TimeLimit", "0.3"),
    "agent-unspeakable": ("agent-unspeakable", None, "agent", "", "JSON"),
}
"""By task: its agent and input, the stream of the dead letter, and what the error's type and message contain."""


async def test_handlers_that_fail_are_retried_and_then_dead_letters_and_delay_nobody(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "attempts"
    async with Fleet(valkey.url, namespace, tmp_path / "fleet"), connected(valkey.url, namespace) as client:
        failing = {}
        for task, (agent, input, *_) in FAILING.items():
            arguments = {"arguments": {"path": str(path)}} if task == "tool-raises" else {}
            failing[task] = await client.submit(agent, {**input, **arguments} if input else None, task_id=task)
        good = [await client.submit("use", {"tool": "slow", "arguments": {"seconds": 0}}) for _ in range(20)]
        for handle in good:
            assert (await handle.result(timeout=120)).status == "completed"
        responses = {task: await handle.result(timeout=120) for task, handle in failing.items()}

    letters = {letter["taskid"]: letter for letter in await letters_of(valkey, namespace)}
    assert letters.keys() == FAILING.keys()
    for task, (_, _, stream, type, text) in FAILING.items():
        response = responses[task]
        assert response.status == "failed"
        assert response.error is not None
        assert type in response.error["type"], task
        assert text in response.error["message"], task
        assert letters[task]["stream"] == stream
        assert len(json.loads(letters[task]["errors"])) in (1, 3)
    errors = json.loads(letters["agent-raises"]["errors"])
    assert [error["message"] for error in errors] == [f"attempt {number} went wrong" for number in (1, 2, 3)]
    assert all("Traceback" in error["traceback"] for error in errors)
    attempts = [line.split() for line in path.read_text().splitlines()]
    assert [attempt for attempt, _ in attempts] == ["1", "2", "3"]
    first, second, third = (float(at) for _, at in attempts)
    assert second - first >= 0.29
    assert third - second >= 0.59
    times = [(error["started"] / 1000, error["at"] / 1000) for error in json.loads(letters["tool-raises"]["errors"])]
    for ran, (started, ended) in zip((first, second, third), times, strict=True):
        assert started <= ran + 0.001 <= ended + 0.002, "each error has both ends of its attempt"


@pytest.mark.parametrize("agent", ["agent-dies", "use"])
async def test_a_handler_that_kills_its_process_is_quarantined_and_blames_no_other(
    agent: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "deaths"
    input = str(path) if agent == "agent-dies" else {"tool": "dies", "arguments": {"path": str(path)}}
    async with (
        Fleet(valkey.url, namespace, tmp_path, lease_seconds=LEASE, may_die=True),
        connected(valkey.url, namespace) as client,
    ):
        poison = await client.submit(agent, input, task_id="poison")
        if agent == "agent-dies":
            beside = [await client.submit("dawdles", 0.3) for _ in range(10)]
        else:
            beside = [await client.submit("use", {"tool": "slow", "arguments": {"seconds": 0.3}}) for _ in range(10)]
        for handle in beside:
            assert (await handle.result(timeout=120)).status == "completed"
        response = await poison.result(timeout=120)
        # And the handler is as before: what comes now is not run alone.
        assert (await run(client, "echo", 1, task_id="after")).output == 1

    assert response.status == "failed"
    assert response.error is not None
    assert response.error["type"] == "Poison"
    letters = await letters_of(valkey, namespace)
    assert [letter["taskid"] for letter in letters if letter["reason"] == "poison"] == ["poison"]
    assert {letter["taskid"] for letter in letters} == {"poison"}
    # Three deliveries, then two alone.
    assert len(path.read_text().splitlines()) == 5


# -- services that die or freeze -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "harm"),
    first_of(
        ("agent-handler", "kill"),
        ("tool-handler", "pause"),
        ("agent-handler", "pause"),
        ("tool-handler", "kill"),
        least=2,
    ),
)
async def test_deliveries_of_a_killed_or_paused_handler_continue(
    service: str, harm: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    work = 0.4
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=2, lease_seconds=LEASE) as fleet,
        connected(valkey.url, namespace) as client,
    ):
        if service == "agent-handler":
            handles = [await client.submit("dawdles", work) for _ in range(40)]
        else:
            handles = [await client.submit("use", {"tool": "slow", "arguments": {"seconds": work}}) for _ in range(40)]
        stream = service.partition("-")[0]
        victim = fleet.members[f"{service}-1"]

        async def busy() -> bool:
            async with plain_redis(valkey.port) as redis:
                consumers = await redis.xinfo_consumers(f"{namespace}:{{0}}:{stream}", service)
            return any(each["pending"] > 0 and f".{victim.pid}." in each["name"].decode() for each in consumers)

        await until(busy, 60, f"work in the hands of {victim.name}")
        (fleet.kill if harm == "kill" else fleet.pause)(victim.name)
        responses = [await handle.result(timeout=120) for handle in handles]
        assert {response.status for response in responses} == {"completed"}
        fleet.resume(victim.name)
        if harm == "pause":

            async def came_back() -> bool:
                return "this owner was declared dead" in victim.text()

            await until(came_back, 60, "the paused one hears that it was declared dead")
        # It takes part again, and what it had in hand has changed nothing.
        assert (await run(client, "echo", 1, task_id="after")).output == 1
        assert [(await handle.result(timeout=120)).output for handle in handles] == [each.output for each in responses]
        async with plain_redis(valkey.port) as redis:
            await check_broker(redis, namespace)


@pytest.mark.parametrize("harm", first_of("pause", "kill"))
async def test_another_state_manager_admits_while_the_leader_is_away(
    harm: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=2, lease_seconds=LEASE) as fleet,
        plain_redis(valkey.port) as redis,
    ):
        leader = await leader_of(redis, fleet, namespace, "admit")
        (fleet.kill if harm == "kill" else fleet.pause)(leader)
        for number in range(20):
            await redis.xadd(
                f"{namespace}:tasks",
                {
                    "type": "weft.task.submit",
                    "id": f"t{number}",
                    "replyto": f"{namespace}-answers",
                    "data": json.dumps({"agent": "echo", "input": number}),
                },
            )

        async def completed() -> list[int]:
            found = await redis.xrange(f"{namespace}-answers")
            return [
                json.loads(fields[b"data"])["output"]
                for _, fields in found
                if fields[b"type"] == b"weft.task.completed"
            ]

        async def all_completed() -> bool:
            return len(set(await completed())) == 20

        await until(all_completed, 60, "all answers")
        fleet.resume(leader)
        await check_broker(redis, namespace)


@pytest.mark.parametrize("harm", first_of("kill", "pause"))
async def test_another_recorder_writes_while_the_leader_is_away(
    harm: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=2, lease_seconds=LEASE) as fleet,
        connected(valkey.url, namespace) as client,
        plain_redis(valkey.port) as redis,
    ):
        leader = await leader_of(redis, fleet, namespace, "record")
        with between_writes(fleet.trajectory_url):
            (fleet.kill if harm == "kill" else fleet.pause)(leader)
        await run(client, "echo", 1, task_id="seen")
        store = await TrajectoryStore.open(fleet.trajectory_url)

        async def recorded() -> bool:
            found = await store.task(namespace, "seen")
            return found is not None and found.complete

        try:
            await until(recorded, 60, "the trajectory in the store")
        finally:
            await store.close()


@contextmanager
def between_writes(url: str) -> Iterator[None]:
    """Hold the lock for writes of a store: a process that is paused while it holds it stops all others."""
    path = url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def leader_of(redis: PlainRedis, fleet: Fleet, namespace: str, role: str) -> str:
    """Wait for the replica that leads a role."""
    found: list[str] = []

    async def leads() -> bool:
        owner = (await redis.hget(f"{namespace}:{{0}}:leader:{role}", "owner") or b"").decode()
        found[:] = [name for name, member in fleet.members.items() if f".{member.pid}." in owner]
        return bool(found)

    await until(leads, 60, f"a leader of {role}")
    return found[0]


# -- a broker that goes away -----------------------------------------------------------------------------------


async def survive(url: str, server: Server, namespace: str, folder: Path, away: Callable[[], Awaitable[None]]) -> None:
    """All tasks end correctly, those running and those submitted while the broker is unavailable."""
    effects = folder / "effects"
    tasks = [f"t{number}" for number in range(60)]
    async with (
        Fleet(url, namespace, folder, replicas={**dict.fromkeys(SERVICES, 1), "agent-handler": 2}) as fleet,
        connected(url, namespace) as client,
    ):

        async def one(task: str, after_seconds: float) -> TaskResponse:
            await asyncio.sleep(after_seconds)
            handle = await client.submit("journey", str(effects), task_id=task, timeout=120)
            return await handle.result(timeout=120)

        running = [asyncio.create_task(one(task, number * 0.02)) for number, task in enumerate(tasks)]
        await asyncio.wait(running[:3])
        await away()
        responses = await asyncio.gather(*running)
        check_ends(responses, ["part0", "part1", "part2", "sub"])
        check_effects(effects, tasks, 4)
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace)
        await check_trajectories(fleet.trajectory_url, namespace, responses, 6)
        assert {member.starts for member in fleet.members.values()} == {1}, "services go on by themselves"


async def test_a_killed_broker_restarts_and_nothing_is_lost(
    own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    server = own_server(append="always")

    async def away() -> None:
        server.kill()
        await asyncio.sleep(1.0)
        server.start()

    await survive(server.url, server, namespace, tmp_path, away)


@pytest.mark.slow
@pytest.mark.parametrize("how", first_of("silent", "refused"))
async def test_an_outage_of_ten_seconds_is_survived(
    how: str, own_valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with Proxy(own_valkey.url) as proxy:

        async def away() -> None:
            if how == "refused":
                await proxy.down()
                await asyncio.sleep(10)
                await proxy.up()
            else:
                proxy.freeze()
                await asyncio.sleep(10)
                proxy.heal()

        await survive(proxy.url, own_valkey, namespace, tmp_path, away)


# -- settings that cannot work ---------------------------------------------------------------------------------


def refused(
    logs_in: Path, services: Sequence[str] = SERVICES, data: Path | None = None, **environ: str
) -> dict[str, str]:
    """Start all services at once, and return the line with which each refuses to start."""
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WEFT_")},
        "WEFT_APP": "tests.apps.fleet_app:app",
        "WEFT_DATA_DIR": str(data or logs_in),
        "PYTHONPATH": SOURCES,
        **environ,
    }
    logs = {service: logs_in / f"{service}.log" for service in services}
    started = {service: start((f"services.{service.replace('-', '_')}",), own, log) for service, log in logs.items()}
    said: dict[str, str] = {}
    try:
        for service, process in started.items():
            status = process.wait(120)
            output = logs[service].read_text()
            lines = [line for line in output.splitlines() if line.startswith(f"weft {service}: ")]
            assert status == 1, output
            assert len(lines) == 1, output
            assert "Traceback" not in output
            said[service] = lines[0]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return said


async def test_an_evicting_server_is_refused(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(options=("--maxmemory-policy", "allkeys-lru"))
    for line in refused(tmp_path, WEFT_REDIS_URL=server.url).values():
        assert "allkeys-lru" in line
        assert "noeviction" in line


async def test_another_number_of_partitions_is_refused(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with Client.connect(valkey.url, namespace=namespace, partitions=2):
        pass
    said = refused(tmp_path, WEFT_REDIS_URL=valkey.url, WEFT_NAMESPACE=namespace, WEFT_PARTITIONS="3")
    for line in said.values():
        assert re.search(r"WEFT_PARTITIONS=3: .* created with 2.*set WEFT_PARTITIONS=2", line)


def test_a_server_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        said = refused(tmp_path, WEFT_REDIS_URL=url)
    for line in said.values():
        assert "WEFT_REDIS_URL" in line
        assert url.removeprefix("redis://") in line


def test_a_port_that_is_in_use_is_named(valkey: Server, namespace: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(tmp_path, WEFT_REDIS_URL=valkey.url, WEFT_NAMESPACE=namespace, WEFT_METRICS_PORT=port)
    for line in said.values():
        assert f"WEFT_METRICS_PORT={port}" in line
        assert "in use" in line


def test_a_data_folder_that_cannot_be_written_is_named(valkey: Server, namespace: str, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        # This user may write anything but what the kernel itself refuses.
        folder = Path("/proc/weft")
    said = refused(tmp_path, ("trajectory-recorder",), folder, WEFT_REDIS_URL=valkey.url, WEFT_NAMESPACE=namespace)
    assert f"WEFT_DATA_DIR='{folder}'" in said["trajectory-recorder"]
    assert "another folder" in said["trajectory-recorder"] or "name a folder" in said["trajectory-recorder"]


def test_without_a_broker_each_service_says_how_to_name_one(tmp_path: Path) -> None:
    for line in refused(tmp_path).values():
        assert "WEFT_REDIS_URL is not set" in line
