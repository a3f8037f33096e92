"""Forks, trajectories, usage, dead letters and schedules over HTTP, with the gateway's own user of the broker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, find_users, lacking, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.gateway.requests import LINES
from tests.conftest import OwnServer
from tests.fleet import until
from tests.integration.gateway.gateways import (
    DOCUMENT,
    REGISTRY,
    SECONDS,
    absolute,
    ended,
    gateway_fleet,
    http,
    problem,
)
from tests.servers.process import HOST
from tests.service_forks import SOURCES

pytestmark = pytest.mark.timeout(300)
WRONG_CALL: dict[str, object] = {"agent": "use", "input": {"tool": "slow", "arguments": {"seconds": "soon"}}}


@asynccontextmanager
async def gateway(own_server: OwnServer, folder: Path, **environ: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Start services that all have the operator's rights, and a gateway that has its own."""
    target = Target(lacks=lacking("valkey-9"), partitions=2)
    lines = [
        user_line(user, target, [hashlib.sha256(user.name.encode()).hexdigest()]) for user in find_users(USERS, [])
    ]
    file = folder / "users.acl"
    file.write_text("\n".join([*lines, DEFAULT_OFF, ""]))
    server = own_server("valkey-9", append=None, options=("--aclfile", str(file)))
    admin, own = (f"redis://{name}:{name}@{HOST}:{server.port}" for name in ("admin", "gateway"))
    urls = {"gateway": own, **dict.fromkeys(("agent-handler", "tool-handler", "state-manager"), admin)}
    async with (
        gateway_fleet(
            server, "weft", folder, recorder=True, urls={**urls, "trajectory-recorder": admin},
            environ={"WEFT_PARTITIONS": "2", **environ},
        ) as fleet,
        http(fleet) as client,
    ):  # fmt: skip
        yield client
        assert "NOPERM" not in fleet.members["gateway-1"].text()


async def run(client: httpx2.AsyncClient, body: dict[str, object], **more: object) -> dict[str, Any]:
    """Submit a task, and return it when it has ended."""
    started = await client.post("/v1/tasks", json={**body, **more})
    assert started.status_code == 202, started.text
    return await ended(client, started.json()["task_id"])


async def found(client: httpx2.AsyncClient, path: str, **params: str) -> Any:  # Any: JSON
    """Wait until a GET finds something, and return it."""
    answers: list[httpx2.Response] = []

    async def there() -> bool:
        answers.append(await client.get(path, params=params))
        return answers[-1].status_code == 200

    await until(there, SECONDS, path)
    return answers[-1].json()


async def recorded(client: httpx2.AsyncClient, task: str) -> dict[str, Any]:
    """Wait until all steps of a task are recorded, and return them as a tree."""
    tree: dict[str, Any] = {}

    async def complete() -> bool:
        answer = await client.get(f"/v1/tasks/{task}/trajectory")
        tree.update(answer.json() if answer.status_code == 200 else {})
        return bool(tree.get("complete"))

    await until(complete, SECONDS, f"the trajectory of {task}")
    return tree


async def test_dead_letters_are_listed_grouped_edited_and_dropped(own_server: OwnServer, tmp_path: Path) -> None:
    async with gateway(own_server, tmp_path) as client:
        for n in range(5):
            assert (await run(client, WRONG_CALL, task_id=f"wrong-{n}"))["status"] == "failed"
        pages: list[list[str]] = []
        cursor: str | None = ""
        while cursor is not None:
            params = {"limit": "2", "name": "slow", **({"cursor": cursor} if cursor else {})}
            page = (await client.get("/v1/dead-letters", params=params)).json()
            pages.append([row["task_id"] for row in page["dead_letters"]])
            cursor = page["next_cursor"]
            await run(client, WRONG_CALL, task_id=f"later-{len(pages)}")
        listed = [task for page in pages for task in page]
        assert listed == [f"wrong-{n}" for n in (4, 3, 2, 1, 0)], "a letter that comes between moves no other one"
        (group,) = (await client.get("/v1/dead-letter-groups", params={"name": "slow"})).json()["groups"]
        assert group["count"] == 5 + len(pages)
        unknown = await client.get("/v1/dead-letters", params={"reason": "attempts"})
        assert problem(unknown) == (400, "parameter", "reason")
        same = await client.get("/v1/dead-letters", params={"error": group["error"], "name": "slow", "limit": "500"})
        assert len(same.json()["dead_letters"]) == group["count"]
        (row,) = (await client.get("/v1/dead-letters", params={"task_id": "wrong-0", "name": "slow"})).json()[
            "dead_letters"
        ]
        shown = (await client.get(f"/v1/dead-letters/{row['letter_id']}")).json()
        assert shown["data"] == {"seconds": "soon"}
        path = f"/v1/dead-letters/{row['letter_id']}/redrive"
        assert problem(await client.post(path, json={})) == (409, "conflict", "letter_id")
        assert problem(await client.post(path, json={"reopen": "yes"})) == (422, "field", "reopen")
        for data, field in (({}, "data.seconds"), ({"seconds": "later"}, "data.seconds"), ([], "data")):
            unfit = await client.post(path, json={"reopen": True, "data": data})
            assert problem(unfit) == (422, "field", field), unfit.text
        assert (await client.get(f"/v1/dead-letters/{row['letter_id']}")).json()["data"] == shown["data"]
        again = await client.post(path, json={"reopen": True, "data": {"seconds": 0}})
        assert again.json() == {"letter_id": row["letter_id"], "task_id": "wrong-0"}

        async def completed() -> bool:
            return bool((await client.get("/v1/tasks/wrong-0")).json()["status"] == "completed")

        await until(completed, SECONDS, "the redriven task")
        assert problem(await client.post(path, json={})) == (404, "no-dead-letter", "letter_id")
        other = group["newest"]
        assert (await client.delete(f"/v1/dead-letters/{other}")).status_code == 204
        assert problem(await client.delete(f"/v1/dead-letters/{other}")) == (404, "no-dead-letter", "letter_id")
        for wrong in ("x", "9:1-1", "1-1-1", "0:" + "9" * 50 + "-0"):
            assert problem(await client.get(f"/v1/dead-letters/{wrong}"))[:2] == (404, "no-dead-letter")
        wrong_cursor = await client.get("/v1/dead-letters", params={"cursor": "x"})
        assert problem(wrong_cursor) == (400, "parameter", "cursor")
        # The console measures with the same rights. Only checks that list keys are not allowed.
        assert "Waiting work" in (await client.get("/console")).text
        system = (await client.get("/console/system", params={"checks": "1"})).text
        assert "{1}:tool" in system
        assert "could not be checked" in system
        assert 'class="wrong-one"' not in system


async def test_schedules_are_set_listed_run_and_removed(own_server: OwnServer, tmp_path: Path) -> None:
    async with gateway(own_server, tmp_path) as client:
        body = {"agent": "echo", "input": 7, "cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin"}
        for name in ("c", "a", "b"):
            assert (await client.put(f"/v1/schedules/{name}", json=body)).json()["cron"] == body["cron"]
        first = (await client.get("/v1/schedules", params={"limit": "2"})).json()
        assert [row["schedule_id"] for row in first["schedules"]] == ["a", "b"]
        rest = (await client.get("/v1/schedules", params={"cursor": first["next_cursor"]})).json()
        assert ([row["schedule_id"] for row in rest["schedules"]], rest["next_cursor"]) == (["c"], None)
        started = await client.post("/v1/schedules/a/run")
        assert (await ended(client, started.json()["task_id"]))["output"] == 7
        assert (await client.get("/v1/schedules/a")).json()["input"] == 7
        assert (await client.delete("/v1/schedules/a")).status_code == 204
        for answer in (
            await client.get("/v1/schedules/a"),
            await client.delete("/v1/schedules/a"),
            await client.post("/v1/schedules/a/run", json={}),
        ):
            assert problem(answer) == (404, "no-schedule", "schedule_id")
        for wrong, field in (
            ({**body, "cron": "x"}, "cron"),
            ({**body, "every_seconds": 5}, "cron"),
            ({**body, "agent": "nobody"}, "agent"),
            ({**body, "surprise": 1}, "surprise"),
        ):
            refused = await client.put("/v1/schedules/d", json=wrong)
            assert problem(refused) == (422, "field", field), refused.text
        timeless = await client.put("/v1/schedules/d", json={"agent": "echo", "input": 7})
        assert problem(timeless) == (422, "field", "every_seconds")


async def test_a_task_is_forked_exported_and_compared(own_server: OwnServer, tmp_path: Path) -> None:
    async with gateway(own_server, tmp_path) as client:
        path = str(tmp_path / "effects")
        origin = await run(client, {"agent": "journey", "input": path}, task_id="origin")
        assert origin["status"] == "completed"
        tree = await recorded(client, "origin")
        assert (tree["task"], tree["agent"]) == ("origin", "journey")
        assert tree["runs"][0]["committed"] >= int(tree["runs"][0]["ended"])
        key = {"Idempotency-Key": "again"}
        body = {"at": "r/2/", "input": "changed"}  # the run of its node, and no step
        forks = [await client.post("/v1/tasks/origin/forks", json=body, headers=key) for _ in range(2)]
        assert [fork.status_code for fork in forks] == [202, 202]
        (fork,) = {each.json()["task_id"] for each in forks}
        changed = await ended(client, fork)
        assert changed["output"] == ["part0", "changed", "part2", "sub"]
        await recorded(client, fork)
        same = await client.get("/v1/tasks/origin/difference", params={"with": "origin"})
        assert same.json() == {"difference": None}
        differs = (await client.get("/v1/tasks/origin/difference", params={"with": fork})).json()["difference"]
        assert (differs["run"], differs["step"], differs["members"]) == ("r", "2", ["output"])
        assert (differs["one"]["output"], differs["other"]["output"]) == ("part1", "changed")
        whole = await client.post("/v1/tasks/origin/forks", json={"task_id": "whole"})
        assert whole.json() == {"task_id": "whole"}
        assert (await ended(client, "whole"))["output"] == origin["output"]
        wrong = await client.post("/v1/tasks/origin/forks", json={"at": "x"})
        assert problem(wrong) == (422, "field", "at")
        missing = await client.post("/v1/tasks/nothing/forks", json={})
        assert problem(missing) == (404, "no-task", "task_id")
        lines = (await client.get("/v1/steps", params={"task_id": "origin"})).text.splitlines()
        assert {json.loads(line)["task"] for line in lines} == {"origin"}
        assert len(lines) == tree["steps"]
        content = DOCUMENT["paths"]["/v1/steps"]["get"]["responses"]["200"]["content"][LINES]
        for line in lines:
            Draft202012Validator(absolute(content["x-line"]), registry=REGISTRY).validate(json.loads(line))
        for task in ("nothing", "origin"):
            answer = await client.get(f"/v1/tasks/{task}/difference", params={"with": "neither"})
            assert problem(answer) == (404, "no-task", "task_id" if task == "nothing" else "with")
        usage = await client.get("/v1/usage", params={"by": "agent,day"})
        assert (usage.status_code, usage.json()["complete"]) == (200, True)
        assert usage.json()["since"].endswith("T00:00:00Z"), "whole days, which are summed up already"
        for params in ({"by": "x"}, {"by": "day,day"}, {"since": "yesterday"}):
            assert problem(await client.get("/v1/usage", params=params))[:2] == (400, "parameter")


DESK = """
from weft import AgentContext, App, RetryPolicy
app = App("desk")
@app.tool
async def search(query: str) -> list[str]:
    return [query]
@app.agent("writer")
async def writer(ctx: AgentContext, topic: str) -> object:
    return await ctx.tool("search", query=topic)
@app.tool(retry=RetryPolicy(attempts=1))
async def charge(amount: float) -> str:
    if amount > 100:
        raise ValueError("too much")
    return f"paid {amount}"
@app.agent("checkout")
async def checkout(ctx: AgentContext, order: dict[str, float]) -> object:
    await ctx.tool("search", query=str(order["order_id"]))
    return await ctx.tool("charge", amount=order["amount"])
@app.agent("asks")
async def asks(ctx: AgentContext, prompt: str) -> object:
    return await ctx.human(prompt)
@app.agent("fails")
async def fails(ctx: AgentContext, topic: str) -> None:
    await ctx.step(bool, topic)
    raise ValueError(await ctx.tool("search", query=topic))
"""


async def test_changed_code_is_replayed(own_server: OwnServer, tmp_path: Path) -> None:
    """The handlers run the code as it was; a replay reads it as it is now."""
    module = tmp_path / "replayed_desk.py"
    module.write_text(DESK)
    environ = {"WEFT_APP": "replayed_desk:app", "PYTHONPATH": f"{tmp_path}:{SOURCES}", "PYTHONDONTWRITEBYTECODE": "1"}
    async with gateway(own_server, tmp_path, **environ) as client:
        for agent, task in (("writer", "order"), ("fails", "failed")):
            await run(client, {"agent": agent, "input": "streams"}, task_id=task)
            await recorded(client, task)
        same = {"task_id": "order", "follows": True, "runs": 1, "difference": None, "further": [], "skipped": {}}
        assert (await client.post("/v1/tasks/order/replay", json={})).json() == same
        assert (await client.post("/v1/tasks/failed/replay", json={})).json() == {**same, "task_id": "failed"}
        order: dict[str, object] = {"agent": "checkout", "input": {"order_id": 200, "amount": 512}}
        assert (await run(client, order, task_id="edited"))["status"] == "failed"
        letters = (await client.get("/v1/dead-letters", params={"task_id": "edited", "name": "charge"})).json()
        path = f"/v1/dead-letters/{letters['dead_letters'][0]['letter_id']}/redrive"
        edit = {"reopen": True, "data": {"amount": 50.0}}
        assert (await client.post(path, json=edit)).status_code == 200
        assert (await ended(client, "edited"))["output"] == "paid 50.0"
        await recorded(client, "edited")
        assert (await client.post("/v1/tasks/edited/replay", json={})).json() == {**same, "task_id": "edited"}
        module.write_text(DESK.replace("query=topic)", "query=topic.upper())"))
        changed = (await client.post("/v1/tasks/order/replay", json={})).json()
        assert (changed["follows"], changed["difference"]) == (
            False,
            {
                "agent": "writer", "run": "r", "step": "1", "recorded": 'ctx.tool("search", query="streams")',
                "now": 'ctx.tool("search", query="STREAMS")', "line": "replayed_desk.py:9 in writer",
            },
        )  # fmt: skip
        module.write_text("app = 1 / 0")
        broken = await client.post("/v1/tasks/order/replay", json={})
        assert problem(broken) == (502, "replay", "")
        assert "ZeroDivisionError" in broken.json()["detail"]
        await client.post("/v1/tasks", json={"agent": "asks", "input": "Go?", "task_id": "open"})
        early = await client.post("/v1/tasks/open/replay", json={})
        assert early.status_code in (404, 409)  # its first step is recorded at any moment
        assert problem(await client.post("/v1/tasks/nothing/replay", json={}))[:2] == (404, "no-task")
        assert problem(await client.post("/v1/tasks/order/replay", json={"at": "1"})) == (422, "field", "at")


async def test_a_list_finds_texts_in_inputs_and_errors(own_server: OwnServer, tmp_path: Path) -> None:
    async with gateway(own_server, tmp_path) as client:
        await run(client, {"agent": "echo", "input": {"topic": "Überraschung"}}, task_id="input")
        await run(client, {"agent": "echo", "input": "nothing"}, task_id="other")
        await run(client, WRONG_CALL, task_id="error")
        for task in ("input", "other"):
            await found(client, f"/v1/tasks/{task}/trajectory")
        for text, tasks in (("überRASCH", ["input"]), ("topic", ["input"]), ("soon", ["error"]), ("elsewhere", [])):
            page = (await client.get("/v1/tasks", params={"text": text})).json()
            assert [row["task_id"] for row in page["tasks"]] == tasks, text
