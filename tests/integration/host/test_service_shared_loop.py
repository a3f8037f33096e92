"""Code that stops the event loop of its handler, or cancels all tasks there, ends only its own attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.host.local import LocalApp
from tests.apps.runaway_app import app
from tests.fleet import Fleet
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STOPPED = "loop.stop() would end the process with all other runs"
ENDS = {
    ("agent", "stop_loop"): ("RuntimeError", STOPPED),
    ("agent", "cancel_all"): ("CancelledError", "the agent's function raised CancelledError by itself"),
    ("agent", "cancel_others"): ("LookupError", "went on, cancelled: True"),
    ("tool", "stop_loop"): ("RuntimeError", STOPPED),
    ("tool", "cancel_all"): ("RuntimeError", "tool 'ending_loop' cancelled its own task, asyncio.current_task()"),
    ("tool", "cancel_others"): ("LookupError", "went on, cancelled: True"),
}


async def test_code_that_ends_its_loop_or_all_tasks_fails_alone(valkey: Server, namespace: str, tmp_path: Path) -> None:
    fleet = Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app")
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        neighbours = [
            await client.submit("naps", 3.0),
            await client.submit("calls", {"tool": "napping", "seconds": "3"}),
        ]
        for (where, how), expected in ENDS.items():
            given = ("ends_loop", how) if where == "agent" else ("calls", {"tool": "ending_loop", "how": how})
            end = await (await client.submit(*given)).result(timeout=60)
            assert end.error is not None, (where, how, end)
            assert end.error["type"] == expected[0], (where, how, end.error)
            assert expected[1] in end.error["message"], (where, how, end.error)
        ends = [await each.result(timeout=60) for each in neighbours]
        assert [(end.status, end.output) for end in ends] == [("completed", "1"), ("completed", "slept")]
        assert {member.starts for member in fleet.members.values()} == {1}
        assert fleet.declared_dead() == set()
        assert fleet.harmed == 0


async def test_an_agent_that_cancels_the_handling_of_its_delivery_is_retried() -> None:
    async with LocalApp(app) as client:
        end = await (await client.submit("cancels_handling", None)).result(timeout=60)
        assert (end.status, end.output) == ("completed", 2)
