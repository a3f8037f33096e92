"""Tasks over HTTP: submit, batch, show, list, cancel, answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import plain_redis, until
from tests.integration.gateway.consoles import page, send
from tests.integration.gateway.gateways import SECONDS, ended, gateway_fleet, http, problem
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)


async def test_a_submit_is_shown_listed_and_repeated_without_a_second_task(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path, gateways=2) as fleet, http(fleet) as client:
        body = {"agent": "echo", "input": {"n": 1}, "session_id": "s-1", "metadata": {"order": 7}}
        headers = {"Idempotency-Key": "order-7"}
        first = await client.post("/v1/tasks", json=body, headers=headers)
        assert first.status_code == 202
        task = first.json()["task_id"]
        assert first.headers["location"] == f"/v1/tasks/{task}"
        shown = await ended(client, task)
        assert (shown["status"], shown["output"], shown["session_id"]) == ("completed", {"n": 1}, "s-1")
        async with http(fleet, "gateway-2") as other:
            again = await other.post("/v1/tasks", json=body, headers=headers)
        assert (again.status_code, again.json()) == (202, first.json())
        changed = await client.post("/v1/tasks", json={**body, "input": 2}, headers=headers)
        assert problem(changed) == (409, "conflict", "Idempotency-Key")
        own = await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "mine"})
        assert own.json() == {"task_id": "mine"}
        other_content = await client.post("/v1/tasks", json={"agent": "echo", "input": 2, "task_id": "mine"})
        assert problem(other_content) == (409, "conflict", "task_id")
        listed = (await client.get("/v1/tasks")).json()
        assert [row["task_id"] for row in listed["tasks"]] == ["mine", task]
        assert listed["next_cursor"] is None


async def test_each_task_of_a_batch_starts_or_fails_by_itself(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        tasks = [
            {"agent": "echo", "input": 0},
            {"agent": "nobody", "input": 1},
            {"agent": "echo"},
            {"agent": "echo", "input": 3, "conf": {"max_steps": 0}},
            {"agent": "echo", "input": 4, "idempotency_key": "four", "task_id": "t-4"},
            {"agent": "echo", "input": 5, "surprise": 1},
        ]
        done = await client.post("/v1/batches", json={"tasks": tasks}, headers={"Idempotency-Key": "b"})
        results = done.json()["results"]
        assert [result.get("problem", {}).get("field") for result in results] == [
            None, "agent", "input", "conf.max_steps", None, "surprise",
        ]  # fmt: skip
        assert (await ended(client, results[0]["task_id"]))["output"] == 0
        assert (await ended(client, "t-4"))["output"] == 4
        again = await client.post("/v1/batches", json={"tasks": tasks}, headers={"Idempotency-Key": "b"})
        assert again.json() == done.json()
        assert len((await client.get("/v1/tasks")).json()["tasks"]) == 2


async def test_a_list_is_filtered_and_its_cursors_stay_where_they_are(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    environ = {"WEFT_PARTITIONS": "2"}
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:
        tasks = [{"agent": "echo", "input": n, "task_id": f"t-{n:02}", "session_id": f"s-{n % 2}"} for n in range(12)]
        for place, task in enumerate(tasks):
            key = {"key": "k"} if place == 5 else {}
            assert (await client.post("/v1/tasks", json={**task, **key})).status_code == 202
        for task in tasks:
            await ended(client, str(task["task_id"]))
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await client.get("/v1/tasks", params={"limit": 5, **({"cursor": cursor} if cursor else {})})).json()
            found += [row["task_id"] for row in page["tasks"]]
            cursor = page["next_cursor"]
            # A task that comes between two pages moves none of the others.
            await client.post("/v1/tasks", json={"agent": "echo", "input": 0, "task_id": f"later-{len(found)}"})
        assert found == [f"t-{n:02}" for n in reversed(range(12))]

        async def listed(**params: str) -> list[str]:
            return [row["task_id"] for row in (await client.get("/v1/tasks", params=params)).json()["tasks"]]

        assert await listed(session_id="s-1", status="completed") == [f"t-{n:02}" for n in (11, 9, 7, 5, 3, 1)]
        assert await listed(key="k") == ["t-05"]
        assert await listed(agent="nobody") == []
        assert await listed(until="2001-01-01T00:00:00Z") == []
        assert "t-00" in await listed(since="2001-01-01T00:00:00+02:00")


async def test_a_task_is_cancelled_and_a_question_is_answered_once(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with gateway_fleet(valkey, namespace, tmp_path) as fleet, http(fleet) as client:
        for task in ("asked", "dropped"):
            await client.post("/v1/tasks", json={"agent": "asks", "input": "Go on?", "task_id": task})
        questions: list[dict[str, Any]] = []

        async def is_asked() -> bool:
            shown = (await client.get("/v1/tasks/asked")).json()
            questions[:] = shown.get("questions", [])
            return bool(questions)

        await until(is_asked, SECONDS, "the question")
        wrong = await client.post("/v1/tasks/asked/answers", json={"request_id": "r:9-00", "value": 1})
        assert problem(wrong) == (409, "conflict", "request_id")
        answer = {"request_id": questions[0]["request_id"], "value": {"go": True}}
        sent = await asyncio.gather(*(client.post("/v1/tasks/asked/answers", json=answer) for _ in range(2)))
        assert sorted(each.status_code for each in sent) == [200, 409]
        assert (await ended(client, "asked"))["output"] == {"answer": {"go": True}}
        for _ in range(2):
            done = await client.post("/v1/tasks/dropped/cancel", json={"reason": "no longer needed"})
            assert done.json() == {"task_id": "dropped", "status": "cancelled"}
        assert (await ended(client, "dropped"))["error"]["message"] == "no longer needed"
        gone = await client.post("/v1/tasks/unknown/cancel", json={})
        assert problem(gone) == (404, "no-task", "task_id")
        # The cancel of an unknown task does not stop a later one of this id.
        later = await client.post("/v1/tasks", json={"agent": "echo", "input": 1, "task_id": "unknown"})
        assert later.status_code == 202


async def test_an_answer_has_the_type_of_its_question(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """The API, the wire and the form of the console refuse another one by its field."""
    async with (
        gateway_fleet(valkey, namespace, tmp_path) as fleet,
        http(fleet) as client,
        plain_redis(valkey.port) as redis,
    ):
        asked: dict[str, dict[str, Any]] = {}
        for task in ("by-api", "by-form"):
            await client.post("/v1/tasks", json={"agent": "books", "input": "When?", "task_id": task})

        async def are_asked() -> bool:
            asked.update({each["task_id"]: each for each in (await client.get("/v1/questions")).json()["questions"]})
            return len(asked) == 2

        await until(are_asked, SECONDS, "the questions")
        await client.post("/v1/tasks", json={"agent": "polls", "input": 3, "task_id": "poll"})

        async def listed(limit: int) -> list[str]:
            """Return all questions, page by page."""
            found, cursor = [], ""
            while True:
                params = {"limit": str(limit), **({"cursor": cursor} if cursor else {})}
                page = (await client.get("/v1/questions", params=params)).json()
                assert len(page["questions"]) <= limit
                found += [f"{each['task_id']} {each['request_id']}" for each in page["questions"]]
                if page["next_cursor"] is None:
                    return found
                cursor = page["next_cursor"]

        async def all_listed() -> bool:
            return len(await listed(50)) == 5

        await until(all_listed, SECONDS, "the questions of the poll")
        for limit in (1, 2, 4):
            assert await listed(limit) == await listed(50)
        wrong_cursor = await client.get("/v1/questions", params={"cursor": "x"})
        assert problem(wrong_cursor) == (400, "parameter", "cursor")
        await client.post("/v1/tasks/poll/cancel")
        assert asked["by-api"]["schema"]["required"] == ["day", "seats"]
        answer = {"request_id": asked["by-api"]["request_id"], "value": {"day": "2030-01-04", "seats": 3}}
        wrong = await client.post("/v1/tasks/by-api/answers", json=answer)
        assert problem(wrong) == (422, "field", "value.seats")
        data = json.dumps({**answer, "task_id": "by-api"})
        sent = ("type", "weft.task.signal", "replyto", f"of-{namespace}", "data", data)
        await redis.execute_command("XADD", f"{namespace}:tasks", "*", *sent)
        [[_, [[_, fields]]]] = await redis.execute_command("XREAD", "BLOCK", 20_000, "STREAMS", f"of-{namespace}", "0")
        assert json.loads(fields[b"data"])["field"] == "data.value.seats"
        answer["value"] = {"day": "2030-01-04", "seats": 2}
        assert (await client.post("/v1/tasks/by-api/answers", json=answer)).status_code == 200
        assert (await ended(client, "by-api"))["output"] == ["date", 2, None]

        form = await page(client, "/people")
        assert [each["name"] for each in form.all("select")] == ["choice.seats"]
        filled = {"request_id": asked["by-form"]["request_id"], "choice.seats": "1", "text?.note": "late"}
        refused = await send(client, "/tasks/by-form/answer", form, {**filled, "text.day": "soon"})
        assert (refused.status_code, "value.day" in refused.text) == (422, True), refused.text
        assert (await send(client, "/tasks/by-form/answer", form, {**filled, "text.day": "2030-01-04"})).is_redirect
        assert (await ended(client, "by-form"))["output"] == ["date", 1, "late"]


async def test_a_message_reaches_a_task_once_and_questions_are_listed(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway_fleet(valkey, namespace, tmp_path, app="tests.apps.console_app:app") as fleet,
        http(fleet) as client,
    ):
        for agent in ("listener", "editor"):
            await client.post("/v1/tasks", json={"agent": agent, "input": "news", "task_id": agent})
        path, key = "/v1/tasks/listener/messages", {"Idempotency-Key": "one"}
        sent = {"name": "other", "value": None}
        for _ in range(2):
            answer = await client.post(path, json=sent, headers=key)
            assert (answer.status_code, answer.json()) == (200, {"task_id": "listener", "name": "other"})
        reused = await client.post(path, json={**sent, "value": 1}, headers=key)
        assert problem(reused) == (409, "conflict", "Idempotency-Key")
        assert problem(await client.post(path, json={"name": "x"})) == (422, "field", "value")
        assert problem(await client.post(path, json={"name": "\n", "value": 1}))[::2] == (422, "name")
        unknown = await client.post("/v1/tasks/nobody/messages", json=sent)
        assert problem(unknown) == (404, "no-task", "task_id")
        await client.post(path, json={"name": "breaking-news", "value": {"a": 1}})
        assert (await ended(client, "listener"))["output"] == {"a": 1}
        late = await client.post(path, json=sent)
        assert problem(late) == (409, "conflict", "task_id")

        asked: list[dict[str, Any]] = []

        async def is_asked() -> bool:
            asked[:] = (await client.get("/v1/questions", params={"limit": 1})).json()["questions"]
            return bool(asked)

        await until(is_asked, SECONDS, "the question")
        assert (asked[0]["task_id"], asked[0]["agent"]) == ("editor", "editor")
        assert problem(await client.get("/v1/questions", params={"limit": 0})) == (400, "parameter", "limit")
        given = {"request_id": asked[0]["request_id"], "value": "yes"}
        assert (await client.post("/v1/tasks/editor/answers", json=given)).status_code == 200
        assert (await client.get("/v1/questions")).json() == {"questions": [], "next_cursor": None}
