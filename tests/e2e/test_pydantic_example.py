"""The example of a pydantic-ai agent, run as a user runs it: in its own process, and on services that are killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import Fleet
from tests.openai_server.driver import OpenAIServer, Rule, answer, calls, output, turns
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMPARE = calls(("train", {"start": "Bern", "end": "Chur"}), ("train", {"start": "Bern", "end": "Basel"}))
BOOK = calls(("book", {"city": "Basel", "price": 80}))
TRIP = output({"city": "Basel", "minutes": 58, "booking": "BASEL-80"})
SHOWN = "book Basel for 80? [y/n] \nBasel, 58 minutes, booking BASEL-80\n3 requests to the model, "


def script() -> tuple[Rule, ...]:
    return turns(COMPARE, BOOK, TRIP)


def environ(models: OpenAIServer, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "OPENAI_"))}
    return {**kept, **models.environ, **more}


@pytest.mark.timeout(300)
def test_the_example_prints_its_documented_output(openai_server: OpenAIServer) -> None:
    openai_server.play(script())
    done = subprocess.run(
        [sys.executable, "-m", "examples.pydantic_agent"],
        cwd=ROOT,
        env=environ(openai_server),
        input="y\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith(SHOWN), done.stderr
    assert done.returncode == 0
    counts = openai_server.counts()
    assert (counts.complete, counts.repeated) == (3, 0)


@only_in_matrix("on services that are killed")
@pytest.mark.timeout(300)
async def test_the_example_continues_after_a_kill_while_a_human_is_asked(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    openai_server.play(script())
    async with Fleet(
        valkey.url,
        namespace,
        tmp_path,
        app="examples.pydantic_agent.app:app",
        lease_seconds=6.0,
        environ=openai_server.environ,
    ) as fleet:
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.pydantic_agent", "Chur", "or", "Basel?"),
            cwd=ROOT,
            env=environ(openai_server, WEFT_REDIS_URL=valkey.url, WEFT_NAMESPACE=namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert asking.stdout is not None
        asked = await asyncio.wait_for(asking.stdout.readuntil(b"[y/n] "), 90)
        fleet.kill("agent-handler-1")
        fleet.kill("tool-handler-1")
        said, errors = await asyncio.wait_for(asking.communicate(b"y\n"), 90)
    assert (asked + said).decode().startswith(SHOWN), errors.decode()
    counts = openai_server.counts()
    assert (counts.complete, counts.repeated) == (3, 0)


@pytest.mark.timeout(300)
def test_without_a_key_the_example_says_what_is_missing(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("never"))
    without = {name: value for name, value in environ(openai_server).items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "examples.pydantic_agent"],
        cwd=ROOT,
        env=without,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "OPENAI_API_KEY" in done.stderr
