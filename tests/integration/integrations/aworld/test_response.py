"""What a response says about its task: decisions, model calls, context, trace, partial results and tracebacks."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from runtime_core.settings import Settings
from runtime_core.trajectory.store import TrajectoryStore
from tests.fleet import Fleet
from tests.integration.llm.desk import Desk
from tests.mcp_servers.ledger import Ledger
from tests.openai_server.driver import OpenAIServer, When, answer, calls
from tests.servers.process import Server
from weft import AgentContext, App, Client, TaskResponse, ToolContext
from weft.aworld import (
    ActionModel,
    DefaultTrajectoryStrategy,
    Handler,
    Handoff,
    HandoffSwarm,
    HybridSwarm,
    Loopable,
    Message,
    Observation,
    Runners,
    Swarm,
    Task,
    TaskRunner,
    TaskStatus,
    TeamSwarm,
    TrajectoryItem,
)
from weft.errors import ConfigurationError, InvalidInput
from weft.trajectory import TaskTrajectory

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


async def upper(ctx: AgentContext, text: str) -> str:
    return text.upper()


async def exclaim(ctx: AgentContext, text: str) -> str:
    return text + "!"


async def broken(ctx: AgentContext, text: str) -> str:
    raise ValueError(f"no {text}")


# ---- trajectories ----------------------------------------------------------------------------------------------


class Shouting(DefaultTrajectoryStrategy):
    """Notes what it sees."""

    seen: ClassVar[list[str]] = []

    def keep(self, item: TrajectoryItem) -> bool:
        self.seen.append(item.meta.agent)
        return item.meta.agent != "weft.task"


class BuildsLater(DefaultTrajectoryStrategy):
    """Overrides a sync method by an async one."""

    async def build(self, decision: Any) -> Any:  # type: ignore[override]  # Any: never called
        ...


async def test_a_plain_run_is_recorded_and_its_response_has_the_items(data_folder: Path) -> None:
    response = await Runners.run("hi", swarm=Swarm(upper, exclaim), id="twice")
    assert [(item.meta.agent, item.action.content) for item in response.trajectory] == [
        ("weft.task", "HI!"),
        ("upper", "HI"),
        ("exclaim", "HI!"),
    ]
    # The same id again is another task, whose record replaces the first.
    again = await Runners.run("ho", swarm=Swarm(upper, exclaim), id="twice")
    assert [item.action.content for item in again.trajectory] == ["HO!", "HO", "HO!"]
    store = await TrajectoryStore.open(f"sqlite:///{data_folder / 'trajectory.db'}")
    recorded = await store.task("weft", "twice")
    await store.close()
    assert recorded is not None
    assert recorded.complete


async def test_recording_can_be_off_or_elsewhere(data_folder: Path, tmp_path: Path) -> None:
    response = await Runners.run("hi", agent=upper, trajectory=False)
    assert (response.answer, response.trajectory, response.llm_calls) == ("HI", [], [])
    assert not data_folder.exists()
    elsewhere = tmp_path / "elsewhere.db"
    assert (await Runners.run("hi", agent=upper, trajectory=f"sqlite:///{elsewhere}")).trajectory
    assert elsewhere.exists()
    with pytest.raises(InvalidInput, match="trajectory: 5 is not True, False or the URL of a store"):
        await Runners.run("hi", agent=upper, trajectory=5)  # type: ignore[arg-type]  # wrong on purpose


async def test_a_data_folder_that_cannot_be_created_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"WEFT_DATA_DIR=.*; or pass trajectory=False to record nothing"):
        await Runners.run("hi", agent=upper)


@pytest.mark.parametrize("strategy", [Shouting, Shouting(), f"{__name__}.Shouting"], ids=["class", "object", "name"])
async def test_the_strategy_of_the_task_builds_the_items(strategy: object) -> None:
    Shouting.seen.clear()
    response = await Runners.run("hi", agent=upper, conf={"trajectory_strategy": strategy})
    assert Shouting.seen == ["weft.task", "upper"]
    assert [item.meta.agent for item in response.trajectory] == ["upper"]


async def test_a_strategy_that_raises_ends_the_task_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(DefaultTrajectoryStrategy):
        def items(self, trajectory: TaskTrajectory) -> list[TrajectoryItem]:
            raise ValueError("no items")

    task = Task(input="hi", agent=upper, conf={"trajectory_strategy": Raises()})
    response = (await Runners.run_task(task))[task.id]
    assert (response.status, response.output, task.task_status) == ("failed", "HI", TaskStatus.FAILED)
    assert response.error is not None
    assert (response.error["type"], response.error["message"]) == ("ValueError", "no items")
    assert 'raise ValueError("no items")' in response.error["traceback"]
    assert any("its trajectory strategy failed" in each.message and each.exc_info for each in caplog.records)


async def test_strategies_that_do_not_exist_are_refused_at_the_call() -> None:
    for strategy, said in (
        ("nowhere.Strategy", "'nowhere.Strategy' cannot be found: No module named 'nowhere'"),
        (f"{__name__}.Nothing", "cannot be found"),
        (f"{__name__}.ROOT", "is not a TrajectoryStrategy"),
        (BuildsLater(), "has async def build: write def build"),
    ):
        with pytest.raises(InvalidInput, match=rf"conf\.trajectory_strategy: .*{said}"):
            await Runners.run("hi", agent=upper, conf={"trajectory_strategy": strategy})


async def test_a_runner_has_the_items_of_its_agents_before_it_ends() -> None:
    class Saves(TaskRunner):
        async def _save_trajectories(self) -> None:
            await super()._save_trajectories()
            assert [(item["agent"], item["input"], item["output"]) for item in self.trajectory] == [
                ("upper", "hi", "HI"),
                ("exclaim", "HI", "HI!"),
            ]
            await self.ctx.step(lambda: len(self.trajectory), name="saved")

    for event_driven in (True, False):
        task = Task(input="hi", swarm=Swarm(upper, exclaim), runner_cls=Saves, event_driven=event_driven)
        assert (await Runners.run_task(task))[task.id].value() == "HI!"


async def test_services_give_the_contents_of_their_store(
    valkey: Server, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runners_app:app") as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        path = str(tmp_path / "effects")
        url = Settings.from_environment(fleet.environ).trajectory_url
        response = await Runners.run({"path": path, "way": []}, agent="first", client=client, trajectory=url)
        assert [item.meta.agent for item in response.trajectory] == ["weft.task", "first"]
        assert (await Runners.run({"path": path, "way": []}, agent="first", client=client)).trajectory == []
        # Whoever knows the store gets the traceback; others hear where it is.
        failed = await Runners.run(path, runner_cls="FailsAlways", client=client, trajectory=url)
        assert failed.error is not None
        assert 'raise ValueError("never")' in failed.error["traceback"]
        caplog.clear()
        failed = await Runners.run(path, runner_cls="FailsAlways", client=client)
        assert failed.error == {"type": "ValueError", "message": "never"}
        assert "ValueError: never; if code raised it, the log of the services has the traceback" in caplog.text
        assert 'raise ValueError("never")' in fleet.members["agent-handler-1"].text()


# ---- the other fields ------------------------------------------------------------------------------------------


async def test_a_response_has_the_model_calls(openai_server: OpenAIServer) -> None:
    desk = Desk(openai_server)
    desk.add(tools=["search"], instructions="Search.")
    desk.server.play(
        calls(("search", {"query": "weft"}), when=When(tool_results=0)), answer("Found.", when=When(tool_results=1))
    )
    response = await Runners.run("Find out.", agent="researcher", app=desk.app)
    assert response.answer == "Found."
    first, second = response.llm_calls
    assert (first["agent"], first["tool_calls"][0]["name"], second["content"]) == ("researcher", "search", "Found.")
    assert len(second["messages"]) > len(first["messages"]) > 0
    assert first["usage"]
    assert first["error"] is None
    assert [item.meta.agent for item in response.trajectory] == ["weft.task", "researcher", "researcher"]


async def test_a_response_has_the_context_and_a_session_keeps_it() -> None:
    app = App("visits")
    app.add_sessions()

    @app.agent("visits")
    async def visits(ctx: AgentContext, name: str) -> list[str]:
        ctx.context.put("visitors", [*ctx.context.get("visitors", []), name])
        found: list[str] = ctx.context.get("visitors")
        return found

    def task(name: str, **fields: Any) -> Task:
        return Task(
            id=name, input=name, agent="visits", session_id="s", context={"by": name},
            context_config={"session": True, **fields},
        )  # fmt: skip

    found = await Runners.run_task([task("Ada"), task("Bob"), task("Cy", response=False)], app=app, concurrency=1)
    assert found["Bob"].answer == ["Ada", "Bob"]
    assert found["Bob"].context == {"by": "Bob", "visitors": ["Ada", "Bob"]}
    assert (found["Cy"].answer, found["Cy"].context) == (["Ada", "Bob", "Cy"], {})


async def test_the_trace_of_a_task_is_the_given_one_or_its_own() -> None:
    seen: list[str] = []
    app = App("traced")

    @app.tool
    def note(ctx: ToolContext) -> None:
        seen.append(ctx.traceparent)

    @app.agent("notes")
    async def notes(ctx: AgentContext, text: str) -> None:
        await ctx.tool(note)

    trace = "0af7651916cd43dd8448eb211c80319c"
    assert (await Runners.run("x", agent="notes", app=app, trace_id=trace)).trace_id == trace
    assert seen[0].split("-")[1] == trace
    own = await Runners.run("x", agent="notes", app=app)
    assert len(own.trace_id) == 32
    assert own.trace_id != trace


async def test_tools_get_the_settings_of_the_task() -> None:
    class Browser:
        name = "browser"

        def step(self, args: object, conf: dict[str, object]) -> object:
            return [args, conf]

    app = App("conf")

    @app.tool
    def search(query: str, ctx: ToolContext) -> object:
        return dict(ctx.conf)

    @app.agent("inner")
    async def inner(ctx: AgentContext, text: str) -> object:
        return [await ctx.tool("search", query=text), await ctx.tool("browser", args=text)]

    @app.agent("outer")
    async def outer(ctx: AgentContext, text: str) -> object:
        return await ctx.agent("inner", text)

    conf: dict[str, dict[str, Any]] = {"search": {"limit": 3}, "browser": {"headless": True}}
    task = Task(input="x", agent="outer", tools=[Browser()], tool_names=["search"], tools_conf=conf)
    assert (await Runners.run_task(task, app=app))[task.id].value() == [{"limit": 3}, ["x", {"headless": True}]]


async def test_a_task_brings_its_own_mcp_servers(tmp_path: Path, valkey: Server, namespace: str) -> None:
    async def uses(ctx: AgentContext, text: str) -> str:
        return str((await ctx.tool("desk.echo", text=text))["text"])

    server = {
        "command": sys.executable,
        "args": ["-m", "tests.mcp_servers.desk"],
        "cwd": str(ROOT),
        "env": dict(Ledger(tmp_path / "ledger").env),
    }
    conf = {"mcpServers": {"desk": server}}
    assert (await Runners.run("a", agent=uses, mcp_servers_conf=conf)).value() == "a"
    async with Client.connect(valkey.url, namespace=namespace) as client:
        with pytest.raises(InvalidInput, match="mcp_servers_conf: services run only what their app declares"):
            await Runners.run("a", agent="uses", mcp_servers_conf=conf, client=client)


async def test_a_runner_that_ran_out_of_time_keeps_its_output() -> None:
    class Late(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            return TaskResponse(task_id=self.task.id, content={"found": [1, 2]}, status="timeout", msg="too late")

    task = Task(input="x", agent=upper, runner_cls=Late)
    response = (await Runners.run_task(task))[task.id]
    assert (response.status, response.output, task.task_status) == ("failed", {"found": [1, 2]}, TaskStatus.TIMEOUT)
    assert response.error == {"type": "TimeLimit", "message": "too late"}
    async for event in Runners.streaming_run("x", agent=upper, runner_cls=Late):
        last = event
    assert last.response == dataclasses.replace(last.response, output={"found": [1, 2]}) if last.response else False


@pytest.mark.parametrize("mode", ["interactive", "INTERACTIVE", "One_Way"])
def test_a_run_mode_is_known_in_any_case(mode: str) -> None:
    assert Task(input="x", conf={"run_mode": mode}).config.run_mode == mode.lower()


# ---- errors of the user's code ---------------------------------------------------------------------------------


async def test_code_that_raises_ends_the_task_with_its_traceback_in_the_log_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaks(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            raise ValueError("broken runner")

    class Refuses(Handler):
        async def handle(self, message: Message) -> Any:  # Any: an async generator that never yields
            raise ValueError("broken handler")
            yield

    app = App("breaks")
    app.handlers["mine"] = Refuses
    for fields, said in (
        ({"agent": upper, "runner_cls": Breaks}, "broken runner"),
        ({"agent": upper, "conf": {"handlers": {"agent": "mine"}}}, "broken handler"),
    ):
        caplog.clear()
        response = await Runners.run("x", app=app, **fields)  # type: ignore[arg-type]  # fields of Task
        assert (response.status, response.msg) == ("failed", said)
        assert response.error is not None
        assert f'raise ValueError("{said}")' in response.error["traceback"]
        assert any(f'raise ValueError("{said}")' in each.getMessage() for each in caplog.records)


# ---- both modes --------------------------------------------------------------------------------------------------


async def hands(ctx: AgentContext, seen: Observation) -> object:
    return Handoff("exclaim", seen.content) if "exclaim" in seen.info.get("handoffs", ()) else seen.content


class Leads:
    """Asks two members, then answers with what they said."""

    name = "leads"

    async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
        if observation.action_result:
            return [ActionModel(policy_info=[each.content or each.error for each in observation.action_result])]
        return [ActionModel(name, params={"content": observation.content}) for name in ("upper", "exclaim")]


SWARMS: dict[str, Callable[[], Swarm]] = {
    "workflow": lambda: Swarm(upper, exclaim),
    "group": lambda: Swarm(upper, [exclaim, leads], count),
    "nested": lambda: Swarm(Swarm(upper, exclaim), exclaim),
    "loop": lambda: Swarm(Loopable(exclaim, 3, lambda text: str(text).endswith("!!"))),
    "handoff": lambda: HandoffSwarm((hands, exclaim)),
    "endless": lambda: HandoffSwarm((always, other), (other, always)),
    "team": lambda: TeamSwarm(Leads(), upper, exclaim),
    "hybrid": lambda: HybridSwarm(Leads(), upper, exclaim),
    "error": lambda: Swarm(upper, broken),
    "group_error": lambda: Swarm([upper, broken]),
    "unknown": lambda: HandoffSwarm((lost, upper)),
}


async def leads(ctx: AgentContext, text: str) -> str:
    return text.title()


async def count(ctx: AgentContext, parts: list[str]) -> int:
    return len(parts)


async def always(ctx: AgentContext, text: str) -> object:
    return {"handoff": "other", "content": text}


async def other(ctx: AgentContext, text: str) -> object:
    return {"handoff": "always", "content": text}


async def lost(ctx: AgentContext, text: str) -> object:
    return {"handoff": "nowhere", "content": text}


@pytest.mark.parametrize("shape", list(SWARMS))
async def test_both_modes_give_the_same_result_for_the_same_swarm(shape: str) -> None:
    found = []
    for event_driven in (True, False):
        response = await Runners.run("hi", swarm=SWARMS[shape](), event_driven=event_driven)
        error = response.error or {}
        agents = [(item.meta.agent, item.action.content) for item in response.trajectory]
        found.append((response.status, response.output, error.get("type"), error.get("message"), agents))
    assert found[0] == found[1]
    assert found[0][0] == ("failed" if shape in ("error", "group_error", "endless", "unknown") else "completed")


async def test_a_call_driven_run_emits_no_messages_and_outlives_a_kill(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects"
    async with (
        Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runners_app:app") as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        swarm = Swarm("first", ["left", "right"], "joins")
        url = Settings.from_environment(fleet.environ).trajectory_url
        running = asyncio.create_task(
            Runners.run({"path": str(path), "way": []}, swarm=swarm, event_driven=False, client=client, trajectory=url)
        )
        async with asyncio.timeout(60):
            while not (path.exists() and "tool first" in path.read_text()):
                await asyncio.sleep(0.02)
        fleet.kill("agent-handler-1")
        response = await running
        assert response.value()["way"] == [["first", "left"], ["first", "right"]]
        store = await TrajectoryStore.open(url)
        recorded = await store.task(namespace, response.task_id)
        await store.close()
        assert recorded is not None
        assert not [step for step in recorded.steps if step.kind == "message"]
