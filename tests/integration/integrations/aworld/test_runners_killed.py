"""Runners and swarms on real services, whose processes are killed in the middle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.orchestration import Swarm
from runtime_core.integrations.aworld.runners import Runners
from runtime_core.integrations.aworld.task import Task
from tests.apps.runners_app import FailsAlways, Noting
from tests.fleet import Fleet, until
from tests.servers.matrix import only_in_matrix, repeat_on
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

APP = "tests.apps.runners_app:app"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def noted(path: Path, line: str) -> None:
    """Wait until there is a line that begins like this."""

    async def there() -> bool:
        return any(each.startswith(line) for each in lines(path))

    await until(there, 30, f"{line!r} in {path}")


@pytest.mark.parametrize("kind", repeat_on("redis-7.0", "valkey-9"))
async def test_a_custom_runner_outlives_kills_of_its_handler(
    kind: str, shared_server: Callable[[str], Server], namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    server = shared_server(kind)
    async with (
        Fleet(server.url, namespace, tmp_path, app=APP) as fleet,
        Client.connect(server.url, namespace=namespace) as client,
    ):
        task = Task(id="custom", input=str(path), runner_cls=Noting, tool_names=["effect"])
        running = asyncio.create_task(Runners.run_task(task, client=client))
        # While a tool runs and the runner waits for it; then while the runner itself is at work.
        await noted(path, "tool t0")
        fleet.kill("agent-handler-1")
        await noted(path, "busy 1")
        fleet.kill("agent-handler-1")
        response = (await running)["custom"]
        assert response.answer == ["t0", "t1", "t2"]
        found = Counter(lines(path))
        # What was finished before a kill is not done again; `busy 1` was not.
        assert [found[line] for line in ("pre", "do 0", "do 1", "do 2", "busy 0", "post")] == [1] * 6
        assert sum(line.startswith("tool") for line in found) == 3
        again = await Runners.run_task(task, client=client)
        assert again["custom"].answer == response.answer
        assert Counter(lines(path)) == found


async def test_a_swarm_outlives_kills_of_its_handler(valkey: Server, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "effects"
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        swarm = Swarm("first", ["left", "right"], "joins")
        running = asyncio.create_task(Runners.run({"path": str(path), "way": []}, swarm=swarm, client=client))
        await noted(path, "tool first")
        fleet.kill("agent-handler-1")
        await noted(path, "tool left")
        fleet.kill("agent-handler-1")
        response = await running
        assert response.value()["way"] == [["first", "left"], ["first", "right"]]
        found = Counter(line for line in lines(path) if line.startswith("agent"))
        assert found == {"agent first": 1, "agent left": 1, "agent right": 1}


@only_in_matrix("what outlives the kill")
async def test_the_limits_of_a_tasks_tools_outlive_a_kill(valkey: Server, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "effects"
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        swarm = Swarm("first", "pries")
        running = asyncio.create_task(
            Runners.run({"path": str(path), "way": []}, swarm=swarm, tool_names=["effect"], client=client)
        )
        await noted(path, "busy 7")
        fleet.kill("agent-handler-1")
        assert (await running).value() == "NotAllowed"
        assert "tool secret" not in lines(path)
        assert sum(line.startswith("tool allowed") for line in lines(path)) == 1


@only_in_matrix("what outlives the kill")
async def test_the_attributes_of_an_object_outlive_a_kill(valkey: Server, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "effects"
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        observation = {"content": str(path), "info": {"path": str(path)}}
        task = Task(id="learns", agent="learns", observation=observation)
        running = asyncio.create_task(Runners.run_task(task, client=client))
        await noted(path, "tool c2")
        fleet.kill("agent-handler-1")
        assert (await running)["learns"].answer == 5
        assert [line.split()[1] for line in lines(path)] == ["c1", "c2", "c3", "c4"]


@only_in_matrix("what outlives the kill")
async def test_attempts_are_counted_across_a_kill(valkey: Server, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "effects"
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        task = Task(id="fails", input=str(path), runner_cls=FailsAlways, max_retry_count=2)
        running = asyncio.create_task(Runners.run_task(task, client=client))
        await noted(path, "try")
        fleet.kill("agent-handler-1")
        response = (await running)["fails"]
        assert (response.status, response.msg) == ("failed", "never")
        assert lines(path) == ["try"] * 3


async def test_services_refuse_undeclared_names(valkey: Server, namespace: str, tmp_path: Path) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, app=APP),
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        with pytest.raises(InvalidInput, match=r"^agent: no agent is named 'nobody'; choose from first, "):
            await Runners.run("x", agent="nobody", client=client)
        with pytest.raises(InvalidInput, match=r"^runner_cls: no app there has a runner named 'Missing'"):
            await Runners.run("x", agent="first", runner_cls="some.package.Missing", client=client)
        # A client in another language names a runner and an agent in the same way.
        handle = await client.submit("weft.task", {"agent": "first", "input": {"path": str(tmp_path / "e"), "way": []}})
        assert (await handle.result(timeout=60)).value()["way"] == ["first"]


async def test_the_environment_says_where_tasks_run(
    valkey: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_REDIS_URL", valkey.url)
    monkeypatch.setenv("WEFT_NAMESPACE", namespace)
    input = {"path": str(tmp_path / "effects"), "way": []}
    async with Fleet(valkey.url, namespace, tmp_path, app=APP):
        assert (await Runners.run(input, agent="first")).value()["way"] == ["first"]
        assert (await asyncio.to_thread(Runners.sync_run, input, swarm=Swarm("first"))).value()["way"] == ["first"]
        events = [event async for event in Runners.streaming_run(input, agent="first", streaming_mode="core")]
        assert events[-1].response is not None
        assert [event.type for event in events[:-1]].count("weft.step.recorded") == len(events) - 1
        assert {row["name"] for event in events[:-1] for row in event.data["steps"]} >= {"first", "effect"}
