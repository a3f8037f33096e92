"""Conversations on the services: they survive restarts and deploys, and use tools of other apps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime_core.state_manager.dead_letters import DeadLetters
from tests.fleet import Fleet, until
from tests.openai_server.driver import OpenAIServer, When, answer, calls, turns
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server
from weft import Client, TaskHandle

pytestmark = pytest.mark.timeout(300)

HANDLERS = {"agent-handler": 1, "tool-handler": 1}
WAIT = 120.0


@asynccontextmanager
async def deployed(
    server: OpenAIServer, valkey: Server, namespace: str, folder: Path, app: str = "tests.apps.clerks_app:app"
) -> AsyncIterator[Fleet]:
    async with Fleet(
        valkey.url,
        namespace,
        folder,
        app=app,
        replicas=HANDLERS,
        # Long: a process that loads the client of models on a busy machine is not dead.
        lease_seconds=6.0,
        environ=server.environ,
    ) as fleet:
        yield fleet


async def question(task: TaskHandle) -> str:
    """The id of the task's first question."""
    async for event in task.stream():
        if event.type == "weft.human.requested":
            return str(event.data["request_id"])
    raise AssertionError("the task has ended without a question")


async def test_an_answer_to_an_approval_finds_its_conversation_after_everything_was_restarted(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(
        turns(
            calls(("pay", {"amount": 3}), ("search", {"query": "a"})),
            answer("Done: {results}"),
        )
    )
    async with (
        deployed(openai_server, valkey, namespace, tmp_path) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("clerk", "Pay 3.", stream=True)
        request = await question(task)
        await fleet.restart()
        for name in fleet.names("agent-handler"):
            fleet.kill(name)
        await task.signal(request, {"verdict": "edit", "value": {"amount": 2}})
        said = (await task.result(timeout=WAIT)).value()
    assert "paid 2" in said
    assert "a is fine" in said
    assert openai_server.counts().complete == 2, "each model call was made once"
    assert openai_server.counts().repeated == 0


async def test_a_deploy_with_other_tools_rules_and_instructions_disturbs_no_conversation(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(
        calls(("pay", {"amount": 3}), ("search", {"query": "a"}), ("find", {}), when=When(model_messages=0)),
        calls(("final_result", {"response": ["done"]}), when=When(model_messages=1)),
    )
    async with Client.connect(valkey.url, namespace=namespace) as client:
        async with deployed(openai_server, valkey, namespace, tmp_path / "first"):
            task = await client.submit("clerk", "Pay 3.", stream=True)
            request = await question(task)

            async def searched() -> bool:
                return all(wait["kind"] != "tool" for wait in (await task.show())["waits_for"])

            # A call that is left over is made by the later app, whose search takes another argument.
            await until(searched, WAIT, "the search has its result")
        async with deployed(openai_server, valkey, namespace, tmp_path / "later", "tests.apps.clerks_app:later"):
            await task.signal(request, True)
            assert (await task.result(timeout=WAIT)).value() == ["done"]
            letters = await DeadLetters(client.buses).newest(10)
    assert letters == []
    assert openai_server.counts().repeated == 0
    asked = [openai_server.request(entry.number) for entry in openai_server.ledger()]
    assert [request["messages"][0]["content"] for request in asked] == ["You are a clerk.", "You are another clerk."]
    offered = [[tool["function"]["name"] for tool in request["tools"]] for request in asked]
    assert offered == [["pay", "search"], ["audit", "search", "pay", "final_result"]]
    results = [message["content"] for message in asked[1]["messages"] if message["role"] == "tool"]
    assert results[0] == "paid 3 CHF", "approved, as it was asked by the rules of then"
    assert "there is no tool named 'find'; the tools are: pay, search" in results[2], "as it was decided then"


@only_in_matrix("on services")
async def test_tools_of_another_app_are_called_in_their_pool(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(turns(calls(("files_read", {"path": "a.txt"}), ("files_list", {})), answer("Read: {results}")))
    far = {"WEFT_POOLS": "far"}
    async with (
        Fleet(
            valkey.url,
            namespace,
            tmp_path / "far",
            app="tests.apps.clerks_app:archive",
            replicas={"tool-handler": 1},
            lease_seconds=6.0,
            environ=far,
        ),
        deployed(openai_server, valkey, namespace, tmp_path / "near"),
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("reader", "Read a.txt.")
        said = (await task.result(timeout=WAIT)).value()
    assert "the text of a.txt" in said
    request = openai_server.request(openai_server.ledger()[0].number)
    assert [tool["function"]["name"] for tool in request["tools"]] == ["files_list", "files_read"]


@only_in_matrix("on services")
async def test_a_conversation_continues_after_its_limit_is_raised(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(turns(calls(("search", {"query": "a"})), calls(("search", {"query": "b"})), answer("Done.")))
    async with Client.connect(valkey.url, namespace=namespace) as client:
        async with deployed(openai_server, valkey, namespace, tmp_path / "first"):
            task = await client.submit("patient", "Find a and b.")
            ended = await task.result(timeout=WAIT)
            assert ended.error is not None
            assert ended.error["type"] == "TurnLimit"
        async with deployed(openai_server, valkey, namespace, tmp_path / "later", "tests.apps.clerks_app:later"):
            letters = DeadLetters(client.buses)
            [letter] = await letters.newest(10)
            await letters.redrive(letter.letter_id, reopen=True)
            again = await client.task(task.task_id)
            while (shown := await again.show())["status"] != "completed":
                assert shown["status"] != "failed" or shown["error"]["type"] == "TurnLimit"
                await asyncio.sleep(0.05)
            assert shown["output"] == "Done."
    assert openai_server.counts().complete == 3
    assert openai_server.counts().repeated == 0


@only_in_matrix("on services")
async def test_a_remembered_conversation_outlives_the_processes(
    openai_server: OpenAIServer, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(answer("Hello Ada.", when=When(user="Ada")), answer("You said: {user}"))
    async with (
        deployed(openai_server, valkey, namespace, tmp_path) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        first = await client.submit("chatty", "I am Ada.", key="ada")
        assert (await first.result(timeout=WAIT)).value() == "Hello Ada."
        await fleet.restart()
        second = await client.submit("chatty", "Who am I?", key="ada")
        assert (await second.result(timeout=WAIT)).value() == "You said: Who am I?"
    request = openai_server.request(openai_server.ledger()[-1].number)
    assert [message["content"] for message in request["messages"]] == [
        "You remember.",
        "I am Ada.",
        "Hello Ada.",
        "Who am I?",
    ]
