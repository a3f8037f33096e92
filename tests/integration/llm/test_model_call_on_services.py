"""Model calls of services: kills in the middle of an answer, and what the command shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

from tests.fleet import Fleet
from tests.integration.llm.asking import WAIT, shown
from tests.openai_server.driver import OpenAIServer, answer, gated
from tests.servers.process import Server
from weft import Client


class Together(TypedDict):
    replicas: dict[str, int]
    app: str
    lease_seconds: float


# A long lease: a process that loads the client of models on a busy machine is not dead.
TOGETHER = Together(replicas={"agent-handler": 1, "state-manager": 1}, app="tests.apps.llm_app:app", lease_seconds=6.0)


@pytest.mark.slow
async def test_a_kill_in_the_middle_of_an_answer_costs_that_answer_alone(
    valkey: Server, openai_server: OpenAIServer, namespace: str, tmp_path: Path
) -> None:
    """What the next process shows replaces what was shown of it."""
    openai_server.play(gated(answer("Only once. " * 60), "rest", after=3).but(times=1), answer("Right."))
    folder = tmp_path / "fleet"
    async with (
        Fleet(valkey.url, namespace, folder, **TOGETHER, environ=openai_server.environ) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("asker", "Say something", task_id="k-1")
        events = []
        async for event in task.stream():
            events.append(event)
            if len(events) == 1:
                # A piece of the first answer has been shown, and the rest waits at the gate.
                assert "Only" in event.text
                fleet.kill(fleet.names("agent-handler")[0])
        response = await task.result(timeout=WAIT)
    assert response.value() == "Right."
    assert shown(events) == "Right."
    assert {event.data["attempt"] for event in events if event.text} == {1, 2}
    assert response.usage["requests"] == 1
    first, second = openai_server.ledger()
    assert (first.complete, second.complete) == (False, True)
    assert first.idempotency_key == second.idempotency_key, "so that a provider may know it again"
    assert str(first.idempotency_key).startswith("k-1/r/")


@pytest.mark.slow
async def test_the_command_shows_the_one_line(
    valkey: Server, openai_server: OpenAIServer, namespace: str, tmp_path: Path
) -> None:
    openai_server.play(answer("Never."))
    folder = tmp_path / "fleet"
    environ = openai_server.environ | {"OPENAI_API_KEY": "sk-a-key-of-nobody-0123456789"}
    async with (
        Fleet(valkey.url, namespace, folder, **TOGETHER, environ=environ),
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = await client.submit("asker", "Say something", task_id="w-1")
        await task.result(timeout=WAIT)
        ended = subprocess.run(
            [sys.executable, "-m", "runtime_core.cli.main", "task", "show", "w-1"],
            env={**os.environ, "WEFT_REDIS_URL": valkey.url, "WEFT_NAMESPACE": namespace, "COLUMNS": "1000"},
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "WrongKey" in line]
    assert len(lines) == 1
    for part in ("'gpt-test'", "openai", openai_server.url, "HTTP 401", "set OPENAI_API_KEY"):
        assert part in lines[0]
    assert "0123456789" not in ended.stdout


def test_nothing_of_the_client_is_loaded_before_the_first_call() -> None:
    """A service without models starts without it; one with models starts as fast."""
    heavy = ("pydantic_ai", "openai", "httpx2", "mcp", "opentelemetry")
    code = (
        "import sys, runtime_core.host.app_services, runtime_core.llm.agent, tests.apps.llm_app\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
