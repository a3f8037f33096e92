"""Every feature works while each service and program has its own least-rights user, on one server and on a Cluster."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, find_users, lacking, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.client.client import Client
from runtime_core.wire.ids import partition_of
from tests.chaos.test_every_call import OUTPUT, answered
from tests.conftest import OwnServer
from tests.engine_backends.files import FOLDER, Files
from tests.engine_backends.folder import INLINE
from tests.fleet import SERVICES, Fleet, PlainRedis, until
from tests.integration.integrations.actors.agents import Answer, Ask, Echo
from tests.mcp_servers.ledger import Ledger
from tests.openai_server.driver import OpenAIServer, answer
from tests.servers.cluster import CLUSTER_OPTIONS, join
from tests.servers.matrix import first_of
from tests.servers.process import HOST, Server
from weft.runtime import AgentId, Runtime

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT = 120.0
GATEWAY = "ray-gateway"


@dataclass
class Brokers:
    """One server, or the servers of a Cluster; passwords are users' names."""

    servers: list[Server]
    partitions: int

    def url(self, user: str) -> str:
        return f"redis://{user}:{user}@{HOST}:{self.servers[-1].port}"

    async def refusals(self) -> set[tuple[str, str]]:
        """Return what the servers have refused to whom: the user and the command or key.

        Left out are a setting that the operator need not see, and functions that a handler tried to load because it
        started before the state-manager had.
        """
        found: set[tuple[str, str]] = set()
        for server in self.servers:
            admin: PlainRedis
            async with Redis.from_url(f"redis://admin:admin@{HOST}:{server.port}", protocol=2) as admin:
                found |= {(each["username"], each["object"]) for each in await admin.acl_log(1000)}
        return {each for each in found if each != ("operator", "config|get") and each[1] != "function|load"}


# The Cluster has every kind of key that one server has, and more partitions.
@pytest.fixture(params=first_of("a Cluster", "one server"))
async def brokers(request: pytest.FixtureRequest, own_server: OwnServer, tmp_path: Path) -> Brokers:
    number, partitions = (1, 1) if request.param == "one server" else (2, 2)
    target = Target(partitions=partitions, lacks=lacking("valkey-9"))
    users = find_users(USERS, ["shop"])
    lines = [user_line(user, target, [hashlib.sha256(user.name.encode()).hexdigest()]) for user in users]
    file = tmp_path / "users.acl"
    file.write_text("\n".join([*lines, DEFAULT_OFF, ""]))
    options = (*(CLUSTER_OPTIONS if number > 1 else ()), "--aclfile", str(file), "--acllog-max-len", "1000")
    servers = [own_server("valkey-9", append=None, options=options) for _ in range(number)]
    if number > 1:
        await join(servers, lambda server: f"redis://admin:admin@{HOST}:{server.port}")
    return Brokers(servers, partitions)


@dataclass
class World:
    brokers: Brokers
    fleet: Fleet
    client: Client
    folder: Path

    async def weft(self, *arguments: str) -> str:
        """Run a command of `weft` as the operator. Return what it prints."""
        done = await self.fleet.weft(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    async def done(self, agent: str, input: object, **settings: Any) -> Any:  # Any: JSON
        response = await (await self.client.submit(agent, input, **settings)).result(timeout=WAIT)
        assert response.status == "completed", response
        return response.output

    def names(self, start: str) -> list[str]:
        """Return an id in each partition."""
        found = {partition_of(f"{start}-{n}", self.brokers.partitions): f"{start}-{n}" for n in range(20)}
        assert len(found) == self.brokers.partitions
        return list(found.values())


async def test_every_feature_works_and_no_service_is_refused_anything(
    brokers: Brokers, openai_server: OpenAIServer, tmp_path: Path
) -> None:
    openai_server.play(answer("Rain."))
    engine = Files(tmp_path / "engine")
    engine.folder.mkdir()
    engine.up()
    fleet = Fleet(
        brokers.url("operator"),
        "weft",
        tmp_path / "fleet",
        replicas={**dict.fromkeys(SERVICES, 1), "state-manager": 2, GATEWAY: 1},
        app="tests.apps.every_feature_app:app",
        urls={service: brokers.url(service) for service in (*SERVICES, GATEWAY)},
        commands={GATEWAY: ("tests.engine_backends.gateway", "ray")},
        environ={
            **openai_server.environ,
            **Ledger(tmp_path / "ledger").env,
            "WEFT_PARTITIONS": str(brokers.partitions),
            "WEFT_METRICS_PORT": "0",
            FOLDER: str(engine.folder),
            INLINE: "1",
        },
    )
    connected = Client.connect(brokers.url("client"), namespace="weft", partitions=brokers.partitions)
    async with fleet, connected as client:
        world = World(brokers, fleet, client, tmp_path)
        await publishers(world)
        await agents(world)
        await engines_servers_and_models(world)
        await schedules_and_topics(world)
        await forks_and_ends(world)
        await dead_letters(world)
        await runtimes(world)
        await a_leader_that_dies(world)
        await operators(world)
        refused = await brokers.refusals()
        logs = {name: member.text() for name, member in fleet.members.items()}
    assert refused == set()
    lines = [line for log in logs.values() for line in log.splitlines() if "NOPERM" in line]
    # A handler that starts before the state-manager waits for the functions.
    assert [line for line in lines if "function" not in line] == []


async def publishers(world: World) -> None:
    await world.weft("publisher", "set", "shop", "--tenant", "acme", "--topics", "news.*")
    await world.weft("tenant", "set", "acme", "--weight", "2", "--max-open", "100", "--rate", "1000")
    shop: PlainRedis
    async with Redis(host=HOST, port=world.brokers.servers[0].port, username="shop", password="shop") as shop:
        commands: dict[str, dict[str, Any]] = {
            "task.submit": {"agent": "echo", "input": "by a publisher", "task_id": "published"},
            "task.cancel": {"task_id": "published-later"},
            "task.signal": {"task_id": "published", "request_id": "none", "value": 1},
            "topic.publish": {"topic": "news.today", "data": "news"},
            "schedule.set": {"schedule_id": "daily", "agent": "echo", "input": 1, "cron": "0 9 * * *"},
            "schedule.delete": {"schedule_id": "daily"},
        }
        await ask(shop, commands)

        async def settled() -> bool:
            # The stream may be on any server.
            return len((await world.client.task("acme.published")).task_id) > 0

        await until(settled, WAIT, "the commands are settled")


async def ask(shop: PlainRedis, commands: dict[str, dict[str, Any]]) -> None:
    """Send commands as a program without Weft, to the server that has the stream."""
    for kind, data in commands.items():
        fields = {"type": f"weft.{kind}", "id": kind, "data": json.dumps(data), "replyto": "shop:answers:1"}
        try:
            await shop.xadd("weft:tasks:shop", fields)
        except Exception as error:  # the other server has it
            port = int(str(error).rpartition(":")[2])
            other: PlainRedis
            async with Redis(host=HOST, port=port, username="shop", password="shop") as other:
                await other.xadd("weft:tasks:shop", fields)


async def agents(world: World) -> None:
    """Tools, keyed agents, calls, emits, streams, questions and their answers, sleeps, local steps, hooks, sessions."""
    for name in world.names("every"):
        response, deltas = await answered(world.client, str(world.folder / "effects"), name)
        assert response.output == OUTPUT
        assert len(deltas) == 2
    await until(world.client.topics.idle, WAIT, "what was sent and published is handled")


async def engines_servers_and_models(world: World) -> None:
    assert await world.done("engineer", 14) == 42
    assert await world.done("use", {"tool": "desk.say", "arguments": {"text": "hello"}}) == "hello"
    assert await world.done("asker", "Say something", stream=True) == "Rain."


async def schedules_and_topics(world: World) -> None:
    client = world.client
    for name in world.names("soon"):
        await client.schedule(name, "echo", name, delay=0.1)
        await client.schedule(f"{name}-often", "echo", name, every=1, overlap="start")
        assert (await (await client.run_schedule(f"{name}-often")).result(timeout=WAIT)).output == name
    assert {each.schedule_id for each in await client.schedules()} >= {f"{name}-often" for name in world.names("soon")}
    for name in world.names("soon"):
        assert await client.unschedule(f"{name}-often")
    for name in world.names("reporter"):
        assert await client.publish("news.today", "it rains", source=name) == 1
    await until(client.topics.idle, WAIT, "the messages are handled")


async def forks_and_ends(world: World) -> None:
    client = world.client
    for name in world.names("origin"):
        origin = await client.submit("echo", name, task_id=name)
        await origin.result(timeout=WAIT)
        fork = await client.fork(name, input="another", task_id=f"{name}-fork")
        assert (await fork.result(timeout=WAIT)).output == "another"
        cancelled = await client.submit("endless", "x", task_id=f"{name}-endless")
        await cancelled.cancel("enough")
        assert (await cancelled.result(timeout=WAIT)).status == "cancelled"
        assert (await fork.show())["status"] == "completed"
        await fork.delete()


async def dead_letters(world: World) -> None:
    for name in world.names("broken"):
        broken = await world.client.submit("breaks", "x", task_id=name)
        assert (await broken.result(timeout=WAIT)).status == "failed"
    letters = json.loads(await world.weft("dead", "list", "--json"))
    assert len(letters) >= world.brokers.partitions
    await world.weft("dead", "show", letters[0]["letter_id"])
    refused = [each["letter_id"] for each in letters if each["reason"] == "rejected"]
    failed = [each["letter_id"] for each in letters if each["reason"] != "rejected"]
    await world.weft("dead", "drop", *refused)
    await world.weft("dead", "redrive", "--reopen", *failed)


async def runtimes(world: World) -> None:
    """A program that also hosts agents, once beside the services and once without them."""
    url = world.brokers.url("runtime")
    async with Runtime(url, "weft") as runtime:
        await Echo.register(runtime, "features-echo", Echo)
        answer = await runtime.send_message(Ask("hello"), AgentId("features-echo", "one"))
        assert isinstance(answer, Answer)
        state = await runtime.agent_save_state(AgentId("features-echo", "one"))
        await runtime.agent_load_state(AgentId("features-echo", "one"), state)


async def a_leader_that_dies(world: World) -> None:
    """One state-manager after the other dies, so that each leads once; the others adopt what the dead have left."""
    for name in ("state-manager-1", "state-manager-2", "agent-handler-1", "tool-handler-1", "trajectory-recorder-1"):
        world.fleet.kill(name)
        await world.fleet.ready([name])
        assert await world.done("engineer", 1) == 3
        for task in world.names(f"after-{name}"):
            await world.client.schedule(task, "echo", task, delay=0.05)
            assert await world.done("echo", task, task_id=task) == task


async def operators(world: World) -> None:
    [first, *_] = world.names("every")
    for arguments in (
        ("task", "list"), ("task", "show", first), ("lag",), ("dead", "list"), ("schedule", "list"),
        ("publisher", "list"), ("tenant", "list"), ("trajectory", "show", first), ("submit", "echo", '"x"'),
        ("publisher", "delete", "shop"),
    ):  # fmt: skip
        await world.weft(*arguments)
    doctor = json.loads(await world.weft("doctor", "--clean", "--json"))
    assert doctor["ok"], [check for check in doctor["checks"] if not check["ok"]]
