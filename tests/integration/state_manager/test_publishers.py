"""Two tenants with the broker users of docs/publishers.md: neither reaches the other's data."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from tests.conftest import OwnServer
from tests.fleet import ROOT, Fleet, PlainRedis, until
from tests.servers.matrix import is_full, repeat_on
from tests.servers.process import HOST, Server

pytestmark = pytest.mark.timeout(300)

LAST_ID = "18446744073709551615-18446744073709551615"
TURN_SECONDS = 10.0
"""Far less than 40,000 commands take, and far more than a turn takes on a busy machine."""


COMMANDS = 100_000 if is_full() else 40_000


@pytest.fixture(params=repeat_on("valkey-9", "redis-8.0"))
def broker(request: pytest.FixtureRequest, own_server: OwnServer) -> Server:
    return own_server(request.param)


@asynccontextmanager
async def as_user(broker: Server, user: str) -> AsyncIterator[PlainRedis]:
    client: PlainRedis
    async with Redis.from_url(f"redis://{user}:{user}@{HOST}:{broker.port}", protocol=2) as client:
        yield client


@asynccontextmanager
async def tenants(broker: Server, folder: Path) -> AsyncIterator[tuple[Fleet, PlainRedis, PlainRedis]]:
    """Start the services, and the publishers `shop` of acme and `desk` of globex with the documented rights."""
    rule = documented_rule()
    admin: PlainRedis
    async with Fleet(broker.url, "weft", folder, app="tests.apps.publishers_app:app") as fleet:
        async with Redis.from_url(broker.url, protocol=2) as admin:
            for name, tenant in (("shop", "acme"), ("desk", "globex")):
                await admin.execute_command(*rule.replace("PASSWORD", name).replace("shop", name).split())
                assert (await fleet.weft("publisher", "set", name, "--tenant", tenant)).returncode == 0
        async with as_user(broker, "shop") as shop, as_user(broker, "desk") as desk:
            yield fleet, shop, desk


def documented_rule() -> str:
    page = (ROOT / "docs" / "publishers.md").read_text(encoding="utf-8")
    found = re.search(r"ACL SETUSER shop.*?(?=\n *```)", page, re.DOTALL)
    assert found is not None
    return found.group().replace("\\\n", " ")


async def send(publisher: PlainRedis, name: str, kind: str, data: object, **attributes: str) -> None:
    await publisher.xadd(f"weft:tasks:{name}", {"type": f"weft.{kind}", "data": json.dumps(data), **attributes})


async def told(publisher: PlainRedis, stream: str, kind: str) -> dict[str, Any]:  # Any: JSON
    """Return the data of the first answer of this type."""
    deadline, last = time.monotonic() + 60, b"0"
    while time.monotonic() < deadline:
        for _, entries in await publisher.xread({stream: last}, block=500) or []:
            for entry, fields in entries:
                last = entry
                if fields[b"type"].decode().endswith(kind):
                    found: dict[str, Any] = json.loads(fields[b"data"])
                    return found
    raise AssertionError(f"no answer {kind} on {stream}")


async def emptied(fleet: Fleet, *names: str) -> None:
    admin: PlainRedis
    async with Redis.from_url(fleet.url, protocol=2) as admin:

        async def empty() -> bool:
            return not any([await admin.xlen(f"weft:tasks:{name}") for name in names])

        await until(empty, 60, "the publishers' commands were settled")


async def test_no_tenant_reaches_anything_of_another(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (fleet, shop, desk):
        mine, theirs = "shop:answers:1", "desk:answers:1"
        wanted = {"agent": "approver", "input": "refund", "task_id": "t"}
        await send(shop, "shop", "task.submit", wanted, id="e", replyto=mine)
        asked = await told(shop, mine, "human.requested")
        assert asked["task_id"] == "acme.t"
        every = {"schedule_id": "s", "agent": "echo", "input": 1, "cron": "@yearly"}
        await send(shop, "shop", "schedule.set", every)
        await emptied(fleet, "shop")
        for task in ("t", "acme.t"):
            await send(desk, "desk", "task.cancel", {"task_id": task})
            answer = {"task_id": task, "request_id": asked["request_id"], "value": True}
            await send(desk, "desk", "task.signal", answer)
            # Taken first, its end would go to desk, and a forged one to shop.
            await send(desk, "desk", "task.submit", {**wanted, "task_id": task}, id="e", source="shop", replyto=mine)
        await send(desk, "desk", "schedule.set", {**every, "schedule_id": "acme.s", "cron": "@hourly"})
        await send(desk, "desk", "schedule.delete", {"schedule_id": "acme.s"})
        await send(desk, "desk", "task.submit", {"agent": "executor", "input": "refund"}, replyto=theirs)
        await send(desk, "desk", "task.submit", {"agent": "echo", "input": 1}, tenant="acme", replyto=theirs)
        refused = await told(desk, theirs, "rejected")
        assert refused["message"] == "no agent is named executor"
        await emptied(fleet, "desk")
        [schedule] = [one for one in json.loads((await fleet.weft("schedule", "list", "--json")).stdout)
                      if one["schedule_id"] == "acme.s"]  # fmt: skip
        assert schedule["cron"] == "@yearly"
        # Nothing of all that has touched the task: it still asks, and its own publisher answers.
        await send(shop, "shop", "task.signal", {"task_id": "t", "request_id": asked["request_id"], "value": True})
        end = await told(shop, mine, "task.completed")
        assert (end["task_id"], end["output"]) == ("acme.t", ["acme", "refund"])
        found = json.loads((await fleet.weft("doctor", "--json")).stdout)
        [ingress] = [check for check in found["checks"] if check["check"] == "ingress"]
        assert (ingress["ok"], "desk (globex), shop (acme)" in ingress["message"]) == (True, True)


DENIED = (
    ("XADD", "weft:tasks", "*", "type", "weft.task.cancel", "data", "{}"),
    ("XADD", "weft:tasks:desk", "*", "type", "weft.task.cancel", "data", "{}"),
    ("XADD", "desk:answers:1", "*", "type", "weft.task.completed", "data", "{}"),
    ("XADD", "weft:{0}:agent", "*", "h", "x"),
    ("XRANGE", "weft:tasks:desk", "-", "+"),
    ("XRANGE", "desk:answers:1", "-", "+"),
    ("XRANGE", "weft:{0}:dead", "-", "+"),
    ("HGETALL", "weft:{0}:publishers"),
    ("HSET", "weft:{0}:publishers", "shop", "{}"),
    ("DEL", "weft:tasks:desk"),
    ("CLIENT", "PAUSE", "10", "ALL"),
    ("CLIENT", "KILL", "USER", "default"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("EVAL", "return 1", "0"),
    ("FCALL", "anything", "0"),
    ("ACL", "LIST"),
    ("KEYS", "*"),
)


async def test_the_documented_user_is_denied_other_commands(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (_, shop, _):
        for command in DENIED:
            with pytest.raises(NoPermissionError):
                await shop.execute_command(*command)


async def test_damage_to_one_publishers_stream_stops_no_other_publisher(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (fleet, shop, desk):
        for _ in range(5):
            await desk.xadd("weft:tasks:desk", {"nonsense": "x"}, maxlen=1, approximate=False)
        await desk.delete("weft:tasks:desk")
        await desk.xadd("weft:tasks:desk", {"data": "x" * 20_000_000})
        await desk.xadd("weft:tasks:desk", {"nonsense": "x"}, id=LAST_ID)
        await send(shop, "shop", "task.submit", {"agent": "echo", "input": "hello"}, replyto="shop:answers:1")
        assert (await told(shop, "shop:answers:1", "completed"))["output"] == "hello"
        await emptied(fleet, "desk")

        await until(lambda: takes_entries(desk), 60, "the stream took entries again")
        await emptied(fleet, "desk")
        letters = json.loads((await fleet.weft("dead", "list", "--json")).stdout)
        assert {letter["stream"] for letter in letters} == {"tasks:desk"}
        assert json.loads((await fleet.weft("doctor", "--json")).stdout)["ok"]


async def takes_entries(publisher: PlainRedis) -> bool:
    try:
        await publisher.xadd("weft:tasks:desk", {"nonsense": "x"})
    except Exception as error:
        assert "exhausted" in str(error) or "equal or smaller" in str(error), error  # noqa: PT017  # the server's words
        return False
    return True


async def test_tens_of_thousands_of_commands_delay_no_other_publisher(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (fleet, shop, desk):
        fleet.pause("state-manager-1")
        for _ in range(COMMANDS // 1000):
            async with desk.pipeline(transaction=False) as pipe:
                for _ in range(1000):
                    pipe.xadd("weft:tasks:desk", {"type": "weft.task.cancel", "data": '{"task_id":"none"}'})
                await pipe.execute()
        fleet.resume("state-manager-1")
        await until(lambda: shrinks(fleet), 60, "the long stream was read")
        began = time.monotonic()
        await send(shop, "shop", "task.submit", {"agent": "echo", "input": 1}, replyto="shop:answers:1")
        await told(shop, "shop:answers:1", "accepted")
        assert time.monotonic() - began < TURN_SECONDS
        assert await left_on(fleet) > 0, "the long stream was settled before"


async def shrinks(fleet: Fleet) -> bool:
    return await left_on(fleet) < COMMANDS


async def left_on(fleet: Fleet) -> int:
    admin: PlainRedis
    async with Redis.from_url(fleet.url, protocol=2) as admin:
        return int(await admin.xlen("weft:tasks:desk"))


async def test_the_doctor_finds_and_repairs_a_stream_that_was_ended(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (fleet, _, _):
        pass
    admin: PlainRedis
    async with Redis.from_url(broker.url, protocol=2) as admin:
        for key in ("weft:tasks:desk", "weft:tasks"):
            await admin.delete(key)
            await admin.xdel(key, await admin.xadd(key, {"nonsense": "x"}, id=LAST_ID))
        await admin.set("weft:tasks:shop", "a string")
        found = await about_ingress(fleet)
        assert [one["ok"] for one in found] == [False, False, False]
        assert "in the future" in found[0]["message"]
        repaired = await about_ingress(fleet, "--repair")
        assert [one["ok"] for one in repaired] == [True, True, False]
        assert not await admin.exists("weft:tasks", "weft:tasks:desk")
        assert "DEL weft:tasks:shop" in repaired[2]["remedy"]


async def about_ingress(fleet: Fleet, *options: str) -> list[dict[str, Any]]:  # Any: JSON
    found = json.loads((await fleet.weft("doctor", "--json", *options)).stdout)
    return [check for check in found["checks"] if check["check"] == "ingress"]


async def test_the_command_registers_lists_and_removes(broker: Server, tmp_path: Path) -> None:
    async with tenants(broker, tmp_path / "fleet") as (fleet, _, _):
        done = await fleet.weft(
            "publisher", "set", "web", "--tenant", "acme", "--agents", "echo,approver", "--topics", "a.*"
        )
        assert done.stdout == "web of tenant acme writes to weft:tasks:web and reads web:answers…\n"
        listed = json.loads((await fleet.weft("publisher", "list", "--json")).stdout)
        assert listed[2] == {
            "publisher": "web", "tenant": "acme", "agents": ["echo", "approver"], "topics": ["a.*"],
            "stream": "weft:tasks:web", "answers": "web:answers", "waiting": 0,
        }  # fmt: skip
        assert "web        acme    echo,approver  a.*     0" in (await fleet.weft("publisher", "list")).stdout
        wrong = await fleet.weft("publisher", "set", "A b", "--tenant", "acme")
        assert wrong.stderr.startswith('weft publisher set: publisher: "A b" is not a valid name: use 1 to 63 of a-z')
        assert (await fleet.weft("publisher", "delete", "web")).returncode == 0
        gone = await fleet.weft("publisher", "delete", "web")
        assert (gone.returncode, "there is no publisher 'web'" in gone.stderr) == (1, True)
        lag = json.loads((await fleet.weft("lag", "--json")).stdout)
        assert [row["stream"] for row in lag["streams"] if row["stream"].startswith("tasks")] == [
            "tasks", "tasks:desk", "tasks:shop",
        ]  # fmt: skip
