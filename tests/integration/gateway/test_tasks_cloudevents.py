"""CloudEvents over HTTP start tasks: in binary and structured mode, and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

from runtime_core.client.client import Client
from runtime_core.gateway.keys import ROLES, ApiKeys
from tests.integration.gateway.gateways import ended, gateway_fleet, http, problem
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)
BATCH = {"Content-Type": "application/cloudevents-batch+json"}


def event(id: str, input: object = 1, data: dict[str, Any] | None = None, **attributes: str) -> CloudEvent:
    given = {"type": "weft.task.submit", "source": "shop", "id": id, "datacontenttype": "application/json"}
    return CloudEvent({**given, **attributes}, {"agent": "echo", "input": input, **(data or {})})


def sent(message: HTTPMessage) -> dict[str, Any]:
    return {"headers": dict(message.headers), "content": message.body}


async def test_the_modes_are_one_and_a_repeat_starts_nothing(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path, gateways=2) as fleet, http(fleet) as client:
        one = event("ö 1%", {"n": "ü"}, {"session_id": "s-1"}, colour="blue")
        first = await client.post("/v1/events", **sent(to_binary_event(one)))
        assert first.status_code == 202
        task = first.json()["task_id"]
        assert first.headers["location"] == f"/v1/tasks/{task}"
        shown = await ended(client, task)
        assert (shown["status"], shown["output"], shown["session_id"]) == ("completed", {"n": "ü"}, "s-1")
        async with http(fleet, "gateway-2") as other:
            again = await other.post("/v1/events", **sent(to_structured_event(one)))
            batch = json.dumps([json.loads(to_structured_event(one).body)])
            in_batch = await other.post("/v1/events", content=batch, headers=BATCH)
        assert (again.status_code, again.json()) == (202, first.json())
        assert (in_batch.status_code, in_batch.json()) == (200, {"results": [first.json()]})
        changed = await client.post("/v1/events", **sent(to_binary_event(event("ö 1%", 2))))
        assert problem(changed) == (409, "conflict", "id")
        elsewhere = await client.post("/v1/events", **sent(to_binary_event(event("ö 1%", 2, source="desk"))))
        assert elsewhere.json() != first.json()
        assert len((await client.get("/v1/tasks")).json()["tasks"]) == 2


async def test_each_event_of_a_batch_starts_or_fails_by_itself(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        good = json.loads(to_structured_event(event("1", 1)).body)
        events = [
            good,
            {**good, "id": ""},
            {**good, "id": "3", "data": {"agent": "nobody", "input": 1}},
            7,
            {**good, "data": {"agent": "echo", "input": 2}},
            {**good, "id": "6", "data": {"agent": "echo", "input": "x" * 2**20}},
            {**good, "id": "7", "data": {"agent": "echo", "input": 7, "task_id": "seventh"}},
        ]
        done = await client.post("/v1/events", content=json.dumps(events), headers=BATCH)
        assert done.status_code == 200
        results = done.json()["results"]
        assert [each.get("problem", {}).get("status") for each in results] == [None, 422, 422, 400, 409, 400, None]
        assert [each.get("problem", {}).get("field") for each in results] == [
            None,
            "id",
            "agent",
            None,
            "id",
            None,
            None,
        ]
        assert (await ended(client, "seventh"))["output"] == 7
        assert (await client.post("/v1/events", content=b"[]", headers=BATCH)).json() == {"results": []}


async def test_an_event_is_bound_to_the_tenant_of_its_key(valkey: Server, namespace: str, tmp_path: Path) -> None:
    environ = {"WEFT_HTTP_AUTH": "keys"}
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:
        async with Client.connect(valkey.url, namespace=namespace) as direct:
            keys = ApiKeys(direct.buses[0])
            made = {tenant: (await keys.create(tenant or "all", ROLES, tenant))[1] for tenant in ("acme", "other", "")}

        async def post(tenant: str, message: HTTPMessage) -> Any:
            headers = {**message.headers, "Authorization": f"Bearer {made[tenant]}"}
            return await client.post("/v1/events", content=message.body, headers=headers)

        named = event("1", data={"task_id": "order-7", "key": "k", "session_id": "s"}, tenant="acme")
        refused = await post("other", to_binary_event(named))
        assert problem(refused) == (422, "field", "ce-tenant")
        assert (await post("acme", to_structured_event(named))).json() == {"task_id": "acme.order-7"}
        shown = await ended(client, "order-7", Authorization=f"Bearer {made['acme']}")
        assert (shown["key"], shown["session_id"]) == ("acme/k", "acme/s")
        # The same source and id of another tenant is another event.
        mine = event("1", data={"task_id": "order-7"})
        assert (await post("other", to_binary_event(mine))).json() == {"task_id": "other.order-7"}
        # A trusted key names the tenant. It cannot take the ids of a tenant's own events.
        forged = event("2", data={"task_id": "forged"}, source="acme/shop", tenant="acme")
        assert (await post("", to_binary_event(forged))).json() == {"task_id": "forged"}
        assert (await post("acme", to_binary_event(event("2")))).json()["task_id"].startswith("acme.")
