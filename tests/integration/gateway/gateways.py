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

from tests.fleet import Fleet, until
from tests.servers.process import Server

LISTENS = re.compile(r"HTTP on (http://\S+:\d+)")
SECONDS = 50.0


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
    async with httpx2.AsyncClient(base_url=url_of(fleet, name), timeout=SECONDS, trust_env=False, **options) as client:
        yield client


async def ended(client: httpx2.AsyncClient, task: str, **headers: str) -> dict[str, Any]:
    """Wait until a task has ended, and return it."""
    shown: dict[str, Any] = {}

    async def has_ended() -> bool:
        shown.update((await client.get(f"/v1/tasks/{task}", headers=headers)).json())
        return shown.get("status") in ("completed", "failed", "cancelled")

    await until(has_ended, SECONDS, f"the end of {task}")
    return shown


async def events(response: httpx2.Response) -> AsyncIterator[Event]:
    """Yield the events of a stream, as an EventSource does."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line:
            if "data" in fields:
                yield Event(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
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
