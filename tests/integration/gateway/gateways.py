"""The gateway as real processes, and what a client of it reads."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from runtime_core.gateway.server import description
from tests.fleet import Fleet, until
from tests.servers.process import Server

LISTENS = re.compile(r"HTTP on (http://\S+:\d+)")
SECONDS = 50.0
HERE = "urn:document"
JSON, PROBLEM = "application/json", "application/problem+json"
DOCUMENT: dict[str, Any] = json.loads(description())
_STREAM = DOCUMENT["paths"]["/v1/tasks/{task_id}/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]
EVENT_DATA: dict[str, Any] = _STREAM["x-event-data"]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REGISTRY: Registry[Any] = Registry().with_resource(HERE, Resource.from_contents({"$schema": DIALECT, **DOCUMENT}))


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: str
    type: str
    data: Any  # Any: JSON


def url_of(fleet: Fleet, name: str = "gateway-1") -> str:
    """Return where the current process of a replica listens."""
    return str(LISTENS.findall(fleet.members[name].text())[-1])


@asynccontextmanager
async def gateway_fleet(
    server: Server,
    namespace: str,
    folder: Path,
    *,
    gateways: int = 1,
    environ: Mapping[str, str] | None = None,
    app: str = "tests.apps.fleet_app:app",
    recorder: bool = False,
    urls: Mapping[str, str] | None = None,
) -> AsyncIterator[Fleet]:
    """Start a gateway with the services behind it; `urls` are those of services with another user of the broker."""
    replicas = dict.fromkeys(("agent-handler", "tool-handler", "state-manager"), 1) | {"gateway": gateways}
    if recorder:
        replicas["trajectory-recorder"] = 1
    given = {"WEFT_HTTP_PORT": "0", **(environ or {})}
    async with Fleet(server.url, namespace, folder, replicas=replicas, environ=given, app=app, urls=urls) as fleet:
        yield fleet


@asynccontextmanager
async def http(fleet: Fleet, name: str = "gateway-1", **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client that checks each answer against the OpenAPI document."""
    hooks = {"response": [as_described]}
    async with httpx2.AsyncClient(
        base_url=url_of(fleet, name), timeout=SECONDS, trust_env=False, event_hooks=hooks, **options
    ) as client:
        yield client


async def as_described(response: httpx2.Response) -> None:
    """Fail unless the document has the status of an answer, and a schema that its JSON fits."""
    media = response.headers.get("content-type", "").partition(";")[0]
    for template, methods in DOCUMENT["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), response.request.url.path):
            operation = methods.get(response.request.method.lower())
            if operation is not None:
                described = operation["responses"].get(str(response.status_code))
                assert described is not None, (operation["operationId"], response.status_code)
                if media in (JSON, PROBLEM):
                    schema = described["content"][media]["schema"]
                    await response.aread()
                    Draft202012Validator(absolute(schema), registry=REGISTRY).validate(response.json())
            return


def absolute(schema: Any) -> Any:  # Any: JSON
    """Return a schema of the document with absolute references."""
    if isinstance(schema, dict):
        return {
            name: HERE + value if name == "$ref" and isinstance(value, str) else absolute(value)
            for name, value in schema.items()
        }
    return [absolute(each) for each in schema] if isinstance(schema, list) else schema


async def ended(client: httpx2.AsyncClient, task: str, **headers: str) -> dict[str, Any]:
    """Wait until a task has ended, and return it."""
    shown: dict[str, Any] = {}

    async def has_ended() -> bool:
        shown.update((await client.get(f"/v1/tasks/{task}", headers=headers)).json())
        return shown.get("status") in ("completed", "failed", "cancelled")

    await until(has_ended, SECONDS, f"the end of {task}")
    return shown


async def events(response: httpx2.Response) -> AsyncIterator[Event]:
    """Yield the events of a stream, as an EventSource does, and check the data of each against the OpenAPI document."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line:
            if "data" in fields:
                data = json.loads(fields["data"])
                Draft202012Validator(absolute(EVENT_DATA[fields["event"]]), registry=REGISTRY).validate(data)
                yield Event(fields.get("id", ""), fields["event"], data)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def problem(response: httpx2.Response) -> tuple[int, str, str]:
    """Return the status of a problem, its kind and its field."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document = response.json()
    assert document["status"] == response.status_code
    assert document["detail"]
    return response.status_code, document["type"].rpartition(":")[2], document.get("field", "")
