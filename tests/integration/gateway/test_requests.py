"""Every wrong request gets one problem, which names what is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.gateway.gateways import gateway_fleet, http, problem, url_of
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)
JSON = {"Content-Type": "application/json"}
DEEP = "[" * 100 + "]" * 100

CASES: dict[str, tuple[tuple[str, str], dict[str, Any], tuple[int, str, str]]] = {
    "path": (("GET", "/v2/tasks"), {}, (404, "no-route", "")),
    "method": (("DELETE", "/v1/tasks"), {}, (405, "method", "")),
    "media type": (("POST", "/v1/tasks"), {"content": b"{}"}, (415, "media-type", "Content-Type")),
    "form": (("POST", "/v1/tasks"), {"data": {"agent": "echo"}}, (415, "media-type", "Content-Type")),
    "syntax": (("POST", "/v1/tasks"), {"content": b"{", "headers": JSON}, (400, "body", "")),
    "empty": (("POST", "/v1/tasks"), {"content": b"", "headers": JSON}, (400, "body", "")),
    "no object": (("POST", "/v1/tasks"), {"json": [1]}, (400, "body", "")),
    "depth": (("POST", "/v1/tasks"), {"content": DEEP, "headers": JSON}, (400, "body", "")),
    "large": (("POST", "/v1/tasks"), {"content": b" " * (2**21 + 1), "headers": JSON}, (413, "too-large", "")),
    "large input": (("POST", "/v1/tasks"), {"json": {"agent": "echo", "input": "x" * 2**20}}, (422, "field", "input")),
    "no agent": (("POST", "/v1/tasks"), {"json": {"input": 1}}, (422, "field", "agent")),
    "unknown agent": (("POST", "/v1/tasks"), {"json": {"agent": "nobody", "input": 1}}, (422, "field", "agent")),
    "schema": (("POST", "/v1/tasks"), {"json": {"agent": "strict", "input": "one"}}, (422, "field", "input")),
    "member": (("POST", "/v1/tasks"), {"json": {"agent": "echo", "input": 1, "x": 1}}, (422, "field", "x")),
    "limit": (
        ("POST", "/v1/tasks"),
        {"json": {"agent": "echo", "input": 1, "conf": {"max_steps": 0}}},
        (422, "field", "conf.max_steps"),
    ),
    "id": (("POST", "/v1/tasks"), {"json": {"agent": "echo", "input": 1, "task_id": "/"}}, (422, "field", "task_id")),
    "idempotency key": (
        ("POST", "/v1/tasks"),
        {"json": {}, "headers": {"Idempotency-Key": "x" * 257}},
        (400, "parameter", "Idempotency-Key"),
    ),
    "batch": (("POST", "/v1/batches"), {"json": {"tasks": []}}, (422, "field", "tasks")),
    "batch item": (("POST", "/v1/batches"), {"json": {"tasks": [1]}}, (422, "field", "tasks.0")),
    "parameter": (("GET", "/v1/tasks?statuz=failed"), {}, (400, "parameter", "statuz")),
    "twice": (("GET", "/v1/tasks?limit=1&limit=2"), {}, (400, "parameter", "limit")),
    "status": (("GET", "/v1/tasks?status=ended"), {}, (400, "parameter", "status")),
    "page": (("GET", "/v1/tasks?limit=0"), {}, (400, "parameter", "limit")),
    "cursor": (("GET", "/v1/tasks?cursor=MTIz"), {}, (400, "parameter", "cursor")),
    "time": (("GET", "/v1/tasks?since=yesterday"), {}, (400, "parameter", "since")),
    "no task": (("GET", "/v1/tasks/t-1"), {}, (404, "no-task", "task_id")),
    "no id": (("GET", "/v1/tasks/%7Bt%7D"), {}, (404, "no-task", "task_id")),
    "stream of no task": (("GET", "/v1/tasks/t-1/events"), {}, (404, "no-task", "task_id")),
    "event id": (
        ("GET", "/v1/tasks/t-1/events"),
        {"headers": {"Last-Event-ID": "5"}},
        (400, "parameter", "Last-Event-ID"),
    ),
    "mode": (("GET", "/v1/tasks/t-1/events?mode=loud"), {}, (400, "parameter", "mode")),
    "answer": (
        ("POST", "/v1/tasks/t-1/answers"),
        {"json": {"request_id": "r:1-0"}},
        (422, "field", "value"),
    ),
    "answer to no task": (
        ("POST", "/v1/tasks/t-1/answers"),
        {"json": {"request_id": "r:1-0", "value": 1}},
        (404, "no-task", "task_id"),
    ),
    "reason": (("POST", "/v1/tasks/t-1/cancel"), {"json": {"reason": 7}}, (422, "field", "reason")),
    "host": (("GET", "/v1/tasks"), {"headers": {"Host": "evil.example"}}, (421, "host", "Host")),
}


async def test_every_wrong_request_gets_one_problem(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        got = {name: problem(await client.request(*line, **options)) for name, (line, options, _) in CASES.items()}
        assert got == {name: expected for name, (_, _, expected) in CASES.items()}
        allowed = (await client.delete("/v1/tasks")).headers["allow"]
        assert allowed == "POST, GET"


async def test_a_body_in_parts_is_bounded_too(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        try:
            response = await client.post("/v1/tasks", content=endless(), headers=JSON)
        except httpx2.TransportError:
            return  # it was answered, and the connection closed, while the client wrote
        assert problem(response) == (413, "too-large", "")


async def test_a_caller_that_is_too_fast_is_told_when_to_come_again(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    environ = {"WEFT_HTTP_RATE": "5"}
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:
        answers = await asyncio.gather(*(client.get("/v1/tasks") for _ in range(30)))
        refused = [each for each in answers if each.status_code != 200]
        assert 5 <= 30 - len(refused) < 30
        assert {problem(each) for each in refused} == {(429, "rate", "")}
        assert all(int(each.headers["retry-after"]) >= 1 for each in refused)


async def test_pages_of_the_listed_origins_may_call(valkey: Server, namespace: str, tmp_path: Path) -> None:
    environ = {"WEFT_HTTP_ORIGINS": "https://desk.example"}
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        good = await client.options("/v1/tasks", headers={"Origin": "https://desk.example", **asks})
        bad = await client.options("/v1/tasks", headers={"Origin": "https://evil.example", **asks})
        assert good.headers["access-control-allow-origin"] == "https://desk.example"
        assert bad.status_code == 400
        assert "access-control-allow-origin" not in bad.headers


async def test_an_open_gateway_says_so(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet:
        assert url_of(fleet).startswith("http://127.0.0.1:")
        assert "open without keys: everyone on this machine may do everything" in fleet.members["gateway-1"].text()
