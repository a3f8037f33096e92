"""API keys: who may do what, and no tenant reaches another one's tasks through any route."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import httpx2
import pytest
from redis.asyncio import Redis

from runtime_core.gateway.access import Access
from runtime_core.gateway.keys import READ, ROLES
from runtime_core.gateway.requests import Limits
from runtime_core.gateway.server import operations
from runtime_core.gateway.tasks import StreamRoutes
from tests.fleet import Fleet, PlainRedis, until
from tests.integration.gateway.gateways import SECONDS, ended, gateway_fleet, http, problem
from tests.servers.process import Server
from weft import Client, SubmitOptions

pytestmark = pytest.mark.timeout(300)
OFFERED = operations(Access(cast(Client, None)), Limits(0, 1), cast(StreamRoutes, Mock()))
ROUTES = [(one.method, one.path, one.role) for one in OFFERED if one.role]


@asynccontextmanager
async def keyed_fleet(
    valkey: Server, namespace: str, folder: Path, *, recorder: bool = False, **options: str
) -> AsyncIterator[Fleet]:
    environ = {"WEFT_HTTP_AUTH": "keys", **options}
    async with gateway_fleet(valkey, namespace, folder, environ=environ, recorder=recorder) as fleet:
        yield fleet


async def weft(fleet: Fleet, *arguments: str) -> str:
    done = await fleet.weft(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def make_key(fleet: Fleet, *options: str) -> dict[str, str]:
    """Make a key, and return the header that sends it."""
    return {"Authorization": f"Bearer {await weft(fleet, 'key', 'create', 'test', *options)}"}


async def listed(client: httpx2.AsyncClient, key: dict[str, str], count: int) -> set[str]:
    """Wait until the list of a key has so many tasks, since it may be behind, and return their ids."""
    found: set[str] = set()

    async def complete() -> bool:
        found.update(row["task_id"] for row in (await client.get("/v1/tasks", headers=key)).json()["tasks"])
        return len(found) >= count

    await until(complete, SECONDS, "the listed tasks")
    return found


async def test_a_key_is_needed_and_may_do_what_its_roles_say(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        own = {role: await make_key(fleet, "--role", role) for role in ROLES}
        forged = own[READ]["Authorization"][:-1] + ("A" if own[READ]["Authorization"][-1] != "A" else "B")
        wrong = ("", "Bearer", "Bearer weft_000000000000_" + "a" * 43, "Basic dTpw", forged, "Bearer x" * 1000)
        assert (await client.get("/openapi.json")).status_code == 200
        for method, template, needed in ROUTES:
            path = re.sub(r"\{\w+\}", "t", template)
            for text in wrong:
                refused = await client.request(method, path, json={}, headers={"Authorization": text} if text else {})
                assert problem(refused) == (401, "unauthorized", "Authorization")
                assert refused.headers["www-authenticate"] == "Bearer"
                assert ("unknown or revoked" in refused.json()["detail"]) is (text[:7] == "Bearer ")
            for role in ROLES:
                answer = await client.request(method, path, json={}, headers=own[role])
                assert (answer.status_code == 403) is (role != needed), (method, path, role, answer.text)


async def test_a_revoked_key_is_refused(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        key = await make_key(fleet)
        assert (await client.get("/v1/tasks", headers=key)).status_code == 200
        (row,) = json.loads(await weft(fleet, "key", "list", "--json"))
        assert key["Authorization"].removeprefix("Bearer ") not in json.dumps(row)
        assert (row["name"], row["roles"], row["tenant"]) == ("test", list(ROLES), None)
        await weft(fleet, "key", "revoke", row["id"])

        async def refused() -> bool:
            return (await client.get("/v1/tasks", headers=key)).status_code == 401

        await until(refused, SECONDS, "the refusal of a revoked key")


class Victim:
    """What a tenant has, by the parameters of paths: its own names and the ones that the gateway shows."""

    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient, key: dict[str, str]) -> None:
        self._fleet = fleet
        self._client = client
        self.key = key
        self.names: dict[str, tuple[str, ...]] = {}
        self.question = ""
        self.letter = ""

    async def begin(self) -> None:
        """Start a task that asks, one that has failed for good, one that has spent something, and a schedule."""
        client, key = self._client, self.key
        body = {"agent": "asks", "input": SECRET, "task_id": "order"}
        assert (await client.post("/v1/tasks", json=body, headers=key)).json() == {"task_id": "acme.order"}
        wrong = {"tool": "slow", "arguments": {"seconds": SECRET}}
        failed = {"agent": "use", "input": wrong, "task_id": "failed", "session_id": "s"}
        await client.post("/v1/tasks", json=failed, headers=key)
        assert (await ended(client, "failed", **key))["status"] == "failed"
        await client.post("/v1/tasks", json={"agent": "spends", "input": 7, "task_id": "paid"}, headers=key)
        every_day = {"agent": "echo", "input": SECRET, "every_seconds": 86_400}
        set_ = await client.put("/v1/schedules/daily", json=every_day, headers=key)
        assert set_.json()["schedule_id"] == "acme.daily"
        await until(self._is_asked, SECONDS, "the question")
        await until(self._is_recorded, SECONDS, "the trajectory")
        await until(self._has_usage, SECONDS, "the usage")
        page = await client.get("/v1/dead-letters", params={"task_id": "failed", "name": "slow"}, headers=key)
        (letter,) = page.json()["dead_letters"]
        self.letter = letter["letter_id"]
        self.names = {
            "task_id": ("acme.order", "order", "evil.acme.order", "acme.failed", "failed"),
            "letter_id": (self.letter, f"0:{self.letter}"),
            "schedule_id": ("acme.daily", "daily", "evil.acme.daily"),
        }

    async def _is_asked(self) -> bool:
        shown = (await self._client.get("/v1/tasks/order", headers=self.key)).json()
        self.question = next((each["request_id"] for each in shown.get("questions", ())), "")
        return bool(self.question)

    async def _is_recorded(self) -> bool:
        return (await self._client.get("/v1/tasks/failed/trajectory", headers=self.key)).status_code == 200

    async def _has_usage(self) -> bool:
        return bool((await self._client.get("/v1/usage", headers=self.key)).json()["rows"])

    def body(self, path: str) -> dict[str, object]:
        """Return a body that would do harm."""
        bodies: dict[str, dict[str, object]] = {
            "/v1/tasks": {"agent": "echo", "input": 1, "task_id": "acme.order"},
            "/v1/batches": {"tasks": [{"agent": "echo", "input": 1, "task_id": "acme.order"}]},
            "/v1/events": {
                **{"specversion": "1.0", "type": "weft.task.submit", "source": "acme", "id": "order"},
                "data": {"agent": "echo", "input": 1, "task_id": "acme.order"},
            },
            "/v1/tasks/{task_id}/answers": {"request_id": self.question, "value": True},
            "/v1/tasks/{task_id}/messages": {"name": "stolen", "value": 1},
            "/v1/dead-letters/{letter_id}/redrive": {"reopen": True},
            "/v1/schedules/{schedule_id}": {"agent": "echo", "input": "stolen", "every_seconds": 86_400},
        }
        return bodies.get(path, {})

    async def unharmed(self) -> bool:
        """Return whether everything is as it was."""
        client, key = self._client, self.key
        order = (await client.get("/v1/tasks/order", headers=key)).json()
        daily = (await client.get("/v1/schedules/daily", headers=key)).json()
        letter = await client.get(f"/v1/dead-letters/{self.letter}", headers=key)
        tasks = (await client.get("/v1/tasks", headers=key)).json()["tasks"]
        return (
            [each["request_id"] for each in order["questions"]] == [self.question]
            and daily["input"] == SECRET
            and letter.json()["data"] == {"seconds": SECRET}
            and {row["task_id"] for row in tasks} == {"acme.order", "acme.failed", "acme.paid"}
        )


SECRET = "a secret of acme"
OWN = {"/v1/tasks", "/v1/batches", "/v1/events", "/v1/schedules/{schedule_id}"}
"""Paths whose POST or PUT makes something of the caller's own, whatever it is called."""
EMPTY: dict[str, object] = {
    "/v1/tasks": {"tasks": [], "next_cursor": None},
    "/v1/dead-letters": {"dead_letters": [], "next_cursor": None},
    "/v1/dead-letter-groups": {"groups": []},
    "/v1/schedules": {"schedules": [], "next_cursor": None},
    "/v1/questions": {"questions": [], "next_cursor": None},
    "/v1/agents": {"agents": []},
}
"""What lists show to a tenant without anything."""
FILTERS: dict[str, tuple[dict[str, str], ...]] = {
    "/v1/tasks": ({}, {"text": SECRET}, {"session_id": "acme/s"}),
    "/v1/dead-letters": ({}, {"task_id": "acme.failed"}, {"name": "slow"}),
    "/v1/dead-letter-groups": ({}, {"by": "name"}, {"task_id": "failed"}),
    "/v1/schedules": ({}, {"cursor": "acme"}),
    "/v1/steps": ({}, {"task_id": "acme.failed"}, {"session_id": "acme/s"}),
    "/v1/usage": ({}, {"by": "tenant"}),
    "/v1/questions": ({}, {"limit": "500"}),
    "/v1/agents": ({},),
}


async def attack(client: httpx2.AsyncClient, victim: Victim, evil: dict[str, str], method: str, template: str) -> None:
    """Send a request with each name of the victim, and with each filter. Nothing of the victim's shows."""
    (parameter,) = re.findall(r"\{(\w+)\}", template) or [""]
    if not parameter and method == "GET":
        for params in FILTERS[template]:
            answer = await client.get(template, params=params, headers=evil)
            assert answer.status_code == 200, answer.text
            assert SECRET not in answer.text
            assert "acme" not in answer.text.replace("evil.acme", "")
            if template in EMPTY:
                assert answer.json() == EMPTY[template], (template, params)
        return
    for name in victim.names.get(parameter, ("",)):
        path = template.replace(f"{{{parameter}}}", name)
        params = {"with": "acme.failed"} if template.endswith("/difference") else {}
        media = "application/cloudevents+json" if template == "/v1/events" else "application/json"
        headers = {**evil, "Content-Type": media}
        answer = await client.request(method, path, json=victim.body(template), params=params, headers=headers)
        assert SECRET not in answer.text, (method, path)
        if template in OWN and method != "DELETE" and method != "GET":
            assert answer.status_code < 300, answer.text
            assert '"acme.' not in answer.text
        else:
            assert problem(answer)[0] == 404, (method, path, answer.text)


async def test_tenants_do_not_reach_each_other(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """Every route, with the other's ids as they are shown, as their owner names them, and with an own prefix."""
    async with keyed_fleet(valkey, namespace, tmp_path, recorder=True) as fleet, http(fleet) as client:
        acme, evil = await make_key(fleet, "--tenant", "acme"), await make_key(fleet, "--tenant", "evil")
        victim = Victim(fleet, client, acme)
        await victim.begin()
        # What makes something of the attacker's own comes last: lists are empty until then.
        last = {"GET": 0, "DELETE": 1}
        for method, template, _ in sorted(ROUTES, key=lambda each: (last.get(each[0], 2), each[1] in OWN)):
            await attack(client, victim, evil, method, template)
            assert await victim.unharmed(), (method, template)
        for path in ("/v1/tasks", "/v1/usage"):
            other = await client.get(path, params={"tenant": "acme"}, headers=evil)
            assert problem(other) == (400, "parameter", "tenant")
        answered = {"request_id": victim.question, "value": True}
        assert (await client.post("/v1/tasks/order/answers", json=answered, headers=acme)).status_code == 200
        assert (await ended(client, "acme.order", **acme))["status"] == "completed"


async def test_tenants_have_their_own_names(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        acme, evil = await make_key(fleet, "--tenant", "acme"), await make_key(fleet, "--tenant", "evil")
        body = {"agent": "echo", "input": 0, "task_id": "order"}
        for key, task in ((acme, "acme.order"), (evil, "evil.order")):
            assert (await client.post("/v1/tasks", json=body, headers=key)).json() == {"task_id": task}
        again = {"Idempotency-Key": "k"}
        first = await client.post("/v1/tasks", json={"agent": "echo", "input": 1}, headers={**acme, **again})
        second = await client.post("/v1/tasks", json={"agent": "echo", "input": 2}, headers={**evil, **again})
        assert (first.status_code, second.status_code) == (202, 202)
        assert first.json() != second.json()
        async with Client.connect(valkey.url, namespace=namespace) as trusted:
            await trusted.submit("echo", 3, task_id="free", options=SubmitOptions(tenant="acme"))
        for key, tasks in ((acme, ("acme.order", first)), (evil, ("evil.order", second))):
            assert await listed(client, key, 2) == {tasks[0], tasks[1].json()["task_id"]}
        assert problem(await client.get("/v1/tasks/free", headers=acme))[:2] == (404, "no-task")


async def test_rejected_commands_belong_to_the_tenant_of_their_publisher(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    """The id in a rejected command is the sender's text, so it says nothing about its tenant."""
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        acme, evil = await make_key(fleet, "--tenant", "acme"), await make_key(fleet, "--tenant", "evil")
        await weft(fleet, "publisher", "set", "mallory", "--tenant", "evil")
        plain: PlainRedis
        async with Redis.from_url(valkey.url) as plain:
            data = json.dumps({"agent": "echo", "task_id": "acme.order"})  # without an input
            await plain.xadd(f"{namespace}:tasks:mallory", {"type": "weft.task.submit", "data": data})
            await plain.xadd(f"{namespace}:tasks", {"type": "weft.task.submit", "data": data})

        async def rejected() -> bool:
            return len((await client.get("/v1/dead-letters", headers=evil)).json()["dead_letters"]) == 1

        await until(rejected, SECONDS, "the dead letter")
        (letter,) = (await client.get("/v1/dead-letters", headers=evil)).json()["dead_letters"]
        assert (await client.get("/v1/dead-letters", headers=acme)).json() == EMPTY["/v1/dead-letters"]
        path = f"/v1/dead-letters/{letter['letter_id']}"
        for method, end in (("GET", ""), ("POST", "/redrive"), ("DELETE", "")):
            refused = await client.request(method, path + end, json={}, headers=acme)
            assert problem(refused) == (404, "no-dead-letter", "letter_id")
        fixed = {"data": {"agent": "echo", "input": 5, "task_id": "mended"}}
        assert (await client.post(f"{path}/redrive", json=fixed, headers=evil)).status_code == 200

        async def ended_well() -> bool:
            shown = await client.get("/v1/tasks/mended", headers=evil)
            return shown.status_code == 200 and shown.json()["status"] == "completed"

        await until(ended_well, SECONDS, "the redriven command")


async def test_the_schedules_of_a_tenant_are_bounded(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        keyed_fleet(valkey, namespace, tmp_path, WEFT_TENANT_SCHEDULES_MAX="2") as fleet,
        http(fleet) as client,
    ):
        key = await make_key(fleet, "--tenant", "acme", "--agents", "echo")
        body = {"agent": "echo", "input": 1, "every_seconds": 86_400}
        put = [await client.put(f"/v1/schedules/s{n}", json=body, headers=key) for n in range(3)]
        assert [answer.status_code for answer in put] == [200, 200, 422]
        assert (await client.put("/v1/schedules/s1", json={**body, "input": 2}, headers=key)).status_code == 200
        for agent in ("asks", "nobody"):
            refused = await client.put("/v1/schedules/s1", json={**body, "agent": agent}, headers=key)
            assert problem(refused) == (422, "field", "agent")


async def test_a_key_submits_to_its_agents_only(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        for bound in ((), ("--tenant", "acme")):
            key = await make_key(fleet, "--agents", "echo", *bound)
            allowed = await client.post("/v1/tasks", json={"agent": "echo", "input": 1}, headers=key)
            assert allowed.status_code == 202
            (seen,) = (await client.get("/v1/agents", headers=key)).json()["agents"]
            assert (seen["name"], seen["app"]) == ("echo", "fleet")
            for agent in ("asks", "nobody", "weft.runner"):
                refused = await client.post("/v1/tasks", json={"agent": agent, "input": 1}, headers=key)
                assert problem(refused) == (422, "field", "agent")
        unbound = await make_key(fleet, "--tenant", "acme")
        unknown = await client.post("/v1/tasks", json={"agent": "nobody", "input": 1}, headers=unbound)
        assert problem(unknown) == (422, "field", "agent")
        assert "echo" not in unknown.text, "it lists no agents of others"
        assert (await client.get("/v1/agents", headers=unbound)).json() == {"agents": []}
        every = (await client.get("/v1/agents", headers=await make_key(fleet))).json()["agents"]
        by_name = {row["name"]: row["input"] for row in every}
        assert list(by_name) == sorted(by_name)
        assert by_name["journey"] == {"type": "string"}
        assert not [name for name in by_name if name.startswith("weft.") or name == "inner"]


async def test_the_rate_is_counted_for_each_key(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path, WEFT_HTTP_RATE="0.2") as fleet, http(fleet) as client:
        first, second = await make_key(fleet), await make_key(fleet)

        async def statuses(key: dict[str, str]) -> list[int]:
            return [(await client.get("/v1/tasks", headers=key)).status_code for _ in range(3)]

        assert await statuses(first) == await statuses(second) == [200, 429, 429]
        guesses = [await client.get("/v1/tasks", headers={"Authorization": "Bearer x"}) for _ in range(3)]
        assert [guess.status_code for guess in guesses] == [401, 429, 429]


async def test_a_tenant_leaves_streams_to_others(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """The tasks ask a person, so their streams stay open until the test leaves them."""
    async with (
        keyed_fleet(
            valkey, namespace, tmp_path, WEFT_HTTP_STREAMS_MAX="4", WEFT_HTTP_CALLER_STREAMS_PERCENT="50"
        ) as fleet,
        http(fleet) as client,
    ):
        first, second = await make_key(fleet, "--tenant", "acme"), await make_key(fleet, "--tenant", "acme")
        other = await make_key(fleet, "--tenant", "other")
        for key in (first, other):
            asked = {"agent": "asks", "input": "Go on?", "task_id": "a"}
            assert (await client.post("/v1/tasks", json=asked, headers=key)).status_code == 202
        path = "/v1/tasks/a/events"
        async with (
            client.stream("GET", path, headers=first) as one,
            client.stream("GET", path, headers=second) as two,
            client.stream("GET", path, headers=other) as three,
        ):
            assert [one.status_code, two.status_code, three.status_code] == [200, 200, 200]
            for key in (first, second):
                refused = await client.get(path, headers=key)
                assert problem(refused) == (429, "streams", "")
                assert refused.headers["retry-after"] == "1"


async def stream_of(client: httpx2.AsyncClient, key: dict[str, str], task: str) -> list[str]:
    async with client.stream("GET", f"/v1/tasks/{task}/events", headers=key) as response:
        return [line async for line in response.aiter_lines() if line.startswith("event: ")]


async def test_only_keys_of_its_tenant_read_the_stream_of_a_task(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        key = await make_key(fleet, "--tenant", "acme")
        await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "one"}, headers=key)
        assert (await stream_of(client, key, "one"))[-1] == "event: weft.task.completed"
