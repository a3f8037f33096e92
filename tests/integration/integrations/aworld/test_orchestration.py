"""Swarms, and agents that are objects, in tasks of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from tests.integration.integrations.aworld.small_agents import add, broken, exclaim, failure, join, question, upper
from weft import AgentContext, App, RetryPolicy
from weft.aworld import (
    ActionModel,
    Handoff,
    HandoffSwarm,
    HybridSwarm,
    Loopable,
    Observation,
    Runners,
    Swarm,
    Task,
    TaskRunner,
    TeamSwarm,
)
from weft.errors import ConfigurationError, InvalidInput


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


# ---- agents that are objects ---------------------------------------------------------------------------------


async def test_a_tool_that_fails_is_a_result_for_the_policy() -> None:
    async def fails(text: str) -> str:
        raise ValueError("no tool today")

    class Copes:
        async def async_policy(self, observation: Observation, info: object = None) -> ActionModel | str:
            if observation.action_result:
                return observation.action_result[0].error
            return ActionModel(tool_name="fails", params={"text": "x"})

    app = App("fails")
    app.tool(retry=RetryPolicy(attempts=1))(fails)
    assert (await Runners.run("x", agent=Copes, app=app)).answer == "ValueError: no tool today"


async def test_an_agent_that_never_finishes_is_stopped_at_max_steps() -> None:
    class Endless:
        async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
            return [ActionModel(tool_name="add", params={"a": 1, "b": 1})]

    response = await Runners.run("x", agent=Endless, tools=[add], conf={"max_steps": 3})
    assert failure(response)[0] == "LimitExceeded"
    assert "max_steps=3" in response.msg


async def test_a_class_that_needs_arguments_is_given_as_an_object() -> None:
    class Named:
        def __init__(self, greeting: str) -> None:
            self.greeting = greeting

        async def async_policy(self, observation: Observation, info: object = None) -> str:
            return f"{self.greeting}, {observation.content}"

    assert (await Runners.run("x", agent=Named("Hello"))).answer == "Hello, x"
    with pytest.raises(ConfigurationError, match=r"Named\(\) needs 'greeting': give it a default"):
        await Runners.run("x", agent=Named)


async def test_an_object_that_cannot_be_copied_raises_a_clear_error() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        async def async_policy(self, observation: Observation, info: object = None) -> str:
            return "never"

    response = await Runners.run("x", agent=Locked())
    assert "cannot be copied for a run" in response.msg


async def test_a_finished_agent_is_not_called_again() -> None:
    class Once:
        finished = False

        async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
            self.finished = True
            return [ActionModel(tool_name="add", params={"a": 1, "b": 1}, policy_info="enough")]

    assert (await Runners.run("x", agent=Once())).answer == "enough"


# ---- swarms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "answer"),
    [
        ((upper, exclaim), "HI!"),
        (([upper, exclaim, question], join), "HI hi! hi?"),
        (([(upper, exclaim), question], join), "HI! hi?"),
        ((Swarm(exclaim, question), upper), "HI!?"),
        ((Loopable(exclaim, 3),), "hi!!!"),
        ((Loopable((exclaim, question), 2), upper), "HI!?!?"),
    ],
)
async def test_a_workflow_runs_in_its_order_and_joins_in_its_order(topology: Sequence[object], answer: str) -> None:
    assert (await Runners.run("hi", swarm=Swarm(*topology))).answer == answer


async def test_a_loop_ends_when_its_condition_is_met() -> None:
    def long(output: object) -> bool:
        return len(str(output)) >= 4

    assert (await Runners.run("hi", swarm=Swarm(Loopable(exclaim, 10, long)))).answer == "hi!!"


@pytest.mark.parametrize(
    ("swarm", "status"),
    [
        (Swarm(Loopable(exclaim, 5)), "completed"),
        (Swarm(Loopable(exclaim, 6)), "failed"),
        (Swarm(Loopable((exclaim, Loopable(question, 3)), 2)), "failed"),
        (Swarm(Loopable(exclaim, 6), max_steps=6), "completed"),
        (Swarm(Swarm(Loopable(exclaim, 6)), upper), "failed"),
    ],
)
async def test_loops_end_at_max_steps(swarm: Swarm, status: str) -> None:
    response = await Runners.run("x", swarm=swarm, conf={"max_steps": 5})
    assert response.status == status
    if response.error is not None:
        assert failure(response)[0] == "LimitExceeded"
        assert "max_steps=5 rounds" in failure(response)[1]


async def test_a_swarm_with_code_must_be_declared_where_it_runs() -> None:
    app = App("loops")
    app.agent("exclaim")(exclaim)
    swarm = Swarm(Loopable("exclaim", 9, lambda output: len(str(output)) > 3))
    app.add_swarm("loop", swarm)
    app.add_runner(TaskRunner)

    @app.agent("caller")
    async def caller(ctx: AgentContext, text: str) -> str:
        return f"called {await ctx.agent('loop', text)}"

    async with LocalApp(app) as client:
        assert (await Runners.run("x", swarm=swarm, client=client, app=app)).answer == "x!!!"
        by_name = await Runners.run_task(Task(id="n", input="x", swarm="loop"), client=client)
        assert by_name["n"].answer == "x!!!"
        assert (await (await client.submit("loop", "y")).result(timeout=60)).value() == "y!!!"
        assert (await (await client.submit("caller", "z")).result(timeout=60)).value() == "called z!!!"
        with pytest.raises(InvalidInput, match=r"^swarm: .* declare the swarm with app.add_swarm"):
            await Runners.run("x", swarm=swarm, client=client)


async def triage(ctx: AgentContext, text: str) -> Handoff:
    return Handoff("billing" if "money" in text else "support", text + " (triaged)")


async def billing(ctx: AgentContext, text: str) -> str:
    return f"billing: {text}"


async def support(ctx: AgentContext, text: str) -> object:
    return {"handoff": "triage"} if "back" in text else f"support: {text}"


HELP = HandoffSwarm((triage, billing), (triage, support), (support, triage))


@pytest.mark.parametrize(
    ("text", "answer"),
    [("money", "billing: money (triaged)"), ("help", "support: help (triaged)")],
)
async def test_an_agent_hands_off_to_the_one_that_its_answer_names(text: str, answer: str) -> None:
    assert (await Runners.run(text, swarm=HELP)).answer == answer


async def test_endless_handoffs_are_stopped() -> None:
    async def ping(ctx: AgentContext, text: str) -> Handoff:
        return Handoff("pong")

    async def pong(ctx: AgentContext, text: str) -> Handoff:
        return Handoff("ping")

    response = await Runners.run("x", swarm=HandoffSwarm((ping, pong), (pong, ping)), endless_threshold=4)
    assert failure(response)[0] == "LimitExceeded"
    assert "4 times, which endless_threshold=4 does not allow" in response.msg
    response = await Runners.run("back", swarm=HELP, conf={"max_steps": 7})
    assert "max_steps=7 handoffs" in response.msg


async def test_a_handoff_outside_the_edges_is_refused() -> None:
    async def rogue(ctx: AgentContext, text: str) -> Handoff:
        return Handoff("nobody")

    response = await Runners.run("x", swarm=HandoffSwarm((rogue, billing)))
    assert failure(response) == ("UnknownHandoff", "agent 'rogue' hands off to 'nobody'; it may hand off to billing")


class Router:
    """An object that hands off by an action."""

    name = "router"

    async def async_policy(self, observation: Observation, info: object = None) -> list[ActionModel]:
        return [ActionModel(tool_name="billing", params={"content": f"{observation.content}, routed"})]


async def test_an_object_hands_off_by_an_action() -> None:
    assert (await Runners.run("x", swarm=HandoffSwarm((Router, billing)))).answer == "billing: x, routed"


async def lead(ctx: AgentContext, seen: Observation) -> object:
    """Calls both members at once, then answers with their answers."""
    if not seen.action_result:
        return [{"tool_name": name, "params": {"content": seen.content}} for name in seen.info["team"]]
    return [result.content if result.success else result.error for result in seen.action_result]


class Leader:
    """The same as an object."""

    async def async_policy(self, observation: Observation, info: dict[str, Any]) -> list[ActionModel]:  # Any: JSON
        if not observation.action_result:
            return [ActionModel(tool_name=name, params={"content": observation.content}) for name in info["team"]]
        said = [result.content if result.success else result.error for result in observation.action_result]
        return [ActionModel(policy_info=said)]


@pytest.mark.parametrize("leader", [lead, Leader, Leader()])
async def test_a_leader_calls_its_team_as_tools(leader: object) -> None:
    assert (await Runners.run("x", swarm=TeamSwarm(leader, upper, exclaim))).answer == ["X", "x!"]
    failing = await Runners.run("x", swarm=TeamSwarm(leader, upper, broken))
    assert failing.answer == ["X", "ValueError: no x"]


@pytest.mark.parametrize("leader", [lead, Leader])
async def test_members_of_a_hybrid_call_one_another(leader: object) -> None:
    async def passes_on(ctx: AgentContext, text: str) -> Handoff:
        return Handoff("exclaim", text + ", passed on")

    response = await Runners.run("x", swarm=HybridSwarm(leader, passes_on, exclaim))
    assert response.answer == ["x, passed on!", "x!"]
    in_a_team = await Runners.run("x", swarm=TeamSwarm(leader, passes_on, exclaim))
    assert in_a_team.answer == [{"handoff": "exclaim", "content": "x, passed on"}, "x!"]


async def test_a_leader_that_never_stops_asking_is_stopped() -> None:
    async def insists(ctx: AgentContext, seen: Observation) -> object:
        return [{"tool_name": "upper", "params": {"content": "x"}}]

    response = await Runners.run("x", swarm=TeamSwarm(insists, upper, max_steps=3))
    assert failure(response)[0] == "LimitExceeded"
    assert "max_steps=3 rounds" in response.msg
