"""The console over HTTP: login, forms, rights, tenants, hostile texts, and what each page says."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest

from runtime_core.declare.manifest import Manifest, ToolEntry
from runtime_core.gateway.console.boards import SAMPLE
from runtime_core.gateway.keys import ANSWER, OPERATE, READ, ROLES, SUBMIT
from tests.fleet import Fleet, until
from tests.integration.gateway.consoles import Page, console_fleet, login, page, send, shown
from tests.integration.gateway.gateways import SECONDS, http
from tests.integration.gateway.test_keys import make_key
from tests.servers.process import Server
from weft import Client, SubmitOptions

pytestmark = pytest.mark.timeout(300)
HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'><b onclick='x'>{{ 7*7 }}{% raise %}"
GETS = (
    "", "/tasks", "/tasks/t", "/tasks/t/events", "/people", "/dead", "/dead/1-0", "/schedules", "/agents", "/usage",
    "/compare", "/system", "/find",
)  # fmt: skip
POSTS = (
    ("/tasks", SUBMIT),
    ("/cancel", OPERATE),
    ("/redrive", OPERATE),
    ("/dead", OPERATE),
    ("/compare", READ),
    ("/tools", OPERATE),
    ("/tasks/t/cancel", OPERATE),
    ("/tasks/t/answer", ANSWER),
    ("/tasks/t/send", ANSWER),
    ("/tasks/t/fork", OPERATE),
    ("/tasks/t/replay", OPERATE),
    ("/tasks/t/redrive", OPERATE),
    ("/dead/1-0/redrive", OPERATE),
    ("/dead/1-0/drop", OPERATE),
    ("/schedules", OPERATE),
    ("/schedules/s/run", OPERATE),
    ("/schedules/s/delete", OPERATE),
)


async def key_of(fleet: Fleet, *options: str) -> str:
    return (await make_key(fleet, *options))["Authorization"].removeprefix("Bearer ")


async def test_a_person_logs_in_by_key(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with console_fleet(valkey, namespace, tmp_path, WEFT_HTTP_AUTH="keys") as fleet, http(fleet) as client:
        form = await page(client, "/login")
        wrong = await send(client, "/login", form, {"key": "weft_000000000000_" + "a" * 43})
        assert wrong.status_code == 401
        assert "unknown or was revoked" in wrong.text
        for target in (
            "https://evil.example/",
            "//evil.example",
            "/\\evil.example",
            "/v1/tasks",
            "javascript:alert(1)",
        ):
            async with http(fleet) as other:
                form = await page(other, "/login")
                done = await send(other, "/login", form, {"key": await key_of(fleet), "next": target})
                assert done.headers["location"] == "/console"
        key = await key_of(fleet)
        await login(client, key)
        assert "newsroom" not in (await page(client, "/tasks")).text
        cookies = {cookie.name: cookie for cookie in client.cookies.jar}
        assert cookies["weft_key"].value == key
        out = await send(client, "/logout", await page(client, "/tasks"), {})
        assert "weft_key" in out.headers["set-cookie"]
        assert (await client.get("/console/tasks")).status_code == 303


async def test_cookies_and_headers_are_strict(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with console_fleet(valkey, namespace, tmp_path, WEFT_HTTP_AUTH="keys") as fleet, http(fleet) as client:
        key = await key_of(fleet)
        for proxied, secure in (({}, False), ({"X-Forwarded-Proto": "https"}, True)):
            async with http(fleet) as other:
                form = await page(other, "/login")
                done = await send(other, "/login", form, {"key": key}, **proxied)
                set_cookie = done.headers["set-cookie"]
                assert "HttpOnly" in set_cookie
                assert "SameSite=strict" in set_cookie
                assert ("Secure" in set_cookie) is secure
        await login(client, key)
        for path in ("/tasks", "/tasks/t", "/people", "/login"):
            answer = await client.get(f"/console{path}")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
        # A link on another site comes without the cookies: the page loads once more, and nobody is logged out.
        async with http(fleet) as other:
            again = await other.get("/console/tasks", headers={"Sec-Fetch-Site": "cross-site"})
            assert 'http-equiv="refresh"' in again.text
            assert "set-cookie" not in again.headers


async def test_a_key_opens_pages_and_sends_forms_as_its_roles_say(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with console_fleet(valkey, namespace, tmp_path, WEFT_HTTP_AUTH="keys") as fleet, http(fleet) as nobody:
        for path in GETS:
            assert (await nobody.get(f"/console{path}")).headers["location"].startswith("/console/login"), path
        for path, _ in POSTS:
            assert (await nobody.post(f"/console{path}", data={})).headers["location"].startswith("/console/login")
        for role in ROLES:
            async with http(fleet) as client:
                await login(client, await key_of(fleet, "--role", role))
                opened = await client.get("/console/tasks")
                assert opened.status_code == (200 if role == READ else 403)
                for path, needed in POSTS:
                    answer = await send(client, path, Page(opened.text), {})
                    assert ("lacks the role" in answer.text) is (role != needed), (path, role, answer.text[-500:])


async def test_a_form_needs_its_token_and_its_own_site(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        http(fleet) as other,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await trusted.submit("listener", "x", task_id="listens")
        seen, foreign = await page(client, "/tasks"), await page(other, "/tasks")
        for fields in ({"x": "1"}, {"token": ""}, {"token": foreign.token}, {"token": "é"}):
            assert (await client.post("/console/tasks/listens/cancel", data=fields)).status_code == 403
        crossed = await send(client, "/tasks/listens/cancel", seen, {}, **{"Sec-Fetch-Site": "cross-site"})
        assert crossed.status_code == 403
        media = await client.post("/console/tasks/listens/cancel", json={"token": seen.token})
        assert media.status_code == 415
        for host in ("evil.example", "127.0.0.1.evil.example"):
            assert (await client.get("/console/tasks", headers={"Host": host})).status_code == 421
        await shown(client, "/tasks/listens", "waiting")
        done = await send(client, "/tasks/listens/cancel", seen, {})
        assert done.headers["location"] == "/console/tasks/listens?notice=cancelled"
        assert "Open without keys" in (await shown(client, "/tasks/listens", "cancelled")).text


async def test_tenants_do_not_reach_each_other(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path, WEFT_HTTP_AUTH="keys") as fleet,
        http(fleet) as acme,
        http(fleet) as evil,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await login(acme, await key_of(fleet, "--tenant", "acme"))
        await login(evil, await key_of(fleet, "--tenant", "evil"))
        own, foreign = await page(acme, "/tasks"), await page(evil, "/tasks")
        for agent in ("approver", "analyst"):
            started = await send(acme, "/tasks", own, {"agent": agent, "input": "a secret"})
            assert started.headers["location"].startswith("/console/tasks/acme.")
        failed = started.headers["location"].partition("?")[0].removeprefix("/console")
        await shown(acme, failed, "Redrive")
        asked = await shown(acme, "/people", "Send this newsletter")
        action = next(each["action"] for each in asked.all("form") if each["action"].endswith("/answer"))
        task = action.removesuffix("/answer").removeprefix("/console")
        question = asked.all("input", name="request_id")[0]["value"]
        letter = (await page(acme, failed)).all("input", name="letter")[0]["value"]
        name = task.removeprefix("/tasks/")
        for other in (task, f"/tasks/evil.{name}", f"/tasks/{name.removeprefix('acme.')}", failed):
            for path in ("", "/events"):
                answer = await evil.get(f"/console{other}{path}")
                assert answer.status_code == 404, (other, path)
                assert "a secret" not in answer.text
            forms: tuple[tuple[str, dict[str, str]], ...] = (
                ("cancel", {}),
                ("answer", {"request_id": question, "verdict": "approve"}),
                ("send", {"name": "x", "value": "1"}),
                ("fork", {}),
                ("replay", {}),
                ("redrive", {"letter": letter}),
            )
            for path, fields in forms:
                answer = await send(evil, f"{other}/{path}", foreign, fields)
                assert answer.status_code == 404, (other, path, answer.text[-500:])
                assert "a secret" not in answer.text
        await send(evil, "/cancel", foreign, {"task": [name, f"evil.{name}"]})
        await trusted.schedule("acme.nightly", "reporter", "a secret", every=3600)
        for path in ("redrive", "drop"):
            assert (await send(evil, f"/dead/{letter}/{path}", foreign, {})).status_code == 404
        for path in ("run", "delete"):
            for id in ("acme.nightly", "nightly", "evil.acme.nightly"):
                assert (await send(evil, f"/schedules/{id}/{path}", foreign, {})).status_code == 404
        assert (await evil.get(f"/console/dead/{letter}")).status_code == 404
        assert (await evil.get(f"/console/compare?one={name}&other={name}")).status_code == 404
        # A text finds tasks by the beginning of their ids, of the own tenant only.
        for text in (name[:14], name.removeprefix("acme.")[:9]):
            assert (await evil.get(f"/console/find?q={text}")).json() == []
            assert name not in (await evil.get(f"/console/tasks?q={text}", follow_redirects=True)).text
            assert (await acme.get(f"/console/find?q={text}")).json() == [
                [f"Task {name}, approver", f"/console/tasks/{name}"]
            ]
        for path in ("/agents", "/system", "/system?checks=1"):
            assert (await evil.get(f"/console{path}")).status_code == 403
        await send(evil, "/redrive", foreign, {"task": [failed.removeprefix("/tasks/")]})
        await send(evil, "/dead", foreign, {"letter": [letter], "do": "drop"})
        error = (await page(acme, f"/dead/{letter}")).text
        assert "no JSON for a secret" in error
        crafted = {"error": "ValueError: the exchange returned no JSON for a secret: <html>… Bad Gateway</html>",
                   "all": "1", "do": "drop"}  # fmt: skip
        await send(evil, "/dead", foreign, crafted)
        assert "nightly" in (await page(acme, "/schedules")).text
        assert letter in (await acme.get("/console/dead")).text
        for path in ("", "/tasks", "/people", "/tasks?q=secret", "/tasks?tenant=acme", f"/tasks?q={name}", "/dead",
                     "/schedules", "/usage", "/usage?by=tenant"):  # fmt: skip
            answer = await evil.get(f"/console{path}", follow_redirects=True)
            assert "acme." not in answer.text.replace(name, ""), path
            assert "Send this newsletter" not in answer.text
        assert "waiting" in (await page(acme, task)).text
        done = await send(acme, f"{task}/answer", asked, {"request_id": question, "verdict": "approve"})
        assert done.headers["location"].endswith("notice=approved")
        await shown(acme, task, "completed")


async def test_hostile_texts_stay_texts(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """In inputs, errors, prompts, data, outputs, keys, sessions, tenants, and whatever a URL says."""
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        for agent in ("analyst", "editor", "approver", "reporter", "hasty"):
            await trusted.submit(
                agent, HOSTILE, task_id=agent, key=HOSTILE, session_id=HOSTILE, stream=True,
                options=SubmitOptions(tenant="<i>t</i>", metadata={HOSTILE: HOSTILE}),
            )  # fmt: skip
        await shown(client, "/tasks/analyst", "Failed because of it:")
        await shown(client, "/tasks/reporter", "three paragraphs")
        for agent in ("editor", "approver"):
            await shown(client, f"/tasks/{agent}", "Send the answer" if agent == "editor" else "Deny")
        paths = [f"/tasks/{agent}{tab}" for agent in ("analyst", "editor", "approver", "reporter", "hasty")
                 for tab in ("", "?tab=data", "?tab=output", "?step=r/1", "?step=r/2/1")]  # fmt: skip
        crafted = httpx2.QueryParams(q=HOSTILE, agent=HOSTILE, session=HOSTILE, key=HOSTILE, cursor=HOSTILE)
        letters = (await page(client, "/dead")).all("a", **{"data-open": ""})
        await trusted.schedule("nightly", "reporter", HOSTILE, every=3600)
        paths += ["", "/tasks", "/people", f"/tasks?{crafted}", f"/tasks?{httpx2.QueryParams(notice=HOSTILE)}"]
        paths += ["/dead", letters[0]["href"].removeprefix("/console"), "/schedules", "/agents", "/usage",
                  "/usage?by=tenant", "/compare?one=analyst&other=reporter"]  # fmt: skip
        paths += [f"/dead?{httpx2.QueryParams(error=HOSTILE)}", f"/compare?{httpx2.QueryParams(one=HOSTILE)}"]
        for path in paths:
            found = await page(client, path)
            scripts = found.all("script")
            assert [each["src"].partition("?")[0] for each in scripts] == [
                "/console/static/connection.js", "/console/static/console.js",
            ], path  # fmt: skip
            assert not found.all("img"), path
            assert not found.all("i", **{}) or all(each.get("class") for each in found.all("i")), path
            handlers = [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
            assert handlers == [], path
            assert not [each for _, each in found.elements if "style" in each], path
            assert "49" not in found.text.split("{{ 7*7 }}")[0][-3:]
        assert "alert(1)" in (await page(client, "/tasks/analyst")).text
        for path in ("/tasks/%3Cscript%3E", "/tasks/..%2f..", "/static/..%2fsite.py", "/static/nothing.js"):
            answer = await client.get(f"/console{path}")
            assert answer.status_code == 404
            assert "<script>" not in answer.text


async def test_a_person_searches_answers_and_forks(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        for agent in ("editor", "approver", "listener", "analyst", "archivist"):
            await trusted.submit(agent, 3 if agent == "archivist" else "some text", task_id=f"t-{agent}")
        assert (await client.get("/console", follow_redirects=True)).status_code == 200
        failed = await shown(client, "/tasks?status=failed", "t-analyst")
        assert "t-editor" not in failed.text
        assert "t-listener" in (await page(client, "/tasks?agent=listener&age=1h")).text
        assert "No task matches" in (await page(client, "/tasks?agent=nobody")).text
        assert (await client.get("/console/tasks?q=t-editor")).headers["location"] == "/console/tasks/t-editor"
        assert "t-editor" in (await page(client, "/tasks?q=SOME+TEXT")).text
        # The first characters of an id find it: 6, since fewer are found in many texts.
        assert "t-editor" in (await page(client, "/tasks?q=t-edit")).text
        assert "t-editor" not in (await page(client, "/tasks?q=t-edi")).text
        generated = (await trusted.submit("listener", "x")).task_id
        opened = await client.get(f"/console/tasks?q={generated[:6]}")
        assert opened.headers["location"] == f"/console/tasks/{generated}"
        assert (await client.get("/console/find?q=t-edit")).json() == [
            ["Task t-editor, editor", "/console/tasks/t-editor"]
        ]
        assert (await client.get("/console/find?q=archiv")).json() == [
            ["Agent archivist: its tasks", "/console/tasks?agent=archivist"]
        ]
        assert (await client.get("/console/find")).json() == []
        assert "is not a cursor" in (await page(client, "/tasks?cursor=x")).text

        why = await shown(client, "/tasks/t-analyst", "Failed because of it: agent pricing, then agent analyst.")
        assert "Failed in tool fetch_quotes, after 3 attempts" in why.text
        assert "parse_quotes" in why.text
        assert "sleep, ends in 7" in (await shown(client, "/tasks/t-archivist", "sleep")).text

        editor = await shown(client, "/tasks/t-editor", "or what is missing?")
        request = editor.all("input", name="request_id")[0]["value"]
        assert (
            await send(client, "/tasks/t-editor/answer", editor, {"request_id": "x", "value": "1"})
        ).status_code == 409
        await send(client, "/tasks/t-editor/answer", editor, {"request_id": request, "value": "go"})
        # Two people answered. The second one learns who was first; the question stays the name of its step.
        await shown(client, "/tasks/t-editor", "go: some text")
        # The steps of an ended task come from the store, which may be a moment behind.
        await shown(client, "/tasks/t-editor", "Publish “some text”, or what is missing?")
        late = await send(client, "/tasks/t-editor/answer", editor, {"request_id": request, "value": "stop"})
        assert late.status_code == 409
        assert "This question was already answered" in late.text
        assert re.search(r"The answer was go, at 20..-..-.. ..:..:.. UTC\. Yours was not used\.", late.text)
        assert Page(late.text).all("a", href="/console/tasks/t-editor", **{"class": "button"})
        gone = await send(client, "/tasks/t-editor/cancel", editor, {})
        ended = await page(client, gone.headers["location"].removeprefix("/console"))
        assert "The task had already completed." in ended.text
        assert "The task was cancelled." not in ended.text

        approver = await shown(client, "/tasks/t-approver", "Deny")
        request = approver.all("input", name="request_id")[0]["value"]
        before = approver.all("input", name="before")[0]["value"]
        fields = {
            "request_id": request,
            "verdict": "approve",
            "before": before,
            "text.": "other text",
            "reason": "shorter",
        }
        edited = await send(client, "/tasks/t-approver/answer", approver, fields)
        assert edited.headers["location"].endswith("notice=edited")
        assert "other text" in (await shown(client, "/tasks/t-approver", "completed")).text

        await send(client, "/tasks/t-listener/send", approver, {"name": "breaking-news", "value": '{"a": 1}'})
        await shown(client, "/tasks/t-listener", "completed")
        late = await send(client, "/tasks/t-listener/send", approver, {"name": "breaking-news", "value": "1"})
        assert late.status_code == 409

        forked = await send(client, "/tasks/t-analyst/fork", approver,
                            {"at": "2/1", "replace": "1", "input": '{"ACME": 2.0}'})  # fmt: skip
        fork = forked.headers["location"].removeprefix("/console").partition("?")[0]
        await shown(client, fork, "completed")
        assert "fork of t-analyst" in " ".join((await shown(client, fork, "fork of")).text.split())  # from the record

        letter = (await page(client, "/tasks/t-analyst")).all("input", name="letter")[0]["value"]
        redriven = await send(client, "/tasks/t-analyst/redrive", approver, {"letter": letter})
        assert redriven.headers["location"].endswith("notice=redriven")

        many = await send(client, "/cancel", approver,
                          {"task": ["t-archivist", "unknown"], "back": "/console/tasks?status=waiting"})  # fmt: skip
        assert many.headers["location"] == "/console/tasks?status=waiting&notice=cancelled-many&done=1&left=1"
        await shown(client, "/tasks/t-archivist", "cancelled")


async def test_a_person_sees_sums_and_acts_on_letters_and_schedules(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        for agent in ("analyst", "reporter", "editor", "listener"):
            await trusted.submit(agent, "ACME", task_id=f"t-{agent}")
        await trusted.schedule("nightly", "reporter", "news", every=3600)
        await shown(client, "/tasks/t-analyst", "Failed because of it:")
        board = await shown(client, "", "waits: message breaking-news")
        assert "the exchange returned no JSON for ACME" in board.text
        assert "reporter" in (await shown(client, "/usage", "4,400")).text
        assert "gpt-5-mini" in (await page(client, "/usage?by=model&days=1")).text
        assert "4.4 k" in (await page(client, "?cost=1")).text or "4,400" in (await page(client, "?cost=1")).text
        agents = await page(client, "/agents")
        assert "Search the archive." in agents.text
        assert "1 running handler" in agents.text
        assert agents.all("input", name="whole.", type="number")
        wrong = await send(client, "/tasks", agents, {"agent": "archivist", "whole.": "three"})
        assert wrong.status_code == 422
        assert "is not a whole number" in wrong.text
        named = await send(client, "/tasks", agents, {"agent": "listener", "text.": "42"})
        assert "42" in (await shown(client, named.headers["location"].partition("?")[0].removeprefix("/console")
                                    + "?tab=data", '42')).text  # fmt: skip
        system = await shown(client, "/system?checks=1", "every open run has an event or timer that continues it")
        for words in ("{0}:agent", "agent-handler", "trajectory-recorder", "admit", "all passed"):
            assert words in system.text
        assert not (await page(client, "/system")).all("li", **{"class": "fine"}), "the checks come after the page"
        differs = await page(client, "/compare?one=t-analyst&other=t-reporter")
        assert "First difference: agent analyst, step r (name" in differs.text

        listed = await page(client, "/tasks")
        for picked, target in (
            (["t-reporter", "t-analyst"], "/console/compare?one=t-analyst&other=t-reporter"),
            (["t-reporter"], "/console/tasks?notice=two"),
        ):
            compared = await send(client, "/compare", listed, {"task": picked, "back": "/console/tasks"})
            assert compared.headers["location"] == target

        # What is stuck stays on the overview, however many tasks came after it.
        bus = trusted.buses[0]
        for number in range(SAMPLE + 1):
            header = f"agent\nreporter\n\n\n{9_000_000_000_000 + number}"
            await bus.transport.call("HSET", bus.keys.task(f"n-{number}"), "status", "completed", "h", header)
            await bus.transport.call("ZADD", bus.keys.index, 9_000_000_000_000 + number, f"n-{number}")
        assert "waits: message breaking-news" in (await page(client, "")).text

        dead = await page(client, "/dead")
        letter = dead.all("a", **{"data-open": ""})[0]["href"].removeprefix("/console")
        detail = await page(client, letter)
        assert "parse_quotes" in detail.text
        before = detail.all("input", name="before")[0]["value"]
        broken = await send(client, f"{letter}/redrive", detail, {"before": before, "json.": '{"symbol": "OTHER"'})
        assert broken.status_code == 422
        assert "is not JSON" in broken.text
        data = {"before": before, "json.": '{"symbol": "OTHER"}'}
        redriven = await send(client, f"{letter}/redrive", detail, data)
        assert redriven.headers["location"] == "/console/tasks/t-analyst?notice=redriven"
        again = (
            (await shown(client, "/dead", "no JSON for OTHER"))
            .all("a", **{"data-open": ""})[0]["href"]
            .removeprefix("/console")
        )
        assert (await send(client, f"{again}/drop", detail, {})).headers["location"].endswith("notice=dropped")
        assert (await send(client, f"{again}/drop", detail, {})).status_code == 404

        # Many at once: those of selected tasks, of selected letters, and of an error.
        for number in range(3):
            await trusted.submit("analyst", "ACME", task_id=f"many-{number}")
        for number in range(3):
            await shown(client, f"/tasks/many-{number}", "Failed because of it:")
        many = await send(client, "/redrive", dead, {"task": ["many-0", "t-editor", "unknown"], "back": "/console"})
        assert many.headers["location"] == "/console?notice=redriven-of-many&done=1&left=2"
        nothing = await send(client, "/redrive", dead, {"task": ["t-editor"], "back": "/console"})
        assert nothing.headers["location"] == "/console?notice=redriven-of-many&done=0&left=1"
        error = "ValueError: the exchange returned no JSON for ACME: <html>… Bad Gateway</html>"

        async def letters() -> list[str]:
            found = await page(client, f"/dead?{httpx2.QueryParams(error=error)}")
            return [each["value"] for each in found.all("input", name="letter")]

        async def all_back() -> bool:
            return len(await letters()) == 3

        await until(all_back, SECONDS, "the letter of the redriven task")
        first, *others = await letters()
        done = await send(client, "/dead", dead, {"letter": [first, "1-0"], "do": "drop"})
        assert done.headers["location"] == "/console/dead?notice=dropped-many&done=1&left=1"
        assert await letters() == others
        await send(client, "/dead", dead, {"error": error, "all": "1", "do": "drop"})
        assert await letters() == []

        # A schedule is made by a form, in the three ways of the API.
        for when, time, words in (
            ("every", "90", "every 1 min 30 s"), ("cron", "0 9 * * 1", "0 9 * * 1 Europe/Zurich"),
            ("at", "2099-01-31T09:00:00Z", "once"),
        ):  # fmt: skip
            fields = {"id": "made", "agent": "reporter", "when": when, "time": time, "input": "made news"}
            made = await send(client, "/schedules", detail, {**fields, "timezone": "Europe/Zurich"})
            assert made.headers["location"] == "/console/schedules?notice=scheduled", made.text
            assert words in " ".join((await page(client, "/schedules")).text.split())
        [kept] = [each for each in await trusted.schedules() if each.schedule_id == "made"]
        assert kept.describe()["input"] == "made news"
        for when, time in (("every", "soon"), ("cron", "9"), ("at", "tomorrow")):
            wrong = await send(client, "/schedules", detail, {**fields, "when": when, "time": time})
            assert wrong.status_code == 422, (when, wrong.text)
        await send(client, "/schedules/made/delete", detail, {})

        ran = await send(client, "/schedules/nightly/run", detail, {})
        await shown(client, ran.headers["location"].removeprefix("/console"), "completed")
        await send(client, "/schedules/nightly/delete", detail, {})
        assert "No schedules" in (await page(client, "/schedules")).text


async def test_the_events_of_a_task_are_streamed(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        console_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        Client.connect(valkey.url, namespace=namespace) as trusted,
    ):
        await trusted.submit("hasty", "a poem", task_id="poem", stream=True)
        types: list[str] = []

        async def ended() -> bool:
            async with client.stream("GET", "/console/tasks/poem/events") as response:
                types[:] = [line async for line in response.aiter_lines() if line.startswith("event: ")]
            return bool(types) and types[-1] == "event: weft.task.completed"

        await until(ended, SECONDS, "the end of the stream")
        assert types.count("event: weft.output.delta") == 3


async def test_a_person_calls_a_tool_under_the_hooks_of_its_app(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """An agent of the app makes the call, so its guards deny and ask. It takes the role `operate`, by any way."""
    async with (
        console_fleet(valkey, namespace, tmp_path, "tests.apps.tool_app:app", WEFT_HTTP_AUTH="keys") as fleet,
        http(fleet) as client,
        http(fleet) as other,
    ):
        await login(client, await key_of(fleet))
        tools = await shown(client, "/agents", "Erase a file.")
        assert len(tools.all("form", action="/console/tools")) == 2

        async def call(path: str) -> str:
            fields = {"app": "shed", "tool": "erase", "text.path": path, "whole?.times": "2"}
            answer = await send(client, "/tools", tools, fields)
            assert answer.status_code == 303, answer.text
            return answer.headers["location"].removeprefix("/console").partition("?")[0]

        await shown(client, await call("/tmp/a"), "erased /tmp/a 2 times")
        await shown(client, await call("/home/a"), "only files under /tmp/ may be erased")
        kept = await shown(client, await call("/tmp/keep"), "Erase /tmp/keep?")
        assert "erased" not in kept.text
        without = await send(client, "/tools", tools, {"app": "shed", "tool": "tidy"})
        await shown(client, without.headers["location"].removeprefix("/console"), "completed")
        wrong = await send(client, "/tools", tools, {"app": "shed", "tool": "erase", "input": "[]"})
        assert (wrong.status_code, "is not a JSON object" in wrong.text) == (422, True)

        # The tools of an MCP server are in a separate manifest; an agent of the app calls them, too.
        async with Client.connect(valkey.url, namespace=namespace) as program:
            bus = program.buses[0]
            files = Manifest("shed/mcp/files", "0", tools={"files.read": ToolEntry()}).to_json()
            await bus.transport.call("HSET", bus.keys.manifests, "shed/mcp/files", files)
        served = await shown(client, "/agents", "files.read")
        assert served.all("input", name="tool", value="files.read")
        assert len(served.all("input", name="app", value="shed")) == 3

        key = await key_of(fleet, "--role", SUBMIT, "--role", READ)
        body = {"agent": "weft.tool.shed", "input": {"tool": "tidy", "arguments": {}}}
        refused = await other.post("/v1/tasks", json=body, headers={"Authorization": f"Bearer {key}"})
        assert (refused.status_code, refused.json()["field"]) == (422, "agent")
        assert "takes the role operate" in refused.json()["detail"]
        await login(other, key)
        assert not (await page(other, "/agents")).all("form", action="/console/tools")
        assert (
            await send(other, "/tools", await page(other, "/tasks"), {"app": "shed", "tool": "tidy"})
        ).status_code == 403
