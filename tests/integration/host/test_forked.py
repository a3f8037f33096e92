"""Children that tools fork do not return into the handler, and die with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.fleet import Fleet, until
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # nobody may have waited for it


def pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("tool", ["forks", "forks_on_the_loop"])
async def test_a_tool_that_returns_twice_answers_once(
    valkey: Server, namespace: str, tmp_path: Path, tool: str
) -> None:
    forked = tmp_path / "pids"
    fleet = Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app")
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        for number in range(1, 4):
            task = await client.submit("calls", {"tool": tool, "path": str(forked)})
            result = await task.result(timeout=60)
            assert (result.status, result.output) == ("completed", "parent")

            async def ended(number: int = number) -> bool:
                return len(pids(forked)) == number and not any(map(lives, pids(forked)))

            await until(ended, 30, "the child ends where it comes back")
        assert "returned from the code that forked it" in fleet.members["tool-handler-1"].text()
        assert fleet.harmed == 0


async def test_forked_children_die_with_a_handler_that_is_killed(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    forked = tmp_path / "pids"
    fleet = Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app")
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        task = await client.submit("calls", {"tool": "starts", "path": str(forked)})
        assert (await task.result(timeout=60)).status == "completed"
        child, started = pids(forked)
        try:
            assert lives(child)
            fleet.kill("tool-handler-1")

            async def ended() -> bool:
                return not lives(child)

            await until(ended, 30, "the forked child dies with its parent")
        finally:
            if lives(started):  # the supervisor of `weft up` ends such ones; here is none
                os.kill(started, signal.SIGKILL)
