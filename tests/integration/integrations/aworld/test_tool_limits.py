"""The tools that a task, or an agent, is limited to: no agent of the task can call another one, however it tries."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.integration.llm.desk import Desk
from tests.mcp_servers.ledger import Ledger
from tests.openai_server.driver import OpenAIServer, When, answer, calls
from weft import AgentContext, App, TaskResponse
from weft.aworld import (
    ActionModel,
    HandoffSwarm,
    Observation,
    Runners,
    Swarm,
    Task,
    TaskRunner,
    TeamSwarm,
    ToolMessage,
)
from weft.errors import ConfigurationError, InvalidInput, ToolError

ROOT = Path(__file__).resolve().parents[4]
REFUSED = "tool 'secret' is not allowed here, only other: add it to tool_names of the task or the agent"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


@pytest.fixture
def called() -> list[str]:
    """The calls that reached a tool."""
    return []


@pytest.fixture
def desk(called: list[str]) -> App:
    app = App("desk")

    @app.tool
    def other(text: str) -> str:
        called.append("other")
        return text

    @app.tool
    def secret(text: str) -> str:
        called.append("secret")
        return f"the secret of {text}"

    @app.tool
    def secret__open(text: str) -> str:
        called.append("secret__open")
        return text

    async def tries(ctx: AgentContext, text: str) -> str:
        try:
            return str(await ctx.tool("secret", text=text))
        except ToolError as error:
            return f"{error.type}: {error.message}"

    async def asks(ctx: AgentContext, text: str) -> str:
        return str(await ctx.agent("tries", text))

    app.agent("tries")(tries)
    app.agent("asks")(asks)
    return app


class Forges:
    """Names a tool that it was not given."""

    name = "forges"

    def __init__(self, tool: str = "secret", action: str = "") -> None:
        self.tool, self.action = tool, action

    async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
        if observation.action_result:
            result = observation.action_result[0]
            return [ActionModel(policy_info=result.content if result.success else result.error)]
        return [ActionModel(self.tool, self.action, params={"content" if self.tool == "tries" else "text": "it"})]


def refused(response: TaskResponse) -> bool:
    return REFUSED in str(response.value())


async def test_an_action_that_names_a_tool_outside_the_tasks_list_is_refused(desk: App, called: list[str]) -> None:
    response = await Runners.run("it", agent=Forges(), tool_names=["other"], app=desk)
    assert refused(response)
    assert called == []
    assert (await Runners.run("it", agent=Forges(), tool_names=["secret"], app=desk)).answer == "the secret of it"
    assert (await Runners.run("it", agent=Forges("other"), tool_names=["other"], app=desk)).answer == "it"
    assert (await Runners.run("it", agent=Forges(), app=desk)).answer == "the secret of it"
    assert called == ["secret", "other", "secret"]


async def test_a_listed_tool_includes_its_actions_and_a_pattern_what_it_matches(desk: App, called: list[str]) -> None:
    opens = Forges("secret", "open")
    assert (await Runners.run("it", agent=opens, tool_names=["secret"], app=desk)).answer == "it"
    assert (await Runners.run("it", agent=opens, tool_names=["sec*"], app=desk)).answer == "it"
    assert "is not allowed here" in (await Runners.run("it", agent=opens, tool_names=["other"], app=desk)).answer
    assert called == ["secret__open"] * 2


@pytest.mark.parametrize("agent", ["tries", "asks"])
async def test_ctx_tool_of_a_function_agent_and_of_one_that_it_calls_is_refused(
    desk: App, called: list[str], agent: str
) -> None:
    response = await Runners.run("it", agent=agent, tool_names=["other"], app=desk)
    assert response.answer == f"NotAllowed: {REFUSED}"
    assert called == []


@pytest.mark.parametrize(
    "swarm",
    [
        Swarm(Forges(), "asks"),
        Swarm(["tries", Forges()]),
        Swarm(Swarm("tries")),
        HandoffSwarm((Forges("tries"), "tries")),
        TeamSwarm(Forges("tries"), "tries"),
        TeamSwarm(Forges(), "tries"),
    ],
    ids=["workflow", "group", "nested", "handoff", "member", "leader"],
)
async def test_agents_of_every_swarm_are_limited(desk: App, called: list[str], swarm: Swarm) -> None:
    response = await Runners.run("it", swarm=swarm, tool_names=["other"], app=desk)
    assert "is not allowed here, only other" in str(response.value())
    assert called == []


async def test_a_message_that_an_agent_sends_keeps_the_limits(desk: App, called: list[str]) -> None:
    ended = asyncio.Event()
    heard: list[str] = []

    async def tells(ctx: AgentContext, text: str) -> None:
        try:
            heard.append(str(await ctx.tool("secret", text=text)))
        except ToolError as error:
            heard.append(error.type)
        ended.set()

    async def waits(ctx: AgentContext, text: str) -> str:
        await ctx.send("tells", text)
        await ctx.sleep(0.0)
        await ctx.step(ended.wait)
        return "sent"

    desk.agent("tells")(tells)
    async with asyncio.timeout(60):
        assert (await Runners.run("it", agent=waits, tool_names=["other"], app=desk)).answer == "sent"
    assert heard == ["NotAllowed"]
    assert called == []


async def test_a_sub_task_can_only_narrow_the_list(desk: App, called: list[str]) -> None:
    class Widens(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse:
            parts = [
                await self.run_sub_task(Task(id="a", input="it", agent="tries", tool_names=["secret"])),
                await self.run_sub_task(Task(id="b", input="it", agent="tries")),
                await self.run_sub_task(Task(id="c", input="it", agent="asks", tool_names=["secret"])),
            ]
            return TaskResponse(self.task.id, content=[part.answer for part in parts])

    found = (await Runners.run("it", runner_cls=Widens, tool_names=["other"], app=desk)).value()
    assert found == [f"NotAllowed: {REFUSED}"] * 3
    assert called == []


async def test_a_forged_message_and_a_handle_of_the_runner_are_refused(desk: App, called: list[str]) -> None:
    class Emits(TaskRunner):
        async def first_messages(self) -> list[ToolMessage]:
            assert list(self.tools) == ["other"]
            return [ToolMessage(receiver="secret", payload={"text": "it"})]

    response = await Runners.run("it", runner_cls=Emits, agent="tries", tool_names=["other"], app=desk)
    assert response.error is not None
    assert (response.error["type"], response.error["message"]) == ("NotAllowed", REFUSED)
    assert called == []


async def test_an_agents_own_list_limits_only_its_own_calls(called: list[str], desk: App) -> None:
    class Limited(Forges):
        tool_names = ("other",)

    assert refused(await Runners.run("it", agent=Limited(), app=desk))
    assert called == []
    # The agent that it calls has a list of its own, or none.
    assert (await Runners.run("it", agent=Limited("tries"), app=desk)).answer == "the secret of it"

    @desk.agent("own", tools=["other"])
    async def own(ctx: AgentContext, text: str) -> list[str]:
        with pytest.raises(ToolError, match="not allowed") as refusal:
            await ctx.tool("secret", text=text)
        return [refusal.value.type, await ctx.tool("other", text=text)]

    assert (await Runners.run("it", agent=own, app=desk)).answer == ["NotAllowed", "it"]
    # Both lists count.
    assert "only secret" in (await Runners.run("it", agent=own, tool_names=["secret"], app=desk)).msg


async def test_a_model_neither_sees_nor_calls_a_tool_outside_the_list(openai_server: OpenAIServer) -> None:
    desk = Desk(openai_server)
    desk.add(tools=["search", "pay"], tool_retries=1)
    desk.server.play(
        calls(("pay", {"amount": 5}), when=When(tool_results=0)),
        answer("I could not.", when=When(tool_results=1)),
    )
    response = await Runners.run("Pay", agent="researcher", tool_names=["search"], app=desk.app)
    assert response.answer == "I could not."
    assert [tool["name"] for tool in desk.tools()] == ["search"]
    assert "the tools are: search" in str(desk.said())
    assert desk.called == []


async def test_tools_of_an_mcp_server_are_limited(tmp_path: Path) -> None:
    app = App("desk")
    app.add_mcp(
        "desk",
        command=[sys.executable, "-m", "tests.mcp_servers.desk"],
        cwd=str(ROOT),
        env=Ledger(tmp_path / "ledger").env,
    )

    async def uses(ctx: AgentContext, tool: str) -> str:
        try:
            return str((await ctx.tool(tool, text="a"))["text"])
        except ToolError as error:
            return error.type

    app.agent("uses")(uses)
    assert (await Runners.run("desk.echo", agent="uses", tool_names=["desk.echo"], app=app)).value() == "a"
    assert (await Runners.run("desk.echo", agent="uses", tool_names=["desk.*"], app=app)).value() == "a"
    assert (await Runners.run("desk.echo", agent="uses", tool_names=["desk.add"], app=app)).value() == "NotAllowed"


async def test_unknown_names_and_wrong_lists_are_refused_with_the_known_ones(desk: App) -> None:
    with pytest.raises(InvalidInput, match=r"tool_names\.1: no tool is named 'sercet'; choose from other, secret"):
        await Runners.run("it", agent="tries", tool_names=["other", "sercet"], app=desk)

    class Wrong(Forges):
        tool_names = "other"

    with pytest.raises(ConfigurationError, match=r"has tool_names='other': give a list of tools' names"):
        await Runners.run("it", agent=Wrong(), app=desk)


async def test_a_refused_call_is_recorded_and_no_dead_letter(desk: App) -> None:
    from weft.testing import LocalApp

    desk.add_runner(TaskRunner)
    local = LocalApp(desk, trajectory=True)
    async with local as client:
        task = {"agent": "tries", "input": "it", "tool_names": ["other"]}
        handle = await client.submit("weft.task", task)
        assert (await handle.result(timeout=60)).answer == f"NotAllowed: {REFUSED}"
        recorded = await local.recorded(handle.task_id)
        [call] = [step for step in recorded.steps if step.kind == "tool"]
        assert (call.name, call.status) == ("secret", "failed")
        assert call.error is not None
        assert call.error.type == "NotAllowed"
        assert await client.buses[0].transport.call("XLEN", client.buses[0].keys.dead) == 0
