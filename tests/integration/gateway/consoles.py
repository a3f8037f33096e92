"""The console as a browser and a person see it: pages read as HTML, forms sent with their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import httpx2

from tests.fleet import Fleet, until
from tests.integration.gateway.gateways import SECONDS
from tests.servers.process import Server

APP = "tests.apps.console_app:app"
SERVICES = ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder", "gateway")


@asynccontextmanager
async def console_fleet(
    server: Server, namespace: str, folder: Path, app: str = APP, **environ: str
) -> AsyncIterator[Fleet]:
    """Run the console, by default with the app that has something to show."""
    given = {"WEFT_HTTP_PORT": "0", **environ}
    async with Fleet(
        server.url, namespace, folder, replicas=dict.fromkeys(SERVICES, 1), environ=given, app=app
    ) as fleet:
        yield fleet


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [
            found for name, found in self.elements if name == tag and all(found.get(k) == v for k, v in wanted.items())
        ]

    @property
    def token(self) -> str:
        return self.all("input", name="token")[0]["value"]


async def page(client: httpx2.AsyncClient, path: str, status: int = 200) -> Page:
    """Return a page of the console."""
    answer = await client.get(f"/console{path}")
    assert answer.status_code == status, (path, answer.status_code, answer.text[-2000:])
    return Page(answer.text)


async def send(
    client: httpx2.AsyncClient, path: str, seen: Page, fields: Mapping[str, str | list[str]], **headers: str
) -> httpx2.Response:
    """Send a form with the token of the page that has it."""
    return await client.post(f"/console{path}", data={"token": seen.token, **fields}, headers=headers)


async def shown(client: httpx2.AsyncClient, path: str, text: str) -> Page:
    """Wait until a page shows a text, and return it."""
    found: list[Page] = []

    async def has_text() -> bool:
        answer = await client.get(f"/console{path}")
        found[:] = [Page(answer.text)]
        return answer.status_code == 200 and text in found[0].text

    await until(has_text, SECONDS, f"{text!r} on {path}")
    return found[0]


async def login(client: httpx2.AsyncClient, key: str) -> None:
    """Log in, as a person does who follows a link to the tasks."""
    asked = await client.get("/console/tasks")
    assert (asked.status_code, asked.headers["location"]) == (303, "/console/login?next=%2Fconsole%2Ftasks")
    form = await page(client, "/login?next=%2Fconsole%2Ftasks")
    done = await send(client, "/login", form, {"key": key, "next": "/console/tasks"})
    assert (done.status_code, done.headers["location"]) == (303, "/console/tasks")
