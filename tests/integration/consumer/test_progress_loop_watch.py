"""Code that blocks the event loop of its handler gets an error that names the place; nothing else is affected."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.errors import ConfigurationError
from runtime_core.host.local import LocalApp
from tests.apps.runaway_app import app
from tests.fleet import Fleet
from tests.servers.matrix import first_of, is_full
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

KEEPS_LOCK = (
    ("keeps_lock", 3.0),
    ("calls_keeping", "keeping_lock_in_thread"),
    ("keeps_lock_in_step", 3.0),
    ("calls_keeping", "keeping_lock"),
)
"""Agents and their inputs; each keeps two processors busy for seconds."""
WHERE = {"spins": "in spin", "catches": "in catches_all", "waits": "in waits_for_itself"}


async def test_code_that_holds_the_loop_ends_with_its_stack(valkey: Server, namespace: str, tmp_path: Path) -> None:
    fleet = Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app", lease_seconds=3.0)
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        for how, where in WHERE.items():
            neighbours = [await client.submit("naps", 5.0) for _ in range(2)]
            ends = {"holds": await (await client.submit("holds", how)).result(timeout=90)}
            # Every place for the way that computes nothing; in the matrix for each.
            if how == "waits" or is_full():
                wanted = {"tool": "holding", "how": how}
                ends["holds_in_step"] = await (await client.submit("holds_in_step", how)).result(timeout=90)
                ends["calls"] = await (await client.submit("calls", wanted)).result(timeout=90)
            for agent, end in ends.items():
                assert end.status == "failed"
                assert end.error is not None
                assert end.error["type"] == "BlockedEventLoop", (how, agent, end.error)
                assert "runaway_app.py:" in end.error["message"]
                assert where[3:] in end.error["message"]
            for neighbour in neighbours:
                end = await neighbour.result(timeout=60)
                assert (end.status, end.output) == ("completed", "1")
            logs = "".join(member.text() for member in fleet.members.values())
            assert "event loop blocked for" in logs
            assert where in logs
        assert "by run r of task" in logs
        assert "(agent holds)" in logs
        assert "by tool 'holding' of task" in logs
        assert fleet.declared_dead() == set()
        assert fleet.harmed == 0


async def test_a_block_below_the_limit_keeps_its_deliveries(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """Others would adopt them after a lease without a heartbeat."""
    fleet = Fleet(
        valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app", lease_seconds=1.0, replicas=2,
        environ={"WEFT_LOOP_BLOCK_SECONDS": "60"},
    )  # fmt: skip
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        end = await (await client.submit("pauses", 4.0)).result(timeout=60)
        assert (end.status, end.output) == ("completed", "1")
        logs = "".join(member.text() for member in fleet.members.values())
        assert "in pauses by run r of task" in logs
        report = logs[logs.index("event loop blocked for") :].partition("\n")[0]
        assert "runaway_app.py" in report
        assert "runtime_core" not in report, "the stack begins with the user's code"
        assert fleet.declared_dead() == set()
        assert fleet.harmed == 0


async def test_c_code_that_keeps_the_global_lock_is_named(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """Meanwhile no thread sends heartbeats, so each process that tries it is declared dead: once, not until Poison."""
    fleet = Fleet(
        valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app", lease_seconds=1.0, replicas=2
    )  # fmt: skip
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        for agent, given in first_of(*KEEPS_LOCK):
            end = await (await client.submit(agent, given)).result(timeout=90)
            assert end.error is not None, (agent, given, end)
            assert end.error["type"] == "BlockedEventLoop", (agent, given, end.error)
            assert "kept Python's global lock (GIL) for" in end.error["message"]
            assert "runaway_app.py" in end.error["message"]
            assert "in keep_lock" in end.error["message"]


async def test_a_local_app_reports_and_ends_blocking_code(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalApp(app, loop_block_seconds=2.0) as client:
        end = await (await client.submit("pauses", 30.0)).result(timeout=60)
        assert end.error is not None
        assert end.error["type"] == "BlockedEventLoop"
        assert "runaway_app.py" in end.error["message"]
        assert "in pauses" in end.error["message"]
    assert "in pauses by run r of task" in caplog.text
    with pytest.raises(ConfigurationError, match="loop_block_seconds is 0: pass seconds above 0"):
        LocalApp(app, loop_block_seconds=0)
