"""Every wrong request gets one problem, which names what is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.gateway.gateways import gateway_fleet, http, problem, url_of
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)
JSON = {"Content-Type": "application/json"}
DEEP = "[" * 100 + "]" * 100

SUBMIT = {"agent": "echo", "input": 1}
EVENT = {"specversion": "1.0", "type": "weft.task.submit", "source": "shop", "id": "1", "data": SUBMIT}


def event(**changed: Any) -> dict[str, Any]:
    """Return a request with an event in structured mode; None leaves a member out."""
    given = {name: value for name, value in {**EVENT, **changed}.items() if value is not None}
    return {"content": json.dumps(given), "headers": {"Content-Type": "application/cloudevents+json"}}


def in_headers(**changed: str) -> dict[str, Any]:
    """Return a request with an event in binary mode; an empty text leaves an attribute out."""
    given = {"specversion": "1.0", "type": "weft.task.submit", "source": "shop", "id": "1", **changed}
    return {"json": SUBMIT, "headers": {f"ce-{name}": value for name, value in given.items() if value}}


def batch_of_events(content: bytes) -> dict[str, Any]:
    return {"content": content, "headers": {"Content-Type": "application/cloudevents-batch+json"}}


HUGE = b'{"specversion":"1.0","source":"s","id":"1","type":"weft.task.submit","data":' + DEEP.encode() + b"}"
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
    "cancel without a body": (("POST", "/v1/tasks/t-1/cancel"), {}, (404, "no-task", "task_id")),
    "null": (("POST", "/v1/tasks/t-1/cancel"), {"content": b"null", "headers": JSON}, (400, "body", "")),
    "event without id": (("POST", "/v1/events"), event(id=None), (422, "field", "id")),
    "event without source": (("POST", "/v1/events"), event(source=None), (422, "field", "source")),
    "event without version": (("POST", "/v1/events"), event(specversion=None), (422, "field", "specversion")),
    "old event": (("POST", "/v1/events"), event(specversion="0.3"), (422, "field", "specversion")),
    "event without data": (("POST", "/v1/events"), event(data=None), (400, "body", "")),
    "event of another type": (("POST", "/v1/events"), event(type="shop.order"), (422, "field", "type")),
    "event with a time": (("POST", "/v1/events"), event(time="noon"), (400, "body", "")),
    "event with a list": (("POST", "/v1/events"), event(source=["shop"]), (422, "field", "source")),
    "event with an object": (("POST", "/v1/events"), event(colour={}), (422, "field", "colour")),
    "event with a name": (("POST", "/v1/events"), event(Colour="x"), (422, "field", "Colour")),
    "event with replyto": (("POST", "/v1/events"), event(replyto="other:key"), (422, "field", "replyto")),
    "event in the past": (("POST", "/v1/events"), event(deadline="2001-01-01T00:00:00Z"), (422, "field", "deadline")),
    "event with a wrong submit": (("POST", "/v1/events"), event(data={"agent": "echo"}), (422, "field", "input")),
    "event of text": (("POST", "/v1/events"), event(data="echo"), (400, "body", "")),
    "event in base64": (
        ("POST", "/v1/events"),
        event(data=None, data_base64="e30=", datacontenttype="text/plain"),
        (422, "field", "datacontenttype"),
    ),
    "event that is no object": (
        ("POST", "/v1/events"),
        {**event(), "content": b"[]"},
        (400, "body", ""),
    ),
    "deep event": (("POST", "/v1/events"), {**event(), "content": HUGE}, (400, "body", "")),
    "large event": (("POST", "/v1/events"), {**event(), "content": b" " * (2**21 + 1)}, (413, "too-large", "")),
    "event in headers": (("POST", "/v1/events"), in_headers(id=""), (422, "field", "ce-id")),
    "event with an encoded header": (("POST", "/v1/events"), in_headers(id="%0a"), (422, "field", "ce-id")),
    "event without headers": (("POST", "/v1/events"), {"json": SUBMIT}, (422, "field", "ce-id")),
    "event of a form": (
        ("POST", "/v1/events"),
        {**in_headers(), "json": None, "data": {"a": "b"}},
        (415, "media-type", "Content-Type"),
    ),
    "event twice": (
        ("POST", "/v1/events"),
        {"json": SUBMIT, "headers": [*in_headers()["headers"].items(), ("ce-id", "2")]},
        (400, "parameter", "ce-id"),
    ),
    "batch of events": (("POST", "/v1/events"), batch_of_events(b"{}"), (400, "body", "")),
    "many events": (("POST", "/v1/events"), batch_of_events(b"[" + b"1," * 1000 + b"1]"), (400, "body", "")),
    "deep batch": (("POST", "/v1/events"), batch_of_events(b"[" * 100_000), (400, "body", "")),
    "compressed": (
        ("POST", "/v1/tasks"),
        {"json": SUBMIT, "headers": {"Content-Encoding": "gzip"}},
        (415, "media-type", "Content-Encoding"),
    ),
    "charset": (
        ("POST", "/v1/tasks"),
        {"content": b"{}", "headers": {"Content-Type": "application/json; charset=utf-16"}},
        (415, "media-type", "Content-Type"),
    ),
    "two media types": (
        ("POST", "/v1/tasks"),
        {"content": b"{}", "headers": [*JSON.items(), *JSON.items()]},
        (400, "parameter", "Content-Type"),
    ),
    "two keys": (
        ("GET", "/v1/tasks"),
        {"headers": [("Authorization", "Bearer a"), ("Authorization", "Bearer b")]},
        (400, "parameter", "Authorization"),
    ),
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


async def test_a_caller_over_its_rate_learns_when_to_retry(valkey: Server, namespace: str, tmp_path: Path) -> None:
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
        wanted = "content-type, ce-id, ce-source, ce-specversion, ce-type, ce-deadline, ce-tenant"
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        good = await client.options("/v1/tasks", headers={"Origin": "https://desk.example", **asks})
        bad = await client.options("/v1/tasks", headers={"Origin": "https://evil.example", **asks})
        assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://desk.example")
        assert bad.status_code == 400
        assert "access-control-allow-origin" not in bad.headers


async def test_an_open_gateway_reports_that_it_is_open(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet:
        assert url_of(fleet).startswith("http://127.0.0.1:")
        assert "open without keys: everyone on this machine may do everything" in fleet.members["gateway-1"].text()
