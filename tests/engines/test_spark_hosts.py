"""Whole tasks on a real Spark: run by its workers, streamed, recorded, cancelled, and refused in one line."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from pyspark import cloudpickle

from runtime_core.engines.protocol import Pickled, Work
from runtime_core.integrations.aworld.engines import spark_hosts
from runtime_core.integrations.aworld.engines.packing import HostsSpec, pack
from runtime_core.integrations.aworld.target import TasksApp
from runtime_core.settings import Settings
from runtime_core.trajectory.store import TrajectoryStore
from tests.engines.conftest import SparkServer
from tests.servers.process import Server
from weft import AgentContext, App
from weft.aworld import Runners, Task
from weft.errors import ConfigurationError

# The first of them starts a JVM, which takes minutes on a machine that is busy enough.
pytestmark = pytest.mark.timeout(900)

app = App("on-spark")


@app.tool
def shout(text: str) -> str:
    return f"{text.upper()} {os.getpid()}"


async def speaker(ctx: AgentContext, words: list[str]) -> str:
    for word in words:
        await ctx.emit(word)
    shouted: str = await ctx.tool(shout, text=" ".join(words))
    return shouted


async def broken(ctx: AgentContext, text: str) -> str:
    raise ValueError(f"no {text}")


async def sleeper(ctx: AgentContext, file: str) -> None:
    """Writes into a file which process it is in, and does nothing for an hour."""
    await ctx.step(Path(file).write_text, str(os.getpid()))
    await ctx.emit("asleep")
    await ctx.sleep(3600)


@pytest.fixture(autouse=True)
def place(spark: SparkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run tasks on the session's server. They record into `tmp_path`."""
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WEFT_SPARK_REMOTE", spark.url)


async def test_tasks_run_on_sparks_workers_with_their_streams_and_records() -> None:
    tasks = [Task(id=f"t{n}", input=["hi", str(n)], agent=speaker) for n in range(6)]
    failing = Task(id="bad", input="x", agent=broken)
    found = await Runners.run_task([*tasks, failing], app=app, engine="spark", workers=2)
    answers = [found[task.id].value() for task in tasks]
    assert [answer.split()[:2] for answer in answers] == [["HI", str(n)] for n in range(6)]
    hosts = {answer.split()[2] for answer in answers}
    assert len(hosts) <= 2
    assert str(os.getpid()) not in hosts
    error = found["bad"].error
    assert error is not None
    assert (error["type"], error["message"]) == ("ValueError", "no x")
    store = await TrajectoryStore.open(Settings.from_environment(os.environ).trajectory_url)
    try:
        for task in tasks:
            recorded = await store.task("weft", task.id)
            assert recorded is not None
            assert recorded.complete
    finally:
        await store.close()


async def test_a_full_server_is_logged_and_only_running_hosts_count(
    spark: SparkServer,
    valkey: Server,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server runs four tasks at once."""
    monkeypatch.setattr(spark_hosts, "NO_PLACE_SECONDS", 0.5)
    environ = {"WEFT_REDIS_URL": valkey.url, "WEFT_NAMESPACE": namespace, "WEFT_SPARK_REMOTE": spark.url}
    settings = Settings.from_environment(environ).to_environment()
    sent = pack(TasksApp(app), "tests.engines.test_spark_hosts:app", cloudpickle.dumps)
    work = Work(Pickled(msgspec.msgpack.encode(HostsSpec(sent, settings, 6, 1, True))), "task hosts")
    backend = spark_hosts.SparkHostsBackend(environ)
    await backend.connect()
    reported: list[int] = []
    running = asyncio.create_task(backend.run(work, lambda report: reported.append(json.loads(report)["hosts"])))
    try:
        async with asyncio.timeout(300):
            while "where 4 of 6 hosts run" not in caplog.text:  # no event tells of a log line
                await asyncio.sleep(0.05)
                assert not running.done(), running.result()
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await backend.close()
    assert max(reported) == 4


async def test_a_cancelled_call_ends_its_tasks_and_its_hosts(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    task = Task(input=str(file), agent=sleeper)
    events = Runners.streaming_run_task(task, app=app, engine="spark", workers=1)
    async for event in events:
        if event.text == "asleep":
            break
    await events.aclose()
    pid = int(file.read_text())

    def lives() -> bool:
        try:
            return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    async with asyncio.timeout(60):
        while lives():  # no event says that a process of another program ends
            await asyncio.sleep(0.05)


async def test_an_app_that_cannot_be_rebuilt_there_is_refused_before_any_task_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile_app.py").write_text(
        "import os\nfrom weft import App\nif os.getpid() != int(os.environ['ONLY_HERE']):\n"
        "    raise RuntimeError('not here')\napp = App('fragile')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ONLY_HERE", str(os.getpid()))
    monkeypatch.setenv("WEFT_APP", "fragile_app:app")
    with pytest.raises(ConfigurationError, match=r"engine 'spark': .*fragile_app"):
        await Runners.run("x", agent=broken, engine="spark", workers=1)
