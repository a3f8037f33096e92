"""Agents that a model drives, working together: members, handing over, and the topologies of swarms."""

from __future__ import annotations

import pytest

from runtime_core.integrations.aworld.task import Task
from tests.integration.llm.asking import WAIT
from tests.integration.llm.desk import Desk, ask, failure
from tests.openai_server.driver import OpenAIServer, Rule, Usage, When, answer, calls
from weft import AgentContext, LLMAgent, SubmitOptions
from weft.aworld import HandoffSwarm, HybridSwarm, Runners, Swarm, TaskRunner, TeamSwarm
from weft.errors import AgentError
from weft.testing import LocalApp

pytestmark = pytest.mark.usefixtures("data_folder")


@pytest.fixture
def desk(openai_server: OpenAIServer) -> Desk:
    return Desk(openai_server)


def of(system: str, *rules: Rule) -> tuple[Rule, ...]:
    """Return rules for the agent whose instructions contain this text, one for each of its turns."""
    return tuple(
        rule.but(when=When(system=system, tool_results=number))
        if len(rules) > 1
        else rule.but(when=When(system=system))
        for number, rule in enumerate(rules)
    )


async def test_concurrent_members_do_not_exceed_the_tasks_limit_together(desk: Desk) -> None:
    """The provider counts more than the estimate: the leader's call has shown it, so the members reserve that much."""
    used = Usage(input=100, output=50)
    asked = calls(*[("critic", {"content": f"text {number}"}) for number in range(8)], usage=used)
    desk.add("critic", instructions="Criticise.", settings={"max_tokens": 60})
    desk.add("leader", instructions="Lead.", members=["critic"], settings={"max_tokens": 60})
    desk.server.play(
        answer("Fine.", when=When(system="Criticise."), usage=used),
        asked.but(when=When(system="Lead.", tool_results=0)),
        answer("Done.", when=When(system="Lead."), usage=used),
    )
    async with LocalApp(desk.app) as client:
        ended = await (await client.submit("leader", "Go", options=SubmitOptions(max_tokens=3000))).result(timeout=WAIT)
        assert (ended.status, ended.usage["tokens"]) == ("completed", 1500)
        ended = await (await client.submit("leader", "Go", options=SubmitOptions(max_tokens=700))).result(timeout=WAIT)
    assert ended.error is not None
    assert ended.error["type"] == "LimitExceeded"
    assert 0 < ended.usage["tokens"] <= 700
    assert ended.usage["tokens"] == 150 * ended.usage["requests"]


# ---- members -----------------------------------------------------------------------------------------------


async def test_members_are_called_as_tools_and_concurrently(desk: Desk) -> None:
    desk.add("critic", instructions="Criticise.", description="Finds what is wrong.")

    @desk.app.agent("counter")
    async def counter(ctx: AgentContext, text: str) -> int:
        """Counts letters."""
        return len(text)

    desk.add("leader", instructions="Lead.", members=["critic", counter], tools=["search"])
    desk.server.play(
        of("Criticise.", answer("Too long.")),
        of(
            "Lead.",
            calls(("critic", {"content": "My draft"}), ("counter", {"content": "abc"}), ("search", {"query": "a"})),
        )[0].but(when=When(system="Lead.", tool_results=0)),
        answer("Critic: {results}", when=When(system="Lead.")),
    )
    async with LocalApp(desk.app) as client:
        assert (await ask(client, agent="leader")).startswith("Critic: ")
    assert desk.results() == ["Too long.", "3", '{"found":"a is fine","limit":5}']
    assert [(tool["name"], tool["description"]) for tool in desk.tools()] == [
        ("search", "Search the web."),
        ("critic", "Finds what is wrong."),
        ("counter", "Counts letters."),
    ]


async def test_a_failed_member_is_reported_to_the_model(desk: Desk) -> None:
    @desk.app.agent("broken")
    async def broken(ctx: AgentContext, text: str) -> str:
        raise AgentError("OutOfInk", "there is no ink")

    desk.add("leader", members=["broken"])
    desk.server.play(calls(("broken", {"content": "a"}), when=When(tool_results=0)), answer("{result}"))
    async with LocalApp(desk.app) as client:
        assert "OutOfInk: there is no ink" in await ask(client, agent="leader")


# ---- handing over ------------------------------------------------------------------------------------------


async def test_a_handed_off_conversation_is_answered_by_the_other_agent(desk: Desk) -> None:
    desk.add("triage", instructions="Sort.", handoffs=["billing"], tools=["search"])
    desk.add("billing", instructions="Bill.", description="Knows prices.")
    desk.server.play(
        calls(
            ("search", {"query": "Ada"}),
            ("transfer_to_billing", {"message": "She wants her bill."}),
            when=When(system="Sort."),
        ),
        answer("It is 3 francs.", when=When(system="Bill.")),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, "What do I owe?", agent="triage") == "It is 3 francs."
    said = desk.said()
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "tool"]
    assert said[0]["content"] == "Bill.", "each agent has its own instructions, and no others"
    assert said[1]["content"] == "What do I owe?"
    assert desk.called == [("search", "Ada")], "calls beside it are made first"
    assert "She wants her bill." in said[4]["content"]


async def test_an_agent_without_conversations_gets_the_message(desk: Desk) -> None:
    @desk.app.agent("printer")
    async def printer(ctx: AgentContext, text: str) -> str:
        return f"printed {text!r}"

    desk.add("triage", handoffs=[printer])
    desk.server.play(
        calls(("transfer_to_printer", {"message": "the bill"}), when=When(user="bill")),
        calls(("transfer_to_printer", {})),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, "Print my bill.", agent="triage") == "printed 'the bill'"
        assert await ask(client, "Print this.", agent="triage") == "printed 'Print this.'"


async def test_circular_handoffs_end(desk: Desk) -> None:
    desk.add("a", instructions="You are a.", handoffs=["b"])
    desk.add("b", instructions="You are b.", handoffs=["a"])
    desk.server.play(
        calls(("transfer_to_b", {}), when=When(system="You are a.")),
        calls(("transfer_to_a", {}), when=When(system="You are b.")),
    )
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client, agent="a")
    assert kind == "HandoffLimit"
    assert "handed off 10 times without an answer, a → b → a" in message
    assert desk.server.counts().complete == 11


async def test_an_instance_with_a_key_remembers_answers_of_its_handoffs(desk: Desk) -> None:
    desk.add("triage", instructions="Sort.", handoffs=["billing"])
    desk.add("billing", instructions="Bill.")
    desk.server.play(
        answer("Hello again.", when=When(system="Sort.", user="Hello")),
        calls(("transfer_to_billing", {}), when=When(system="Sort.")),
        answer("3 francs.", when=When(system="Bill.")),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, "The bill?", agent="triage", key="ada") == "3 francs."
        assert await ask(client, "Hello", agent="triage", key="ada") == "Hello again."
    roles = [(message["role"], message.get("content")) for message in desk.said()]
    assert roles[-2:] == [("assistant", "3 francs."), ("user", "Hello")]


# ---- swarms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_task", [True, False], ids=["by a task", "as an agent"])
async def test_each_agent_of_a_workflow_gets_the_output_of_the_previous_one(desk: Desk, as_task: bool) -> None:
    desk.add("planner", instructions="Plan.", output=list[str])
    desk.add("fact", instructions="Facts.")
    desk.add("style", instructions="Style.")
    desk.add("writer", instructions="Write.")
    desk.server.play(
        calls(("final_result", {"response": ["one", "two"]}), when=When(system="Plan.")),
        answer("facts on {user}", when=When(system="Facts.")),
        answer("style for {user}", when=When(system="Style.")),
        answer("Written: {user}", when=When(system="Write.")),
    )
    swarm = Swarm("planner", ["fact", "style"], "writer")
    desk.app.add_runner(TaskRunner)
    desk.app.add_swarm("desk", swarm)
    async with LocalApp(desk.app) as client:
        if as_task:
            response = await Runners.run_task(Task(id="t", input="Streams", swarm=swarm), client=client)
            said = response["t"].answer
        else:
            said = await ask(client, "Streams", agent="desk")
    # Both texts are parts of one prompt.
    assert "facts on one" in said
    assert "style for one" in said


async def test_a_handoff_swarm_follows_the_models_handoffs(desk: Desk) -> None:
    desk.add("triage", instructions="Sort.")
    desk.add("billing", instructions="Bill.")
    desk.add("support", instructions="Help.")
    desk.app.add_swarm("desk", HandoffSwarm(("triage", "billing"), ("triage", "support"), ("support", "triage")))
    desk.server.play(
        calls(("transfer_to_support", {}), when=When(system="Sort.", user="broken")),
        calls(("transfer_to_triage", {"message": "It is about money."}), when=When(system="Help.")),
        calls(("transfer_to_billing", {"message": "3 francs?"}), when=When(system="Sort.", user="money")),
        answer("Answered: {user}", when=When(system="Bill.")),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, "It is broken.", agent="desk") == "Answered: 3 francs?"
    offered = [sorted(tool["name"] for tool in desk.tools(number)) for number in range(4)]
    assert offered == [
        ["transfer_to_billing", "transfer_to_support"],
        ["transfer_to_triage"],
        ["transfer_to_billing", "transfer_to_support"],
        [],
    ]


@pytest.mark.parametrize("shape", [TeamSwarm, HybridSwarm])
async def test_a_team_is_asked_by_its_leader(desk: Desk, shape: type[Swarm]) -> None:
    desk.add("leader", instructions="Lead.")
    desk.add("searcher", instructions="Search.", tools=["search"], description="Searches.")
    desk.add("critic", instructions="Criticise.")
    desk.app.add_swarm("team", shape("leader", "searcher", "critic"))
    desk.server.play(
        calls(
            ("searcher", {"content": "streams"}),
            ("critic", {"content": "my plan"}),
            when=When(system="Lead.", tool_results=0),
        ),
        answer("Team: {results}", when=When(system="Lead.")),
        calls(("search", {"query": "{user}"}), when=When(system="Search.", tool_results=0)),
        answer("Found: {result}", when=When(system="Search.")),
        answer("Fine: {user}", when=When(system="Criticise.")),
    )
    async with LocalApp(desk.app) as client:
        said = await ask(client, "Go.", agent="team")
    assert "streams is fine" in said
    assert "Fine: my plan" in said
    assert desk.called == [("search", "streams")]


async def test_peers_of_a_hybrid_team_hand_off_to_each_other(desk: Desk) -> None:
    desk.add("leader", instructions="Lead.")
    desk.add("searcher", instructions="Search.")
    desk.add("critic", instructions="Criticise.")
    desk.app.add_swarm("team", HybridSwarm("leader", "searcher", "critic"))
    desk.server.play(
        calls(("searcher", {"content": "streams"}), when=When(system="Lead.", tool_results=0)),
        answer("Team: {result}", when=When(system="Lead.")),
        calls(("transfer_to_critic", {"message": "Is it right?"}), when=When(system="Search.")),
        answer("Right: {user}", when=When(system="Criticise.")),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, "Go.", agent="team") == "Team: Right: Is it right?"


async def test_a_bound_of_the_swarm_bounds_the_turns_of_its_agents(desk: Desk) -> None:
    desk.add("leader", tools=["search"])
    desk.app.add_runner(TaskRunner)
    desk.server.play(*(calls(("search", {"query": str(n)}), when=When(tool_results=n)) for n in range(9)))
    async with LocalApp(desk.app) as client:
        task = Task(id="t", input="Go.", agent="leader", conf={"max_steps": 3})
        response = (await Runners.run_task(task, client=client))["t"]
    assert response.error is not None
    assert response.error["type"] == "TurnLimit"
    assert desk.server.counts().complete == 3


async def test_objects_in_a_task_are_declared_with_all_that_they_hold(openai_server: OpenAIServer) -> None:
    def look_up(word: str) -> str:
        return f"{word} means stream"

    model, url, key = "openai-chat:gpt-test", openai_server.url, openai_server.key
    critic = LLMAgent(model, name="critic", instructions="Criticise.", base_url=url, api_key=key)
    leader = LLMAgent(
        model, name="leader", instructions="Lead.", tools=[look_up], members=[critic], base_url=url, api_key=key
    )
    openai_server.play(
        calls(
            ("look_up", {"word": "Strom"}), ("critic", {"content": "Is it?"}), when=When(system="Lead.", tool_results=0)
        ),
        answer("{results}", when=When(system="Lead.")),
        answer("It is.", when=When(system="Criticise.")),
    )
    response = await Runners.run("Go.", agent=leader)
    assert response.success, response
    assert openai_server.counts().complete == 3


# ---- limits of the whole task ------------------------------------------------------------------------------


async def test_a_limit_of_the_task_holds_over_all_its_agents(desk: Desk) -> None:
    desk.add("critic", instructions="Criticise.", settings={"max_tokens": 50})
    desk.add("leader", instructions="Lead.", members=["critic"], settings={"max_tokens": 50})
    desk.server.play(
        answer("Too long.", when=When(system="Criticise.")),
        *(calls(("critic", {"content": str(n)}), when=When(system="Lead.", tool_results=n)) for n in range(40)),
    )
    async with LocalApp(desk.app) as client:
        task = await client.submit("leader", "Go.", options=SubmitOptions(max_tokens=3000))
        response = await task.result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "LimitExceeded"
    assert "max_tokens" in response.error["message"]
    assert 0 < response.usage["tokens"] <= 3000
    assert "\n" not in response.error["message"]
