"""The console in Chromium: live pages, keys, the palette, themes, a phone, screen readers."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Dialog, Page, Route, async_playwright, expect

from tests.integration.gateway.consoles import console_fleet, shown
from tests.integration.gateway.gateways import http, url_of
from tests.servers.matrix import is_full
from tests.servers.process import Server
from weft import Client

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
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


async def answered(page: Page, button: str) -> str:
    """Press a button, agree, and return what it has asked."""
    said: list[str] = []

    async def agree(dialog: Dialog) -> None:
        said.append(dialog.message)
        await dialog.accept()

    page.once("dialog", agree)
    await page.click(button)
    return "".join(said)


async def start_all(trusted: Client, prefix: str) -> None:
    """Start tasks that complete, fail, wait and take long."""
    for agent in ("reporter", "analyst", "editor", "approver", "listener", "hasty"):
        await trusted.submit(agent, "ACME", task_id=f"{prefix}-{agent}", session_id=prefix, stream=True)
    await trusted.submit("archivist", 3, task_id=f"{prefix}-archivist", session_id=prefix)


@dataclass(frozen=True)
class Desk:
    """The console with a browser, for all tests of this module. Each has tasks of its own, in a session."""

    chrome: Browser
    url: str
    client: httpx2.AsyncClient
    trusted: Client

    @asynccontextmanager
    async def opened(self, prefix: str, **options: Any) -> AsyncIterator[Console]:  # Any: of Playwright's context
        """Start tasks, and yield a tab."""
        await start_all(self.trusted, prefix)
        await shown(self.client, f"/tasks/{prefix}-analyst", "Failed because of it:")
        context = await self.chrome.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        try:
            yield await tab(context, self.url)
        finally:
            await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(valkey: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    namespace = f"w{secrets.token_hex(4)}"
    links = {
        "WEFT_HTTP_TRACE_URL": "http://127.0.0.1/trace/{trace_id}",
        "WEFT_HTTP_LOG_URL": "http://127.0.0.1/{task_id}",
    }
    async with (
        browser() as chrome,
        console_fleet(valkey, namespace, tmp_path_factory.mktemp("desk"), **links) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        yield Desk(chrome, url_of(fleet), client, trusted)


async def test_a_person_works_with_tasks(desk: Desk) -> None:
    async with desk.opened("works") as console:
        page = await console.open("/tasks?session=works")
        # A row changes where it is. A new one waits until it is asked for.
        row = page.locator("#t-works-listener")
        await expect(row.locator(".status")).to_have_text("waiting")
        before = await page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.id)")
        await desk.trusted.submit("reporter", "later", task_id="works-later", session_id="works")
        listener = await desk.trusted.task("works-listener")
        await listener.send("breaking-news", "now")
        await expect(row.locator(".status")).to_have_text("completed")
        await expect(page.locator(".fresh")).to_have_text("1 new task")
        assert await page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.id)") == before
        await page.click(".fresh")
        await expect(page.locator("#t-works-later")).to_be_visible()
        # Filters are in the URL, and have names where a person gave them one.
        await page.click(".tabs >> text=Failed")
        await expect(page).to_have_url(re.compile(r"\?status=failed&session=works$"))
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.fill("[data-views] input", "broken <b>")
        await page.click("[data-views] button:has-text('Save')")
        await expect(page.locator("[data-said]")).to_have_text("Saved the view “broken <b>”.")
        page = await console.open("/tasks")
        await page.click("[data-views] a")
        await expect(page).to_have_url(re.compile(r"\?status=failed&session=works$"))
        await expect(page.locator("[data-views] a[aria-current]")).to_have_text("broken <b>")
        await page.click("[data-views] li button")
        await expect(page.locator("[data-views] li")).to_have_count(0)
        # Select and redrive; select and cancel.
        await page.check("#t-works-analyst input")
        await page.click("text=Redrive selected")
        await expect(page.locator(".notice")).to_have_text("1 dead letter was redriven.")
        page = await console.open("/tasks?session=works")
        await page.check("#t-works-archivist input")
        await expect(page.locator("[data-count]")).to_have_text("1 selected")
        asked = await answered(page, "text=Cancel selected")
        assert asked == "Cancel 1 selected task?"
        await expect(page.locator(".notice")).to_have_text("1 task was cancelled.")
        await expect(page.locator("#t-works-archivist .status")).to_have_text("cancelled")
        assert console.errors == []


async def test_a_person_explains_answers_and_follows(desk: Desk) -> None:
    async with desk.opened("explains") as console:
        page = await console.open("/tasks/explains-analyst")
        await expect(page.locator(".failure h2")).to_contain_text("Failed in tool fetch_quotes, after 3 attempts")
        await expect(page.locator("#detail h2")).to_contain_text("fetch_quotes")
        await page.click(".step:has-text('search')")
        await expect(page.locator("#detail")).to_contain_text('"query": "ACME"')
        await expect(page).to_have_url(re.compile(r"step=r/1$"))
        await expect(page.locator("rect.b-failed").first).to_be_visible()
        trace = await page.get_attribute("a:has-text('trace')", "href")
        assert re.fullmatch(r"http://127\.0\.0\.1/trace/[0-9a-f]{32}", str(trace))
        assert await page.get_attribute("a:has-text('logs')", "href") == "http://127.0.0.1/explains-analyst"
        # The output of an attempt that was superseded is struck.
        page = await console.open("/tasks/explains-hasty?tab=output")
        await expect(page.locator(".output del")).to_have_text("draft 1 of ACME ")
        await expect(page.locator(".output span")).to_have_text("draft 2 of ACME ")
        page = await console.open("/tasks/explains-hasty?tab=events")
        await expect(page.locator(".events li")).to_have_count(4)
        # A question is answered, and the page follows the task to its end.
        page = await console.open("/tasks/explains-approver")
        await expect(page.locator("button[value=approve]")).to_have_text("Approve")
        await page.fill("textarea[data-edits]", "edited")
        await page.click("text=Approve as edited")
        await expect(page.locator(".notice")).to_have_text("Approved, as edited.")
        await expect(page).to_have_url(re.compile(r"/explains-approver$"))
        await expect(page.locator(".status").first).to_have_text("completed")
        page = await console.open("/people")
        card = page.locator(".card", has_text="explains-editor")
        await card.locator("textarea[name=value]").fill("go ahead")
        await card.locator("text=Send the answer").click()
        await expect(page.locator(".notice")).to_have_text("The answer was sent.")
        await expect(card).to_have_count(0)
        # An edited result starts a fork; a dead letter runs again with other data.
        page = await console.open("/tasks/explains-analyst?step=r/2/1")
        await page.click("summary:has-text('Fork from this step')")
        await page.fill("#detail textarea", '{"ACME": 2}')
        await page.click("text=Continue with this result")
        await expect(page.locator(".notice")).to_have_text("The fork has started.")
        await expect(page.locator("#title .status")).to_have_text("completed")
        # The code follows the record of a task that failed.
        page = await console.open("/tasks/explains-analyst")
        await page.click("button:has-text('Replay')")
        await expect(page.locator(".notice")).to_contain_text("The code follows the record")
        assert (await Axe().run(page)).violations_count == 0
        await page.click(".crumbs a:has-text('explains-analyst')")
        await page.click("summary:has-text('Redrive')")
        await page.click("text=Edit its data first")
        await page.fill("textarea[data-edits]", '{"symbol": "OTHER"')
        await page.click("text=Redrive with the edited data")
        await expect(page.locator(".problem")).to_contain_text("is not JSON")
        assert len(console.errors) == 1, "the browser itself says that the answer was 422"
        console.errors.clear()
        await page.click("text=Back")
        await expect(page.locator("textarea[data-edits]")).to_have_value('{"symbol": "OTHER"')
        await page.fill("textarea[data-edits]", '{"symbol": "OTHER"}')
        await page.click("text=Redrive with the edited data")
        await expect(page.locator(".notice")).to_have_text("It was redriven, and runs again.")
        assert console.errors == []


async def test_a_person_opens_the_system_page_and_tries_an_agent(desk: Desk) -> None:
    async with desk.opened("system") as console:
        page = await console.open("/system")
        await expect(page.locator("#checks .status")).to_have_text("all passed")
        await expect(page.locator("#streams")).to_contain_text("{0}:tool")
        await expect(page.locator("#streams")).to_contain_text("admit")
        page = await console.open("")
        await expect(page.locator("#cost b")).to_contain_text("tokens")
        page = await console.open("/agents")
        card = page.locator(".card", has_text="Sleep for days between two searches.")
        await expect(card.locator(".badge")).to_have_text("1 running handler")
        await card.locator("summary:has-text('Try it')").click()
        await card.locator("input[type=number]").fill("2")
        await card.locator("text=Start").click()
        await expect(page.locator(".notice")).to_have_text("The task has started.")
        await expect(page.locator("#why")).to_contain_text("sleep")
        await page.click("summary:has-text('Copy as')")
        await expect(page.locator(".sheet", has_text="weft submit archivist 2")).to_be_visible()
        page = await console.open("/dead")
        await page.click(".groups a")
        assert await answered(page, "text=Drop all") == "Drop all 2 dead letters with this error for good?"
        await expect(page.locator(".notice")).to_have_text("2 dead letters were dropped.")
        assert console.errors == []


async def test_keys_alone_are_enough(desk: Desk) -> None:
    async with desk.opened("keys", color_scheme="light") as console:
        page = await console.open("/people")
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        await expect(page).to_have_url(re.compile("/console/tasks$"))
        page = await console.open("/tasks?status=waiting&session=keys")
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
        await shown(desk.client, "/tasks/keys-archivist", "search")
        page = await console.open("/tasks/keys-archivist")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator("#detail h2")).to_contain_text("search")
        await page.keyboard.press("u")
        await expect(page).to_have_url(re.compile("/console/tasks$"))
        await page.keyboard.press("?")
        await expect(page.locator("dialog.help")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("/")
        await page.keyboard.type("keys-ana")
        await expect(page.locator("dialog.palette a.at")).to_have_text("Task keys-analyst, analyst")
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(re.compile("/console/tasks/keys-analyst$"))
        # The palette also has the agents, and the actions of the page.
        await page.keyboard.press("/")
        await page.keyboard.type("hasty")
        await expect(page.locator("dialog.palette a.at")).to_have_text("Agent hasty: its tasks")
        await page.locator("dialog.palette").evaluate("box => { box.close(); document.activeElement.blur(); }")
        await page.keyboard.press("/")
        await expect(page.locator("dialog.palette")).to_be_visible()
        await page.keyboard.type("run again")
        await page.keyboard.press("Enter")
        await expect(page.locator("text=Run again with this input")).to_be_visible()
        await page.keyboard.press("Escape")
        # The theme stays, and the server writes it, so that no page flashes in the other one.
        await page.keyboard.press("t")
        await page.goto(f"{console.url}/console/tasks")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert 'data-theme="dark"' in await (await page.request.get(f"{console.url}/console/tasks")).text()
        assert console.errors == []


@pytest.mark.parametrize("late", ["", "?step=r"])
async def test_the_step_that_was_chosen_last_is_shown(desk: Desk, late: str) -> None:
    """Also if the page itself, or the step before it, is answered later."""
    async with desk.opened("order") as console:
        await shown(desk.client, "/tasks/order-archivist", "search")
        page = await console.open("/tasks/order-archivist")
        held, released = asyncio.Event(), asyncio.Event()

        async def hold(route: Route) -> None:
            held.set()
            await released.wait()
            await route.continue_()

        late = page.url + late
        await page.route(lambda url: url == late, hold, times=1)
        if late != page.url:
            await page.keyboard.press("j")
        async with asyncio.timeout(PATIENCE / 1000):
            await held.wait()
        if late == page.url:
            await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator("#detail h2")).to_contain_text("search")
        await page.evaluate("""() => {
            const detail = document.querySelector("#detail"), title = () => detail.querySelector("h2").innerText;
            const all = { childList: true, subtree: true, characterData: true };
            window.titles = [title()];
            new MutationObserver(() => titles.push(title())).observe(detail, all);
        }""")
        async with page.expect_event("requestfinished", lambda request: request.url == late):
            released.set()
        # The page follows the task: it asks for the step that it shows.
        async with page.expect_request(lambda request: "step=" in request.url) as asked:
            pass
        assert (await asked.value).url.endswith("?step=r/1")
        assert [title for title in await page.evaluate("titles") if "search" not in title] == []
        assert console.errors == []


async def test_no_barriers_and_no_overflow_at_any_width(desk: Desk) -> None:
    """axe finds nothing, nothing is wider than the window, and nothing is blocked by the policy."""
    async with desk.opened("axe"):
        await shown(desk.client, "/tasks/axe-approver", "Send this newsletter")
        links = (await desk.client.get("/console/tasks")).text
        pages = sorted(set(re.findall(r'href="/console(/[a-z]+)"', links)))
        letter = re.findall(r'href="/console(/dead/[^"]+)"', (await desk.client.get("/console/dead")).text)[0]
        pages += ["", "/compare?one=axe-analyst&other=axe-reporter", "/tasks/axe-analyst", "/tasks?status=failed",
                  "/tasks/axe-approver", "/tasks/axe-reporter", "/tasks/axe-hasty?tab=output", "/system?checks=1",
                  "/tasks/axe-hasty?tab=events", "/tasks/axe-reporter?tab=data", "/tasks/nothing", letter]  # fmt: skip
        # In the matrix, axe looks at each page in each of these windows; else in one of them, in turn.
        windows = (("wide", "light"), ("tablet", "dark"), ("phone", "light"))
        for number, (name, theme) in enumerate(windows):
            width, height = WIDTHS[name]
            context = await desk.chrome.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if theme == "dark" else "light"
            )
            console = await tab(context, desk.url)
            for path in pages if is_full() else pages[number :: len(windows)]:
                page = await console.open(path)
                await page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
                results = await Axe().run(page)
                assert results.violations_count == 0, (path, name, theme, results.generate_report())
                for other, (across, down) in WIDTHS.items():
                    await page.set_viewport_size({"width": across, "height": down})
                    over = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    assert over <= 0, f"{path} is {over} px wider than {other}"
                await page.set_viewport_size({"width": width, "height": height})
            assert [each for each in console.errors if "404" not in each] == []
            await context.close()


async def test_a_page_says_that_the_gateway_is_gone_and_keeps_its_forms(desk: Desk) -> None:
    async with desk.opened("gone") as console:
        page = await console.open("/tasks/gone-listener")
        line, opened = page.locator("[data-lost]"), page.locator("[data-since]").first
        await expect(page.locator("#why")).to_contain_text("message breaking-news")
        await page.fill("[name=value]", "a long message")
        await page.route("**/*", lambda route: route.abort())
        await expect(line).to_have_text(re.compile(r"^No connection to the gateway since .+; trying again\.$"))
        assert await line.get_attribute("role") == "status"
        # The clock stands still, and a form that cannot be sent stays as it is.
        frozen = await opened.text_content()
        await page.click("#send button")
        await expect(line).to_contain_text("Nothing was sent.")
        await page.wait_for_event("requestfailed")  # it tries again
        assert await opened.text_content() == frozen
        assert await page.input_value("[name=value]") == "a long message"
        await page.unroute("**/*")
        await expect(line).to_be_empty()
        await page.click("#send button")
        await expect(page.locator(".notice")).to_have_text("The message was sent.")
        assert {each for each in console.errors if "ERR_FAILED" not in each} == set()
        # A gateway behind a proxy that answers with an error is as good as gone.
        await console.open("/people")
        await page.route("**/people", lambda route: route.fulfill(status=502))
        await expect(line).to_have_text(re.compile(r"^The gateway answers 502 since .+; trying again\.$"))


async def test_narrow_tables_keep_what_people_sort_by(desk: Desk) -> None:
    """A tablet and a phone show why a task failed or waits, and select tasks."""
    async with desk.opened("narrow") as console:
        await desk.trusted.schedule("narrow", "reporter", "news", every=3600)
        page = console.page
        for name in ("tablet", "phone"):
            width, height = WIDTHS[name]
            await page.set_viewport_size({"width": width, "height": height})
            await console.open("/tasks?session=narrow")
            await expect(page.locator("#t-narrow-analyst .why")).to_contain_text("ValueError: the exchange")
            await expect(page.locator("#t-narrow-analyst .why")).to_be_visible()
            await page.check("#t-narrow-analyst input")
            await page.check("#t-narrow-reporter input")
            await expect(page.locator("text=Redrive selected")).to_be_in_viewport()
            box = await page.locator(".tabs a:has-text('Failed')").bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= width
            await page.click("text=Compare two")
            await expect(page.locator("h1")).to_have_text("Two tasks side by side")
            await console.open("/dead")
            await expect(page.locator("tbody .why").first).to_be_visible()
            await console.open("/schedules")
            await expect(page.locator("#s-narrow .next time")).to_be_visible()
        assert console.errors == []
