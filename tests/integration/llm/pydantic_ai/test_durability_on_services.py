"""Unchanged pydantic-ai agents on real services with a real HTTP model, whose processes are killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.fleet import Fleet, until
from tests.openai_server.driver import OpenAIServer, answer, calls, failing, gated, output, rate_limited, turns
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

APP = "tests.apps.pydantic_app:app"
WAIT_SECONDS = 90.0


@asynccontextmanager
async def running(
    server: Server, namespace: str, folder: Path, models: OpenAIServer
) -> AsyncIterator[tuple[Fleet, Client]]:
    async with (
        # A long lease: a process that loads pydantic-ai on a busy machine is not dead.
        Fleet(server.url, namespace, folder, app=APP, lease_seconds=6.0, environ=models.environ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        yield fleet, client


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def asked_for(path: Path, **more: object) -> dict[str, object]:
    return {"prompt": "What is there? [c-1]", "deps": {"path": str(path), **more}}


THREE = calls(("look", {"place": "a"}), ("look", {"place": "b"}), ("weigh", {"place": "c", "grams": 2}))


async def test_an_agent_with_parallel_tools_ends_with_its_answer(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    """Each request is sent once, the text arrives as deltas, usage counts once, and tool-handlers run the tools."""
    path = tmp_path / "effects"
    openai_server.play(turns(THREE, answer("Found: {results}")))
    async with running(valkey, namespace, tmp_path, openai_server) as (_, client):
        task = await client.submit("researcher", asked_for(path))
        text = "".join([event.text async for event in task.stream() if event.type == "weft.output.delta"])
        response = await task.result(timeout=WAIT_SECONDS)
    assert response.status == "completed", response
    assert response.value() == text
    assert "seen a" in text
    assert "4" in text
    counts = openai_server.counts()
    assert (counts.complete, counts.repeated) == (2, 0)
    entries = openai_server.ledger()
    told = sum(entry.usage.input + entry.usage.output for entry in entries if entry.usage is not None)
    assert response.usage["tokens"] == told
    assert response.usage["requests"] == 2
    found = Counter(line.split(" ")[0] for line in lines(path))
    assert found == {"look": 2, "weigh": 1}


async def test_kills_between_and_in_the_middle_of_operations_repeat_no_answer(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    path = tmp_path / "effects"
    looks = calls(*(("look", {"place": place}) for place in "abc"))
    openai_server.play(turns(looks, gated(answer("All done."), "last", after=2)))
    async with running(valkey, namespace, tmp_path, openai_server) as (fleet, client):
        task = await client.submit("researcher", asked_for(path, seconds=1.0))

        async def looked() -> bool:
            return any(line.startswith("look") for line in lines(path))

        await until(looked, WAIT_SECONDS, "a tool at work")
        # While the tools are at work, and the run waits for them; the tools themselves; and inside the second answer.
        fleet.kill("agent-handler-1")
        fleet.kill("tool-handler-1")
        await openai_server.waits("last")
        fleet.kill("agent-handler-1")
        await openai_server.until(lambda entries: len(entries) == 3, "the second question again", WAIT_SECONDS)
        openai_server.release("last")
        response = await task.result(timeout=WAIT_SECONDS)
    assert response.status == "completed", response
    assert response.value() == "All done."
    # The first question was asked once; the second one a second time, since nobody had got its answer.
    entries = openai_server.ledger()
    assert [entry.model_messages for entry in entries] == [0, 1, 1]
    assert entries[0].complete
    assert openai_server.counts().repeated == 0
    assert response.usage["requests"] == 2
    # A tool that was killed is done again under the same key.
    assert len(set(lines(path))) == 3


async def test_the_model_learns_that_the_outcome_of_an_unrepeatable_tool_is_unknown(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    path = tmp_path / "effects"
    openai_server.play(turns(calls(("once", {"name": "x"})), answer("Then: {result}")))
    async with running(valkey, namespace, tmp_path, openai_server) as (fleet, client):
        task = await client.submit("researcher", asked_for(path, seconds=30.0))

        async def begun() -> bool:
            return bool(lines(path))

        await until(begun, WAIT_SECONDS, "the tool at work")
        fleet.kill("tool-handler-1")
        response = await task.result(timeout=WAIT_SECONDS)
    assert response.status == "completed", response
    assert "find out whether it took effect" in response.value()
    assert lines(path) == ["once x"]


@only_in_matrix("on services")
async def test_structured_output_is_requested_until_it_is_valid(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    """The schema and the agent's own validator reject answers; a rate limit and an outage meanwhile cost no answer."""
    wrong, empty, good = ({"city": "Bern", "words": words} for words in ("many", 0, 3))
    openai_server.play(
        rate_limited(after=1, times=1), failing(503, times=1), turns(output(wrong), output(empty), output(good))
    )
    async with running(valkey, namespace, tmp_path, openai_server) as (_, client):
        task = await client.submit("reporter", "Report. [c-2]")
        response = await task.result(timeout=WAIT_SECONDS)
    assert response.status == "completed", response
    assert response.value() == good
    statuses = [entry.status for entry in openai_server.ledger()]
    assert statuses == [429, 503, 200, 200, 200]
    # The client's own retries are off: those of the run wait on the broker.
    assert {entry.retry for entry in openai_server.ledger()} == {"0"}


@only_in_matrix("on services")
async def test_a_human_approves_edits_or_denies_a_call(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    path = tmp_path / "effects"
    pays = calls(*(("pay", {"amount": amount}) for amount in (1, 2, 3)))
    openai_server.play(turns(pays, answer("{results}")))
    async with running(valkey, namespace, tmp_path, openai_server) as (fleet, client):
        task = await client.submit("researcher", asked_for(path))
        verdicts: dict[int, object] = {
            1: True,
            2: {"verdict": "edit", "value": {"amount": 20}},
            3: {"verdict": "deny", "reason": "too much"},
        }
        questions = 0
        async for event in task.stream():
            if event.type != "weft.human.requested":
                continue
            questions += 1
            shown = event.data["data"]
            assert shown["tool"] == "pay"
            if questions == 1:
                # Whoever waits for a human needs no process.
                fleet.kill("agent-handler-1")
            await task.signal(event.data["request_id"], verdicts[shown["arguments"]["amount"]])
        response = await task.result(timeout=WAIT_SECONDS)
    assert response.status == "completed", response
    assert questions == 3
    assert sorted(lines(path)) == ["pay 1", "pay 20"]
    assert "too much" in response.value()
    assert openai_server.counts().repeated == 0


@only_in_matrix("on services")
async def test_a_conversation_with_a_key_continues(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    openai_server.play(turns(answer("One."), answer("Two.")))
    async with running(valkey, namespace, tmp_path, openai_server) as (fleet, client):
        for said in ("One.", "Two."):
            task = await client.submit("plain", "Go on. [c-3]", key="ann")
            response = await task.result(timeout=WAIT_SECONDS)
            assert response.status == "completed", response
            assert response.value() == said
            fleet.kill("agent-handler-1")
    assert [entry.model_messages for entry in openai_server.ledger()] == [0, 1]


@only_in_matrix("on services")
async def test_a_permanent_error_is_reported_in_one_line(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    openai_server.play(failing(401, "no such key"), models=["gpt-test"])
    async with running(valkey, namespace, tmp_path, openai_server) as (_, client):
        wrong = await (await client.submit("plain", "Hello.")).result(timeout=WAIT_SECONDS)
        needs = await (await client.submit("researcher", "Hello.")).result(timeout=WAIT_SECONDS)
    assert wrong.error is not None
    assert (wrong.status, wrong.error["type"]) == ("failed", "WrongKey")
    assert len(openai_server.ledger()) == 1
    assert needs.error is not None
    assert needs.error["type"] == "InvalidInput"
    assert "input.deps" in needs.error["message"]
    assert "Deps" in needs.error["message"]
