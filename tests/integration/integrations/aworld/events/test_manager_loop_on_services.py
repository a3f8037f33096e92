"""Event-driven runs, forks and replays on the services, with kills in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.integrations.aworld.events.message import Recorded
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.trajectory.store import TrajectoryStore
from tests.apps.events_app import app
from tests.fleet import Fleet, until
from tests.servers.process import Server
from tests.service_forks import SOURCES
from weft.aworld import EventManager

pytestmark = pytest.mark.timeout(300)


def calls(folder: Path) -> Counter[str]:
    """Return what the app's tools and agents have really done."""
    file = folder / "calls"
    return Counter(file.read_text().splitlines() if file.exists() else ())


def weft(fleet: Fleet, *arguments: str) -> str:
    """The output of the command."""
    environ = {
        **os.environ,
        "WEFT_REDIS_URL": fleet.url,
        "WEFT_NAMESPACE": fleet.namespace,
        "WEFT_TRAJECTORY_URL": fleet.trajectory_url,
        "PYTHONPATH": SOURCES,
    }
    done = subprocess.run(  # our own command
        [Path(sys.executable).with_name("weft"), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_an_event_driven_run_outlives_kills_and_can_be_replayed_and_forked(
    shared_server: Callable[[str], Server], namespace: str, tmp_path: Path
) -> None:
    server = shared_server("valkey-9")
    environ = {"EVENTS_APP_CALLS": str(tmp_path)}
    async with (
        Fleet(server.url, namespace, tmp_path, app="tests.apps.events_app:app", environ=environ) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        task = await client.submit("patient", [1, 2], task_id="t-1", session_id="s-1")

        async def both_asked() -> bool:
            return calls(tmp_path).total() == 2

        await until(both_asked, 60, "both tools are under way")
        # In the middle of the first round: its handler dies, and another one goes on from the journal.
        fleet.kill("agent-handler-1")
        (tmp_path / "go").touch()
        assert (await task.result(timeout=60)).value() == 12
        done = calls(tmp_path)
        assert done == Counter(
            {"slow_double 1": 1, "slow_double 2": 1, "double 2": 1, "double 4": 1, "adder [4, 8]": 1}
        )

        store = await TrajectoryStore.open(fleet.trajectory_url)
        try:

            async def recorded() -> bool:
                found = await store.task(namespace, "t-1")
                return found is not None and found.complete

            await until(recorded, 60, "the task is recorded")
            history = EventManager.of(Recorded(store, namespace))
            messages = await history.messages_by_session_id("s-1")
            assert [message.category for message in messages] == ["tool", "agent", "tool", "agent", "task"]

            replayed = await replay(store, "t-1", app, namespace=namespace)
            assert replayed.run.same
            assert calls(tmp_path) == done

            before = calls(tmp_path)
            adder = next(id for id, run in replayed.runs.items() if run.agent == "adder").removeprefix("r/")
            fork = await client.fork("t-1", at=adder, input=40, task_id="f-1", store=store)
            assert (await fork.result(timeout=60)).value() == 40
            assert calls(tmp_path) == before, "all results were taken over"
        finally:
            await store.close()

        forked = json.loads(weft(fleet, "task", "fork", "t-1", "--at", adder, "--task-id", "f-2", "--wait", "--json"))
        assert (forked["status"], forked["output"]) == ("completed", 12)
        assert calls(tmp_path) - before == Counter({"adder [4, 8]": 1})
        shown = json.loads(weft(fleet, "task", "show", "f-2", "--json"))
        assert shown["forked_from"] == {"task": "t-1", "step": adder}
