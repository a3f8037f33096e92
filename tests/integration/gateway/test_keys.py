"""API keys: who may do what, and no tenant reaches another one's tasks through any route."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from runtime_core.gateway.keys import ANSWER, OPERATE, READ, ROLES, SUBMIT
from tests.fleet import ROOT, Fleet, until
from tests.integration.gateway.gateways import SECONDS, ended, gateway_fleet, http, problem
from tests.servers.process import Server
from weft import Client, SubmitOptions

pytestmark = pytest.mark.timeout(300)
ROUTES = (
    ("POST", "/v1/tasks", SUBMIT),
    ("POST", "/v1/batches", SUBMIT),
    ("GET", "/v1/tasks", READ),
    ("GET", "/v1/tasks/t", READ),
    ("GET", "/v1/tasks/t/events", READ),
    ("POST", "/v1/tasks/t/cancel", OPERATE),
    ("POST", "/v1/tasks/t/answers", ANSWER),
)


@asynccontextmanager
async def keyed_fleet(valkey: Server, namespace: str, folder: Path, **options: str) -> AsyncIterator[Fleet]:
    environ = {"WEFT_HTTP_AUTH": "keys", **options}
    async with gateway_fleet(valkey, namespace, folder, environ=environ) as fleet:
        yield fleet


async def weft(fleet: Fleet, *arguments: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "runtime_core.cli.main", *arguments],
        cwd=ROOT, env=fleet.environ, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
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
        for method, path, needed in ROUTES:
            for text in wrong:
                refused = await client.request(method, path, json={}, headers={"Authorization": text} if text else {})
                assert problem(refused) == (401, "unauthorized", "Authorization")
                assert refused.headers["www-authenticate"] == "Bearer"
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


async def test_tenants_do_not_reach_each_other(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """Each route, with the other's id as it is shown, as its owner names it, and with a prefix of one's own."""
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        acme, evil = await make_key(fleet, "--tenant", "acme"), await make_key(fleet, "--tenant", "evil")
        body = {"agent": "asks", "input": "a secret", "task_id": "order"}
        task = (await client.post("/v1/tasks", json=body, headers=acme)).json()["task_id"]
        assert task == "acme.order"
        question: list[str] = []

        async def asked() -> bool:
            shown = (await client.get("/v1/tasks/order", headers=acme)).json()
            question[:] = [each["request_id"] for each in shown.get("questions", ())]
            return bool(question)

        await until(asked, SECONDS, "the question")
        for name in ("acme.order", "order", "evil.acme.order"):
            for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/answers")):
                given = {"request_id": question[0], "value": True} if path == "/answers" else {}
                answer = await client.request(method, f"/v1/tasks/{name}{path}", json=given, headers=evil)
                assert problem(answer)[:2] == (404, "no-task"), (name, path)
                assert "a secret" not in answer.text
        assert (await client.get("/v1/tasks", headers=evil)).json() == {"tasks": [], "next_cursor": None}
        other = await client.get("/v1/tasks", params={"tenant": "acme"}, headers=evil)
        assert problem(other) == (400, "parameter", "tenant")
        # The same ids and keys of two tenants are two tasks.
        forged = await client.post("/v1/tasks", json=body, headers=evil)
        assert forged.json() == {"task_id": "evil.order"}
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
        answered = {"request_id": question[0], "value": True}
        assert (await client.post("/v1/tasks/order/answers", json=answered, headers=acme)).status_code == 200
        assert (await ended(client, "acme.order", **acme))["status"] == "completed"


async def test_a_key_submits_to_its_agents_only(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        for bound in ((), ("--tenant", "acme")):
            key = await make_key(fleet, "--agents", "echo", *bound)
            allowed = await client.post("/v1/tasks", json={"agent": "echo", "input": 1}, headers=key)
            assert allowed.status_code == 202
            for agent in ("asks", "nobody", "weft.runner"):
                refused = await client.post("/v1/tasks", json={"agent": agent, "input": 1}, headers=key)
                assert problem(refused) == (422, "field", "agent")
        unbound = await make_key(fleet, "--tenant", "acme")
        unknown = await client.post("/v1/tasks", json={"agent": "nobody", "input": 1}, headers=unbound)
        assert problem(unknown) == (422, "field", "agent")
        assert "echo" not in unknown.text, "it lists no agents of others"


async def test_the_rate_is_counted_for_each_key(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path, WEFT_HTTP_RATE="0.2") as fleet, http(fleet) as client:
        first, second = await make_key(fleet), await make_key(fleet)

        async def statuses(key: dict[str, str]) -> list[int]:
            return [(await client.get("/v1/tasks", headers=key)).status_code for _ in range(3)]

        assert await statuses(first) == await statuses(second) == [200, 429, 429]
        guesses = [await client.get("/v1/tasks", headers={"Authorization": "Bearer x"}) for _ in range(3)]
        assert [guess.status_code for guess in guesses] == [401, 429, 429]


async def stream_of(client: httpx2.AsyncClient, key: dict[str, str], task: str) -> list[str]:
    async with client.stream("GET", f"/v1/tasks/{task}/events", headers=key) as response:
        return [line async for line in response.aiter_lines() if line.startswith("event: ")]


async def test_the_stream_of_a_tenants_task(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with keyed_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        key = await make_key(fleet, "--tenant", "acme")
        await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "one"}, headers=key)
        assert (await stream_of(client, key, "one"))[-1] == "event: weft.task.completed"
