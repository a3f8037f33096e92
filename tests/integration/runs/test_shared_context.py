"""`ctx.context` and `ctx.session` in one process, replayed at each turn, and with services that die."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import runtime_core.host.app_services
from runtime_core.client.client import Client
from runtime_core.host.local import LocalApp
from runtime_core.runs.calls import SESSION_AGENT
from runtime_core.runs.turn import TurnHandler
from tests.apps.context_app import ROOT_RESULT, app
from tests.fleet import Fleet
from tests.servers.process import Server
from weft import AgentContext, App


@pytest.fixture(params=["warm", "replayed at each turn"])
def local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LocalApp:
    if request.param != "warm":
        monkeypatch.setattr(runtime_core.host.app_services, "TurnHandler", partial(TurnHandler, warm_runs=0))
    return LocalApp(app, trajectory=True)


async def value_of(client: Client, agent: str, input: object = None, **ids: str) -> object:
    task = await client.submit(agent, input, **ids)  # type: ignore[call-overload]  # task_id, session_id
    return (await task.result(timeout=60)).value()


async def test_runs_share_a_context_and_their_changes_come_back_in_order(local: LocalApp) -> None:
    async with local as client:
        assert await value_of(client, "root") == ROOT_RESULT


async def test_a_caller_need_not_have_used_the_context_before(local: LocalApp) -> None:
    async with local as client:
        assert await value_of(client, "unaware") == {
            "log": ["1", "2"],
            "tokens": 2,
            "steps": 2,
            "title": None,
            "conflicts": [],
        }


async def test_a_coroutine_passes_on_values_that_it_does_not_use(local: LocalApp) -> None:
    async with local as client:
        found = await value_of(client, "delegating")
        assert isinstance(found, dict)
        assert (found["log"], found["tokens"], found["conflicts"]) == (["begun", "1", "2"], 2, [])
        assert found["found"] == [1, 1], "each began with what the coroutine's own fork holds"


async def test_answers_are_recorded_without_their_metadata(local: LocalApp) -> None:
    async with local as client:
        await value_of(client, "unaware", task_id="t-1")
        recorded = await local.recorded("t-1")
    outputs = {step.run: bytes(step.output) for step in recorded.steps if not step.step}
    assert (outputs["r/1"], outputs["r/2"], outputs["r/2/1"]) == (b"0", b"1", b"1")


async def test_a_failed_run_returns_no_context_changes() -> None:
    lone = App("lone")

    @lone.agent("fails")
    async def fails(ctx: AgentContext, _: object = None) -> None:
        ctx.context.put("log", ["lost"])
        raise ValueError("no")

    @lone.agent("asks")
    async def asks(ctx: AgentContext, _: object = None) -> object:
        ctx.context.put("log", [])
        await ctx.gather(ctx.agent("fails"), return_exceptions=True)
        return ctx.context.get("log")

    async with LocalApp(lone) as client:
        assert await value_of(client, "asks") == []


async def test_two_tasks_of_one_agent_share_nothing(local: LocalApp) -> None:
    async with local as client:
        one, two = [await client.submit("root", session_id="s") for _ in range(2)]
        assert (await one.result(timeout=60)).value() == (await two.result(timeout=60)).value() == ROOT_RESULT


async def visit(client: Client) -> None:
    names = [f"{number:02}" for number in range(20)]
    tasks = [await client.submit("visitor", name, session_id="s-1") for name in names]
    for task in tasks:
        await task.result(timeout=60)
    elsewhere = await client.submit("visitor", "x", session_id="s-2")
    assert (await elsewhere.result(timeout=60)).value() == []
    found = await value_of(client, "reader", session_id="s-1")
    assert isinstance(found, dict)
    assert sorted(found.pop("visitors")) == names
    assert found == {"visits": 20, "tokens": {"input_tokens": 20}}


async def test_tasks_of_a_session_merge_and_do_not_overwrite(local: LocalApp) -> None:
    async with local as client:
        await visit(client)
        kept = await client.submit(SESSION_AGENT, {}, key="s-1")
        snapshot = json.loads(str((await kept.result(timeout=60)).value()))["body"]
        assert (snapshot["tokens"], snapshot["merged"]) == ({}, {}), "it does not grow with the tasks that have ended"
        assert await value_of(client, "stumbling", session_id="s-1") == "stumbled"
        found = await value_of(client, "reader", session_id="s-1")
        assert isinstance(found, dict)
        assert found["visits"] == 20
        assert "nobody" not in found["visitors"], "a block that ended with an error changes nothing"


async def test_conflicts_between_tasks_of_a_session_are_reported(local: LocalApp) -> None:
    async with local as client:
        handles = [await client.submit("clashing", title, session_id="s") for title in ("one", "two")]
        asked = []
        for handle in handles:
            async for event in handle.stream():
                if event.type == "weft.human.requested":
                    asked.append(event.data["request_id"])
                    break
        told = []
        for handle, request in zip(handles, asked, strict=True):
            await handle.signal(request, True)
            told.append((await handle.result(timeout=60)).value())
        assert told == [[], ["title"]]


async def test_a_session_needs_an_id_and_a_store() -> None:
    lone = App("lone")

    @lone.agent("reads")
    async def reads(ctx: AgentContext, _: object = None) -> None:
        async with ctx.session():
            pass

    async with LocalApp(lone) as client:
        for session, said in (("", "session_id: this task has no session"), ("s", r"app.add_sessions()")):
            response = await (await client.submit("reads", session_id=session)).result(timeout=60)
            assert response.error is not None
            assert said in response.error["message"]


@pytest.mark.timeout(300)
async def test_a_context_and_a_session_outlive_the_processes(valkey: Server, namespace: str, tmp_path: Path) -> None:
    replicas = {"agent-handler": 2, "tool-handler": 1, "state-manager": 1}
    async with (
        Fleet(
            valkey.url, namespace, tmp_path, replicas=replicas, app="tests.apps.context_app:app", may_die=True
        ) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        dying = await client.submit("dying", str(tmp_path), session_id="s-1")
        roots = [await client.submit("root") for _ in range(10)]
        await visit(client)
        assert (await dying.result(timeout=60)).value() == {
            "log": ["root", "0", "after 0", "1", "after 1", "2", "after 2"],
            "tokens": 3,
            "steps": 3,
            "title": None,
            "conflicts": [],
        }
        fleet.kill("agent-handler-1")
        for root in roots:
            assert (await root.result(timeout=60)).value() == ROOT_RESULT
        before = await value_of(client, "visitor", "late", session_id="s-1")
        assert isinstance(before, list)
        assert len(before) == 20
    assert len(list(tmp_path.glob("died-*"))) == 3
