"""Everything works under the users that the cluster's Secret makes, and programs outside publish with theirs."""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from runtime_core.client import Client
from runtime_core.command.checks import CHECKS
from tests.conftest import OwnServer
from tests.fleet import ROOT, Fleet, PlainRedis, until
from tests.servers.process import HOST, Server

pytestmark = pytest.mark.timeout(300)

USERS = ("services", "publisher", "scaler", "admin")
ELSEWHERE = "sqlite:////no/such/folder/trajectory.db"
SECRET = ROOT / "deploy" / "k8s" / "base" / "secrets" / "make_secrets.py"


@pytest.fixture
def broker(own_server: OwnServer, tmp_path: Path) -> Server:
    """A server that reads the Secret's `users.acl`, of the kind that the cluster runs; passwords are users' names."""
    file = tmp_path / "users.acl"
    file.write_text(runpy.run_path(str(SECRET))["users_file"]({user: user for user in USERS}))
    return own_server("redis-8.0", options=("--aclfile", str(file)))


def as_user(broker: Server, user: str) -> str:
    return f"redis://{user}:{user}@{HOST}:{broker.port}"


async def doctor(fleet: Fleet, **environ: str) -> dict[str, Any]:  # Any: JSON
    done = await asyncio.to_thread(weft, fleet, "doctor", "--clean", "--json", **environ)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def weft(fleet: Fleet, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime_core.command.main", *arguments],
        cwd=ROOT, env={**fleet.environ, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


async def test_services_commands_and_publishers_have_the_rights_they_need(broker: Server, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    async with Fleet(as_user(broker, "services"), "weft", folder) as fleet:
        await _commands(fleet)
        await _publishers(broker, fleet)
    # The services are gone: nobody is there who could have the trajectories elsewhere.
    found = await doctor(fleet, WEFT_TRAJECTORY_URL=ELSEWHERE)
    [about] = [check for check in found["checks"] if check["check"] == "trajectories"]
    assert (about["ok"], about["remedy"].split(",")[0]) == (False, "start a trajectory-recorder")


async def _commands(fleet: Fleet) -> None:
    first = await asyncio.to_thread(weft, fleet, "submit", "echo", '"hello"', "--task-id", "by-command")
    assert (first.returncode, first.stdout) == (0, "hello\n"), first.stderr
    others = (("task", "show", "by-command"), ("task", "list"), ("lag",), ("dead", "list"), ("schedule", "list"))
    for done in await asyncio.gather(*(asyncio.to_thread(weft, fleet, *arguments) for arguments in others)):
        assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
    # As where the recorder runs, and as in any other pod.
    for environ in ({}, {"WEFT_TRAJECTORY_URL": ELSEWHERE}):
        found = await doctor(fleet, **environ)
        assert found["ok"], [check for check in found["checks"] if not check["ok"]]
        assert len(found["checks"]) >= len(CHECKS)
        assert any("recorder elsewhere" in check["message"] for check in found["checks"]) == bool(environ)


async def _publishers(broker: Server, fleet: Fleet) -> None:
    """XADD is all that they may; what is malformed is kept for an operator, and stops nobody."""
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
        Client.connect(as_user(broker, "services"), namespace="weft") as client,
        Redis.from_url(as_user(broker, "scaler"), protocol=2) as scaler,
    ):

        async def all_admitted() -> bool:
            # As an autoscaler asks.
            return bool(await scaler.xlen("weft:tasks") == 0)

        await until(all_admitted, 60, "all commands were taken")
        for task in ("binary", "structured"):
            end = await (await client.task(task)).result(timeout=60)
            assert (end.status, end.output) == ("completed", task)
    told = await asyncio.to_thread(weft, fleet, "dead", "list", "--json")
    reasons = [letter["reason"] for letter in json.loads(told.stdout)]
    assert reasons == ["rejected"] * len(bad), told.stdout
