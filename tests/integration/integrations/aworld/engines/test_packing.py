"""An app outside the process that made it: sent, unpacked, and hosted on a broker."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

from runtime_core.host import app_services
from runtime_core.integrations.aworld.engines.packing import PackedApp, pack, reference_of, unpack
from runtime_core.integrations.aworld.target import TasksApp
from runtime_core.settings import Settings
from tests.servers.process import Server
from weft import AgentContext, App, Client
from weft.aworld import Runners, Swarm, Task, TaskRunner
from weft.errors import ConfigurationError, InvalidInput

app = App("hosted")


@app.tool(pool="far")
def double(text: str) -> str:
    return text * 2


@app.agent("doubler", pool="near")
async def doubler(ctx: AgentContext, text: str) -> str:
    doubled: str = await ctx.tool(double, text=text)
    return doubled


async def upper(ctx: AgentContext, text: str) -> str:
    return text.upper()


class Whispering(TaskRunner):
    pass


class Refusing:
    """A tool that no other process can have."""

    def step(self, args: object) -> object:
        return args

    def __reduce__(self) -> str:
        raise TypeError("it is only here")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WEFT_REDIS_URL", "WEFT_RAY_ADDRESS", "WEFT_APP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))


def sent(*tasks: Task, base: App | None = app) -> PackedApp:
    made = TasksApp(base, "sent-tasks")
    for task in tasks:
        made.take(task)
    return pack(made, "", pickle.dumps)


def test_an_app_of_a_module_travels_by_its_name() -> None:
    packed = sent(Task(input="a", agent=doubler))
    assert packed.base == f"{__name__}:app"
    assert packed.pickled == b""
    assert unpack(packed, pickle.loads) is app


def test_objects_in_tasks_are_sent_with_the_app_under_the_same_names() -> None:
    packed = sent(Task(input="a", swarm=Swarm(upper, doubler), runner_cls=Whispering), Task(input="b", agent=upper))
    made = unpack(packed, pickle.loads)
    assert made.name == "sent-tasks"
    assert {"doubler", "upper", "weft.task", "weft.task.Whispering"} < set(made.agents)
    # One object that two tasks hold is one agent there too.
    assert [name for name in made.agents if name.startswith("upper")] == ["upper"]


def test_an_app_outside_any_module_travels_with_its_declarations() -> None:
    own = App("nowhere")
    own.agent("upper")(upper)
    assert reference_of(own) == ""
    made = unpack(sent(Task(input="a", agent=upper), base=own), pickle.loads)
    assert made is not own
    assert made.name == "nowhere"
    assert made.agents["upper"].source is upper


def test_an_unsendable_tool_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"tool 'Refusing' cannot be sent to another process: TypeError: it is only"):
        sent(Task(input="a", agent=doubler, tools=[Refusing()]))


def test_an_app_that_cannot_be_imported_there_is_reported_in_one_line() -> None:
    packed = PackedApp("sent-tasks", "tests.no_such_module:app", ".", [], b"")
    with pytest.raises(ConfigurationError, match=r"there is no module 'tests\.no_such_module'"):
        unpack(packed, pickle.loads)
    broken = PackedApp("sent-tasks", "", ".", [], pickle.dumps((None, [])).replace(b"N", b"c", 1))
    with pytest.raises(ConfigurationError, match="the tasks' objects cannot be rebuilt in another process"):
        unpack(broken, pickle.loads)


async def test_a_hosted_app_serves_all_its_pools(valkey: Server, namespace: str) -> None:
    settings = Settings.from_environment({"WEFT_REDIS_URL": valkey.url, "WEFT_NAMESPACE": namespace})
    hosted = await app_services.build_task_host(
        unpack(sent(Task(input="a", agent=doubler)), pickle.loads), settings, in_flight=16
    )
    await hosted.start()
    running = asyncio.create_task(hosted.run())
    try:
        async with Client.connect(valkey.url, namespace=namespace) as client:
            tasks = [Task(input=str(number), agent=doubler) for number in range(40)]
            found = await Runners.run_task(tasks, client=client, app=app)
        assert [response.value() for response in found.values()] == [2 * str(number) for number in range(40)]
    finally:
        await hosted.stop()
    await running
