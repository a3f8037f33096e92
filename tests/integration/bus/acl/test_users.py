"""Everything works under the users of `weft acl`, and outside programs publish with their own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, find_users, lacking, rules, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.client.client import Client
from runtime_core.client.doctor import CHECKS
from runtime_core.errors import ServerError
from tests.conftest import OwnServer
from tests.fleet import SERVICES, Fleet, PlainRedis, until
from tests.servers.matrix import MATRIX, only_in_matrix, repeat_on
from tests.servers.process import HOST, Server

pytestmark = pytest.mark.timeout(300)

SHOP = "shop"
SERVICES_OF_BEFORE = (
    "on >services ~weft:* ~*:answers* resetchannels -@all +@connection +@read +@write +@scripting -@dangerous +info"
    " +time +wait +waitaof"
)
"""The rules that all services shared once."""
ELSEWHERE = "sqlite:////no/such/folder/trajectory.db"


@pytest.fixture(params=repeat_on(*MATRIX))
def broker(request: pytest.FixtureRequest, own_server: OwnServer, tmp_path: Path) -> Server:
    """A server that reads the file of users that `weft acl` prints; passwords are users' names."""
    kind: str = request.param
    target = Target(lacks=lacking(kind.replace("-8.0", "-8").replace("-8.1", "-8")))
    users = find_users(USERS, [SHOP])
    lines = [user_line(user, target, [hashlib.sha256(user.name.encode()).hexdigest()]) for user in users]
    file = tmp_path / "users.acl"
    file.write_text("\n".join([*lines, DEFAULT_OFF, ""]))
    return own_server(kind, options=("--aclfile", str(file)))


def as_user(broker: Server, user: str) -> str:
    return f"redis://{user}:{user}@{HOST}:{broker.port}"


def as_services(broker: Server) -> dict[str, str]:
    return {service: as_user(broker, service) for service in SERVICES}


async def refused(broker: Server) -> set[tuple[str, str]]:
    """Return what the server has refused to whom, except for a setting that the operator need not read."""
    admin: PlainRedis
    async with Redis.from_url(as_user(broker, "admin"), protocol=2) as admin:
        found = {(each["username"], each["object"]) for each in await admin.acl_log()}
    # A handler that starts before the state-manager tries to load functions, and then waits for it.
    return {each for each in found if each != ("operator", "config|get") and each[1] != "function|load"}


async def doctor(fleet: Fleet, **environ: str) -> dict[str, Any]:  # Any: JSON
    done = await fleet.weft("doctor", "--clean", "--json", **environ)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@only_in_matrix("on one server; test_every_feature.py does it on a Cluster")
async def test_every_service_can_do_all_its_work_as_its_own_user(broker: Server, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    async with Fleet(as_user(broker, "operator"), "weft", folder, urls=as_services(broker)) as fleet:
        await _commands(fleet)
        await _publishers(broker, fleet)
        assert await refused(broker) == set()
        with pytest.raises(ServerError, match="NOPERM"):
            async with Client.connect(as_user(broker, SHOP), namespace="weft") as client:
                await client.submit("echo", "x")
    # The services are gone: nobody is there who could have the trajectories elsewhere.
    found = await doctor(fleet, WEFT_TRAJECTORY_URL=ELSEWHERE)
    [about] = [check for check in found["checks"] if check["check"] == "trajectories"]
    assert (about["ok"], about["remedy"].split(",")[0]) == (False, "start a trajectory-recorder")


@only_in_matrix("from the users of an earlier release")
async def test_a_fleet_migrates_from_a_single_broker_user(own_server: OwnServer, tmp_path: Path) -> None:
    """Old processes keep the user `services` while new ones use their own: no task is lost between them."""
    server = own_server("redis-8.0")
    admin: PlainRedis
    async with Redis.from_url(server.url, protocol=2) as admin:
        await admin.execute_command("ACL", "SETUSER", "services", *SERVICES_OF_BEFORE.split())
        for user in find_users(USERS, []):
            digest = hashlib.sha256(user.name.encode()).hexdigest()
            await admin.execute_command("ACL", "SETUSER", user.name, *rules(user, Target(), [digest]))
    async with (
        Fleet(as_user(server, "services"), "weft", tmp_path / "fleet") as fleet,
        Client.connect(as_user(server, "client"), namespace="weft") as client,
    ):
        tasks = [await client.submit("echo", number) for number in range(10)]
        fleet.use_urls(as_services(server))
        for name in fleet.names():
            tasks.append(await client.submit("echo", name))
            await fleet.replace(name)
        async with Redis.from_url(server.url, protocol=2) as admin:
            await admin.execute_command("ACL", "DELUSER", "services")
        tasks += [await client.submit("echo", number) for number in range(10)]
        assert {(await task.result(timeout=60)).status for task in tasks} == {"completed"}
        assert await refused(server) == set()


async def _commands(fleet: Fleet) -> None:
    first = await fleet.weft("submit", "echo", '"hello"', "--task-id", "by-command")
    assert (first.returncode, first.stdout) == (0, "hello\n"), first.stderr
    others = (("task", "show", "by-command"), ("task", "list"), ("lag",), ("dead", "list"), ("schedule", "list"))
    for done in await asyncio.gather(*(fleet.weft(*arguments) for arguments in others)):
        assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
    # As where the recorder runs, and as in any other pod.
    for environ in ({}, {"WEFT_TRAJECTORY_URL": ELSEWHERE}):
        found = await doctor(fleet, **environ)
        assert found["ok"], [check for check in found["checks"] if not check["ok"]]
        assert len(found["checks"]) >= len(CHECKS)
        assert any("recorder elsewhere" in check["message"] for check in found["checks"]) == bool(environ)


async def _publishers(broker: Server, fleet: Fleet) -> None:
    """They may only XADD. Malformed entries are kept for an operator, and block nobody."""
    binary = {"specversion": "1.0", "type": "weft.task.submit", "source": "/shop"}
    bad: list[dict[str, str | bytes]] = [
        {"data": "{"},
        {"nonsense": "x"},
        {"type": "weft.task.submit", "id": "no-agent", "data": "{}"},
        {"type": "weft.no.such.command", "id": "no-command", "data": "{}"},
        {"type": "weft.task.submit", "id": "no-json", "data": b"\xff\xfe"},
        {"type": "weft.task.submit", "id": "no-name", "data": json.dumps({"agent": "nobody", "input": 1})},
    ]

    def submit(task: str) -> dict[str, object]:
        return {"agent": "echo", "input": task, "task_id": task}

    publisher: PlainRedis
    async with Redis.from_url(as_user(broker, "publisher"), protocol=2) as publisher:
        await publisher.xadd("weft:tasks", {**binary, "id": "1", "data": json.dumps(submit("binary"))})
        for fields in bad:
            await publisher.xadd("weft:tasks", fields)
        event = {**binary, "id": "2", "datacontenttype": "application/json", "data": submit("structured")}
        await publisher.xadd("weft:tasks", {"data": json.dumps(event)})
    scaler: PlainRedis
    async with (
        Client.connect(as_user(broker, "client"), namespace="weft") as client,
        Redis.from_url(as_user(broker, "scaler"), protocol=2) as scaler,
    ):

        async def all_admitted() -> bool:
            # As an autoscaler asks.
            return bool(await scaler.xlen("weft:tasks") == 0)

        await until(all_admitted, 60, "all commands were taken")
        for task in ("binary", "structured"):
            end = await (await client.task(task)).result(timeout=60)
            assert (end.status, end.output) == ("completed", task)
    told = await fleet.weft("dead", "list", "--json")
    reasons = [letter["reason"] for letter in json.loads(told.stdout)]
    assert reasons == ["rejected"] * len(bad), told.stdout
