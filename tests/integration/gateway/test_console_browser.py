"""The console in Chromium: live pages, keys, the palette, themes, a phone, screen readers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.integration.gateway.consoles import console_fleet, shown
from tests.integration.gateway.gateways import http, url_of
from tests.servers.process import Server
from weft import Client

pytestmark = pytest.mark.timeout(300)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 30_000
WIDTHS = {"wide": (1440, 900), "tablet": (900, 1100), "phone": (390, 844)}


def chromium() -> str:
    """Return the path of an installed Chromium. Skips the test if there is none."""
    found = os.environ.get("WEFT_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("NOT TESTED: there is no Chromium on this machine: install one, or name it in WEFT_TEST_CHROMIUM")
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    path = chromium()
    async with async_playwright() as driver:
        # The sandbox needs namespaces that containers lack, and the pages are our own.
        opened = await driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield opened
        finally:
            await opened.close()


class Console:
    """A tab that fails the test if the page reports an error."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url, self.errors = page, url, list[str]()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    async def open(self, path: str) -> Page:
        await self.page.goto(f"{self.url}/console{path}")
        return self.page


async def tab(context: BrowserContext, url: str) -> Console:
    return Console(await context.new_page(), url)


async def start_all(trusted: Client) -> None:
    """Start tasks that complete, fail, wait and take long."""
    for agent in ("reporter", "analyst", "editor", "approver", "listener", "hasty"):
        await trusted.submit(agent, "ACME", task_id=f"t-{agent}", stream=True)
    await trusted.submit("archivist", 3, task_id="t-archivist")


async def test_a_person_works_with_tasks(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        browser() as chrome,
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await start_all(trusted)
        await shown(client, "/tasks/t-analyst", "It took down")
        context = await chrome.new_context(viewport={"width": 1440, "height": 900})
        console = await tab(context, url_of(fleet))
        page = await console.open("/tasks")
        # A row changes where it is. A new one waits until it is asked for.
        row = page.locator("#t-t-listener")
        await expect(row.locator(".status")).to_have_text("waiting")
        before = await page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.id)")
        await trusted.submit("reporter", "later", task_id="t-later")
        listener = await trusted.task("t-listener")
        await listener.send("breaking-news", "now")
        await expect(row.locator(".status")).to_have_text("completed")
        await expect(page.locator(".fresh")).to_have_text("1 new task")
        assert await page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.id)") == before
        await page.click(".fresh")
        await expect(page.locator("#t-t-later")).to_be_visible()
        # Filters are in the URL.
        await page.click(".tabs >> text=Failed")
        await expect(page).to_have_url(re.compile(r"\?status=failed$"))
        await expect(page.locator("tbody tr")).to_have_count(1)
        # Select and cancel.
        page = await console.open("/tasks")
        await page.check("#t-t-archivist input")
        await expect(page.locator("[data-count]")).to_have_text("1 selected")
        page.once("dialog", lambda dialog: dialog.accept())
        await page.click(".bulk button")
        await expect(page.locator(".notice")).to_have_text("The selected tasks were cancelled.")
        await expect(page.locator("#t-t-archivist .status")).to_have_text("cancelled")
        assert console.errors == []


async def test_a_person_explains_answers_and_follows(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        browser() as chrome,
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await start_all(trusted)
        await shown(client, "/tasks/t-analyst", "It took down")
        console = await tab(await chrome.new_context(viewport={"width": 1440, "height": 900}), url_of(fleet))
        page = await console.open("/tasks/t-analyst")
        await expect(page.locator(".failure h2")).to_contain_text("Failed in tool fetch_quotes, after 3 attempts")
        await expect(page.locator("#detail h2")).to_contain_text("fetch_quotes")
        await page.click(".step:has-text('search')")
        await expect(page.locator("#detail")).to_contain_text('"query": "ACME"')
        await expect(page).to_have_url(re.compile(r"step=r/1$"))
        await expect(page.locator("rect.b-failed").first).to_be_visible()
        # The output of an attempt that was superseded is struck.
        page = await console.open("/tasks/t-hasty?tab=output")
        await expect(page.locator(".output del")).to_have_text("draft 1 of ACME ")
        await expect(page.locator(".output span")).to_have_text("draft 2 of ACME ")
        page = await console.open("/tasks/t-hasty?tab=events")
        await expect(page.locator(".events li")).to_have_count(4)
        # A question is answered, and the page follows the task to its end.
        page = await console.open("/tasks/t-approver")
        await page.fill("textarea[name=value]", "edited")
        await page.click("text=Approve the edited text")
        await expect(page.locator(".status").first).to_have_text("completed")
        page = await console.open("/people")
        await expect(page.locator(".card")).to_have_count(1)
        await page.fill("textarea[name=value]", "go ahead")
        await page.click("text=Send the answer")
        await expect(page.locator(".notice")).to_have_text("The answer was sent.")
        await expect(page.locator(".empty")).to_be_visible()
        # An edited input starts a fork.
        page = await console.open("/tasks/t-analyst?step=r/2/1")
        await page.click("summary:has-text('Fork from this step')")
        await page.fill("#detail textarea", '{"ACME": 2}')
        await page.click("text=Continue with this result")
        await expect(page.locator(".notice")).to_have_text("The fork has started.")
        await expect(page.locator("#title .status")).to_have_text("completed")
        assert console.errors == []


async def test_keys_alone_are_enough(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        browser() as chrome,
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await start_all(trusted)
        await shown(client, "/tasks/t-analyst", "It took down")
        context = await chrome.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
        console = await tab(context, url_of(fleet))
        page = await console.open("/people")
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        await expect(page).to_have_url(re.compile("/console/tasks$"))
        page = await console.open("/tasks?status=waiting")
        await expect(page.locator("tbody tr")).to_have_count(4)
        for key in "jjk":
            await page.keyboard.press(key)
        first = page.locator("tbody tr").first
        await expect(first).to_have_class("at")
        task = str(await first.get_attribute("id")).removeprefix("t-")
        await page.keyboard.press("x")
        await expect(page.locator("[data-count]")).to_have_text("1 selected")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(re.compile(f"/console/tasks/{task}$"))
        page = await console.open("/tasks/t-archivist")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator("#detail h2")).to_contain_text("search")
        await page.keyboard.press("u")
        await expect(page).to_have_url(re.compile("/console/tasks$"))
        await page.keyboard.press("?")
        await expect(page.locator("dialog.help")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("/")
        await page.keyboard.type("t-analyst")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(re.compile("/console/tasks/t-analyst$"))
        # The theme stays, and the server writes it, so that no page flashes in the other one.
        await page.keyboard.press("t")
        await page.goto(f"{console.url}/console/tasks")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert 'data-theme="dark"' in await (await page.request.get(f"{console.url}/console/tasks")).text()
        assert console.errors == []


async def test_no_barriers_and_no_overflow_at_any_width(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """axe finds nothing, nothing is wider than the window, and nothing is blocked by the policy."""
    async with (
        browser() as chrome,
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await start_all(trusted)
        await shown(client, "/tasks/t-analyst", "It took down")
        await shown(client, "/people", "Send this newsletter")
        links = (await client.get("/console/tasks")).text
        pages = sorted(set(re.findall(r'href="/console(/[a-z]+)"', links)))
        pages += ["", "/compare?one=t-analyst&other=t-reporter", "/tasks/t-analyst",
                  "/tasks/t-approver", "/tasks/t-reporter", "/tasks/t-hasty?tab=output",
                  "/tasks/t-hasty?tab=events", "/tasks/t-reporter?tab=data", "/tasks/nothing"]  # fmt: skip
        for name, theme in (("wide", "light"), ("tablet", "dark"), ("phone", "light")):
            width, height = WIDTHS[name]
            context = await chrome.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if theme == "dark" else "light"
            )
            console = await tab(context, url_of(fleet))
            for path in pages:
                page = await console.open(path)
                results = await Axe().run(page)
                assert results.violations_count == 0, (path, name, theme, results.generate_report())
                over = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert over <= 0, f"{path} is {over} px wider than {name}"
            assert [each for each in console.errors if "404" not in each] == []
            await context.close()
