"""Whole tasks on a real Ray: spread over its workers, streamed, recorded, and surviving kills of all their hosts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from runtime_core.integrations.aworld.engines import target as engines_target
from runtime_core.settings import Settings
from runtime_core.trajectory.store import TrajectoryStore
from tests.engines.ray_cluster import RayCluster
from tests.servers.process import Server
from weft import AgentContext, App, Client, StreamEvent
from weft.aworld import Runners, Task
from weft.errors import ConfigurationError, InvalidInput

PATIENCE_SECONDS = 150.0
"""Of whoever waits for something that must come; it decides nothing."""

app = App("on-ray")


@app.tool
def shout(text: str) -> str:
    return f"{text.upper()} {os.getpid()}"


async def here(ctx: AgentContext, folder: str) -> int:
    """Ends once agents of two processes have begun, and returns the process that it is in."""

    def meet() -> int:
        (Path(folder) / str(os.getpid())).touch()
        until(lambda: len(os.listdir(folder)) >= 2)
        return os.getpid()

    pid: int = await ctx.step(meet)
    return pid


async def broken(ctx: AgentContext, text: str) -> str:
    raise ValueError(f"no {text}")


async def speaker(ctx: AgentContext, words: list[str]) -> str:
    for word in words:
        await ctx.emit(word)
    shouted: str = await ctx.tool(shout, text=" ".join(words))
    return shouted


async def two_parts(ctx: AgentContext, file: str) -> list[int]:
    """Two steps with a wait in between; each writes a line when it has ended."""

    def part(name: str) -> int:
        with Path(file).open("a") as lines:
            lines.write(f"{name} {os.getpid()}\n")
        return os.getpid()

    first = await ctx.step(part, "first")
    await ctx.sleep(2)
    return [first, await ctx.step(part, "second")]


async def sleeper(ctx: AgentContext, file: str) -> str:
    """Writes into a file which process it is in, and does nothing for an hour."""
    await ctx.step(Path(file).write_text, str(os.getpid()))
    await ctx.sleep(3600)
    return "slept"


def lives(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen"
        time.sleep(0.02)


async def until_async(condition: Callable[[], bool], running: asyncio.Task[object]) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert not running.done(), running.result()
        assert time.monotonic() < give_up_at, "it did not happen"
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run tasks on the session's cluster. Without a broker of their own they record into `tmp_path`."""
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    if "ray_cluster" in request.fixturenames:
        monkeypatch.setenv("WEFT_RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)


async def test_tasks_are_spread_over_workers_of_ray_and_a_failing_one_touches_no_other(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    met = tmp_path / "met"
    met.mkdir()
    wanted = [Task(id=f"t-{n}", input=str(met), agent=here) for n in range(40)]
    wanted.insert(7, Task(id="bad", input="luck", agent=broken))

    found = await Runners.run_task(wanted, engine="ray", workers=2)

    assert list(found) == [task.id for task in wanted]
    assert found.pop("bad").msg == "no luck"
    hosts = {response.value() for response in found.values()}
    assert len(hosts) == 2
    assert os.getpid() not in hosts
    # What they did is recorded where `weft up` would record it.
    store = await TrajectoryStore.open(Settings.from_environment(os.environ).trajectory_url)
    try:
        for task in ("t-0", "t-39", "bad"):
            recorded = await store.task("weft", task)
            assert recorded is not None
            assert recorded.complete
    finally:
        await store.close()
    until(lambda: not any(map(lives, hosts)))


async def test_events_come_in_their_order(ray_cluster: RayCluster) -> None:
    words = [f"word-{n} " for n in range(20)]
    task = Task(input=words, agent=speaker, streaming_mode="all", conf={"engine": "ray"})

    events = [event async for event in Runners.streaming_run_task(task, app=app, workers=1)]

    assert [event.text for event in events if event.text] == words
    shown = [step["name"] for event in events[:-1] for step in event.data.get("steps", [])]
    assert {"speaker", "shout", "weft.task"} <= set(shown)
    assert [event.response is not None for event in events] == [False] * (len(events) - 1) + [True]
    last = events[-1].response
    assert last is not None
    text, _, pid = last.value().rpartition(" ")
    assert text == " ".join(words).upper()
    assert int(pid) != os.getpid()


async def test_another_worker_continues_the_work_of_a_killed_one(ray_cluster: RayCluster, tmp_path: Path) -> None:
    files = [tmp_path / f"lines-{n}" for n in range(10)]
    wanted = [Task(id=f"k-{n}", input=str(file), agent=two_parts) for n, file in enumerate(files)]
    # One host: the tasks can end only where another one follows it.
    running = asyncio.create_task(Runners.run_task(wanted, engine="ray", workers=1))
    await until_async(lambda: all(file.exists() for file in files), running)
    killed = int(files[0].read_text().split()[1])
    os.kill(killed, signal.SIGKILL)

    found = await running

    assert [response.status for response in found.values()] == ["completed"] * 10
    for file, response in zip(files, found.values(), strict=True):
        # A step that had ended, but was not journaled yet, is done again; what counts is the last time.
        assert dict(line.split() for line in file.read_text().splitlines()) == {
            "first": str(response.value()[0]),
            "second": str(response.value()[1]),
        }
        assert response.value()[1] != killed


@pytest.mark.timeout(900)  # Ray starts twice here, and joins three times: minutes on a busy machine
async def test_tasks_continue_or_end_after_the_ray_head_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayCluster(cpus=1) as cluster:
        monkeypatch.setenv("WEFT_RAY_ADDRESS", cluster.address)
        files = [tmp_path / f"lines-{n}" for n in range(4)]
        wanted = [Task(id=f"h-{n}", input=str(file), agent=two_parts) for n, file in enumerate(files)]
        running = asyncio.create_task(Runners.run_task(wanted, engine="ray", workers=1))
        await until_async(lambda: all(file.exists() for file in files), running)
        await asyncio.to_thread(cluster.kill)
        await asyncio.to_thread(cluster.start)
        assert [(response.status, response.error) for response in (await running).values()] == [("completed", None)] * 4

        told: list[StreamEvent] = []
        host = tmp_path / "host"

        async def follow() -> None:
            task = Task(id="gone", input=str(host), agent=sleeper)
            told.extend([event async for event in Runners.streaming_run_task(task, engine="ray", workers=1)])

        following = asyncio.create_task(follow())
        await until_async(host.exists, following)
        monkeypatch.setattr(engines_target, "NO_HOST_SECONDS", 1.0)
        await asyncio.to_thread(cluster.kill)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await following

    response = told[-1].response
    assert response is not None
    assert response.error is not None
    assert response.error["type"] == "EngineUnavailable"
    assert "no host on Ray" in response.msg


async def test_a_call_that_is_cancelled_cancels_its_tasks_and_leaves_no_host(
    ray_cluster: RayCluster, valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", namespace)
    files = [tmp_path / f"host-{n}" for n in range(3)]
    wanted = [Task(id=f"c-{n}", input=str(file), agent=sleeper) for n, file in enumerate(files)]
    running = asyncio.create_task(Runners.run_task(wanted, engine="ray", url=valkey.url, workers=1))
    await until_async(lambda: all(file.exists() and file.read_text() for file in files), running)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async with Client.connect(valkey.url, namespace=namespace) as client:
        for task in wanted:
            response = await (await client.task(task.id)).result(PATIENCE_SECONDS)
            assert response.status == "cancelled"
    until(lambda: not any(lives(int(file.read_text())) for file in files))


async def test_objects_without_a_module_are_sent_with_their_code_or_named_in_an_error(
    ray_cluster: RayCluster,
) -> None:
    own = App("nowhere")
    ending = "!"

    @own.tool
    def louder(text: str) -> str:
        return text + ending

    @own.agent("echo")
    async def echo(ctx: AgentContext, text: str) -> str:
        return str(await ctx.tool(louder, text=text))

    response = await Runners.run("hello", agent=echo, app=own, engine="ray", workers=1)
    assert response.value() == "hello!"

    lock = threading.Lock()

    async def locked(ctx: AgentContext, text: str) -> str:
        return str(lock)

    with pytest.raises(InvalidInput, match=r"agent 'locked' cannot be sent to another process: .*lock") as refused:
        await Runners.run("hello", agent=locked, engine="ray")
    assert refused.value.field == "agent"


async def test_a_missing_ray_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_RAY_ADDRESS", "127.0.0.2:1")
    with pytest.raises(ConfigurationError, match=r"^engine 'ray': no Ray at WEFT_RAY_ADDRESS=127\.0\.0\.2:1"):
        await Runners.run("hello", agent=broken, engine="ray")
