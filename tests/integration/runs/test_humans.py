"""Questions to humans, answered from the command line, from Python and with XADD, after a restart of everything."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime_core.errors import HumanTimeout, InvalidInput
from runtime_core.host.local import LocalApp
from runtime_core.trajectory.store import TrajectoryStore
from tests.conftest import OwnServer
from tests.fleet import Fleet, plain_redis, until
from tests.servers.matrix import repeat_on
from tests.servers.process import Server
from weft import AgentContext, App, Client, RetryPolicy, SubmitOptions, TaskHandle

pytestmark = pytest.mark.timeout(300)

APP = "tests.apps.humans_app:app"
HOOKS = {"before_tool_call": ["ask_first"], "error": ["alert"]}
Json = Any  # JSON of many shapes
Answer = Callable[[Fleet, Server, str, str, Json], Awaitable[None]]


async def by_client(fleet: Fleet, server: Server, task: str, request: str, value: Json) -> None:
    async with Client.connect(server.url, namespace=fleet.namespace) as client:
        await (await client.task(task)).signal(request, value)


async def by_xadd(fleet: Fleet, server: Server, task: str, request: str, value: Json) -> None:
    """Send it as `redis-cli` does."""
    data = json.dumps({"task_id": task, "request_id": request, "value": value})
    async with plain_redis(server.port) as redis:
        await redis.execute_command("XADD", f"{fleet.namespace}:tasks", "*", "type", "weft.task.signal", "data", data)


async def by_command(fleet: Fleet, server: Server, task: str, request: str, value: Json) -> None:
    arguments = ("task", "signal", task, request, json.dumps(value))
    ended = await fleet.weft(*arguments)
    assert ended.returncode == 0, ended.stderr


async def asked(task: TaskHandle) -> str:
    """Return the id of the task's first question."""
    async for event in task.stream():
        if event.type == "weft.human.requested":
            return str(event.data["request_id"])
    raise AssertionError("the task ended without a question")


@pytest.mark.parametrize("answer", [by_client, by_xadd, by_command])
@pytest.mark.parametrize("kind", repeat_on("redis-7.0", "valkey-9"))
async def test_an_answer_finds_its_run_after_everything_was_restarted(
    kind: str, answer: Answer, own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    server = own_server(kind, append="always")
    async with Fleet(server.url, namespace, tmp_path / "fleet", app=APP) as fleet:
        async with Client.connect(server.url, namespace=namespace) as client:
            edited = await client.submit("publisher", "draft", options=SubmitOptions(hooks=HOOKS))
            denied = await client.submit("publisher", "draft", options=SubmitOptions(hooks=HOOKS))
            plain = await client.submit("approver", "draft")
            requests = {task.task_id: await asked(task) for task in (edited, denied, plain)}
        await fleet.restart()
        server.restart()
        fleet.kill("agent-handler-1")
        edit = {"verdict": "edit", "value": {"text": "final"}}
        await answer(fleet, server, edited.task_id, requests[edited.task_id], edit)
        await answer(fleet, server, denied.task_id, requests[denied.task_id], False)
        await answer(fleet, server, plain.task_id, requests[plain.task_id], {"verdict": "deny", "reason": "no"})
        async with Client.connect(server.url, namespace=namespace) as client:
            ends = {}
            for task in requests:
                ends[task] = await (await client.task(task)).result(timeout=60)
        assert ends[edited.task_id].output == "published final"
        assert ends[denied.task_id].error == {
            "type": "Denied",
            "message": "hook 'ask_first' at before_tool_call asked a human, who refused",
        }
        assert ends[plain.task_id].output == ["deny", "draft", "no"]
        rows = await recorded(fleet, denied.task_id)
        assert [row.name for row in rows if row.kind == "hook"] == ["ask_first"]
        assert not [row for row in rows if row.kind == "tool"]


async def recorded(fleet: Fleet, task: str) -> list[Any]:  # Any: rows of the trajectory
    """Return the task's rows when all are there."""
    store = await TrajectoryStore.open(fleet.trajectory_url)
    try:
        found: list[Any] = []

        async def complete() -> bool:
            trajectory = await store.task(fleet.namespace, task)
            if trajectory is None or not trajectory.complete:
                return False
            found[:] = trajectory.steps
            return True

        await until(complete, 60, "the task is recorded completely")
        return found
    finally:
        await store.close()


async def test_an_agent_handler_that_dies_while_a_hook_asks_changes_nothing(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP, replicas={"agent-handler": 2, "tool-handler": 1}) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("publisher", "draft", options=SubmitOptions(hooks=HOOKS))
        request = await asked(task)
        for name in fleet.names("agent-handler"):
            fleet.kill(name)
        await task.signal(request, True)
        assert (await task.result(timeout=60)).value() == "published draft"


async def test_a_bad_answer_on_the_wire_is_rejected_by_its_field_and_the_question_stays_open(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP),
        Client.connect(valkey.url, namespace=namespace) as client,
        plain_redis(valkey.port) as redis,
    ):
        task = await client.submit("approver", "draft")
        request = await asked(task)
        answers, last = f"answers-of-{namespace}", "0"

        async def told(value: Json) -> tuple[str, str]:
            """Return the field and message of the answer's rejection."""
            nonlocal last
            data = json.dumps({"task_id": task.task_id, "request_id": request, "value": value})
            await redis.execute_command(
                "XADD", f"{namespace}:tasks", "*", "type", "weft.task.signal", "replyto", answers, "data", data
            )
            found = await redis.execute_command("XREAD", "BLOCK", 20_000, "STREAMS", answers, last)
            assert found, "no answer"
            entry, fields = found[0][1][0] if isinstance(found, list) else found[answers.encode()][0][0]
            last = entry.decode()
            named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            body = json.loads(named[b"data"])
            return body["field"], body["message"]

        field, message = await told("perhaps")
        assert field == "data.value"
        assert "is not a verdict" in message
        with pytest.raises(InvalidInput, match="value: is not a verdict"):
            await task.signal(request, 7)
        await task.signal(request, {"verdict": "edit", "value": "final", "reason": "shorter"})
        field, message = await told(True)
        assert field in ("data.request_id", "data.task_id")  # answered already, or the task has ended by now
        assert (await task.result(timeout=60)).value() == ["edit", "final", "shorter"]


# ---- in one process --------------------------------------------------------------------------------------------


def approvals() -> App:
    app = App("approvals")

    @app.agent("asks")
    async def asks(ctx: AgentContext, options: dict[str, Json]) -> Json:
        try:
            approval = await ctx.approve("May I?", data={"cost": 3}, **options)
        except HumanTimeout:
            return "timeout"
        assert approval.approved is not approval.denied
        return [approval.verdict, approval.value, approval.reason]

    @app.agent("both")
    async def both(ctx: AgentContext) -> Json:
        first, second = await ctx.gather(
            ctx.approve("first?", data=1, timeout=timedelta(days=1)), ctx.approve("second?", data=2)
        )
        return [first.verdict, second.value]

    return app


@pytest.mark.parametrize(
    ("answer", "approval"),
    [
        (True, ["approve", {"cost": 3}, ""]),
        (False, ["deny", {"cost": 3}, ""]),
        ({"verdict": "approve", "reason": "fine"}, ["approve", {"cost": 3}, "fine"]),
        ({"verdict": "deny", "value": "ignored"}, ["deny", {"cost": 3}, ""]),
        ({"verdict": "edit", "value": None}, ["edit", None, ""]),
    ],
)
async def test_an_answer_gives_a_verdict_and_a_value(answer: Json, approval: Json) -> None:
    async with LocalApp(approvals()) as client:
        task = await client.submit("asks", {})
        request = await asked(task)
        await task.signal(request, answer)
        assert (await task.result(timeout=60)).value() == approval


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"timeout": 0.01, "default": True}, ["approve", {"cost": 3}, ""]),
        ({"timeout": 0.01, "default": "deny"}, ["deny", {"cost": 3}, ""]),
        ({"timeout": 0.01}, "timeout"),
    ],
)
async def test_at_the_deadline_the_default_counts(options: dict[str, Json], end: Json) -> None:
    async with LocalApp(approvals()) as client:
        assert (await (await client.submit("asks", options)).result(timeout=60)).value() == end


async def test_an_invalid_default_verdict_fails_the_run_with_its_name() -> None:
    async with LocalApp(approvals()) as client:
        response = await (await client.submit("asks", {"default": "perhaps"})).result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "InvalidInput"
    assert "default of ctx.approve" in response.error["message"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ctx: ctx.human({"a": 1}), 'prompt of ctx.human: {"a":1} is not a string: pass other values as data='),
        (lambda ctx: ctx.human(object()), "prompt of ctx.human: <object object"),
        (lambda ctx: ctx.approve(None), "prompt of ctx.approve: null is not a string: pass other values as data="),
        (lambda ctx: ctx.human("?", timeout=timedelta.max), "is more than 1000000000 seconds"),
        (lambda ctx: ctx.approve("?", timeout=1e300), "timeout of ctx.approve: 1e+300 is more than"),
        (lambda ctx: ctx.sleep(1e300), "delay of ctx.sleep: 1e+300 is more than"),
    ],
)
async def test_a_question_that_cannot_be_asked_fails_the_run_by_its_name(
    wrong: Callable[[AgentContext], Awaitable[Any]],  # Any: it gives nothing
    message: str,
) -> None:
    own = App("wrong")

    @own.agent("asks", retry=RetryPolicy(attempts=1))
    async def asks(ctx: AgentContext, nothing: str) -> str:
        await wrong(ctx)
        return nothing

    async with LocalApp(own) as client:
        response = await (await client.submit("asks", "x")).result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "InvalidInput"
    assert message in response.msg


async def test_approvals_are_gathered_as_other_steps_are() -> None:
    async with LocalApp(approvals()) as client:
        task = await client.submit("both")
        answers = {"first?": False, "second?": True}
        async for event in task.stream():
            if event.type == "weft.human.requested":
                await task.signal(event.data["request_id"], answers[event.data["prompt"]])
        assert (await task.result(timeout=60)).value() == ["deny", 2]


async def test_the_first_of_two_answers_counts() -> None:
    async with LocalApp(approvals()) as client:
        task = await client.submit("both")
        request = await asked(task)
        await task.signal(request, False)
        with pytest.raises(InvalidInput, match="already answered"):
            await task.signal(request, True)


async def test_a_question_does_not_block_other_tasks_of_its_process() -> None:
    app = approvals()

    @app.agent("quick")
    async def quick(ctx: AgentContext, number: int) -> int:
        return int(await ctx.step(abs, number))

    async with LocalApp(app) as client:
        waiting = await client.submit("both")
        request = await asked(waiting)
        others = [await client.submit("quick", -number) for number in range(50)]
        assert [(await other.result(timeout=60)).value() for other in others] == list(range(50))
        await waiting.signal(request, False)  # it was open all the time
