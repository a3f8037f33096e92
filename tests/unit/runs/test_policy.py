"""Agents with a policy: how actions and observations are read, performed and answered, and when the agent ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from runtime_core.app.app import App
from runtime_core.consumer.effects import Completed, Failed
from runtime_core.declare.declaration import Place
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.context import AgentContext
from runtime_core.runs.policy import (
    ActionModel,
    ActionResult,
    Handoff,
    Observation,
    PolicyDefinition,
    action_of,
    actions_in,
    content_of,
    handoff_in,
    observation_after,
)
from tests.unit.runs.run_world import Code, World

Policy = Any  # Any: an object of the user's own


def test_an_observation_is_read_from_its_json_or_is_the_content() -> None:
    whole = {"content": "x", "observer": "a", "action_result": [{"content": 1, "tool_name": "t"}]}
    assert Observation.of(whole) == Observation("x", "a", action_result=[ActionResult(1, tool_name="t")])
    assert Observation.of({"content": "x", "other": 1}) == Observation({"content": "x", "other": 1})
    assert Observation.of("x") == Observation("x")
    assert Observation("x").plain
    assert not Observation("x", observer="a").plain


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ([{"tool_name": "t", "params": {"a": 1}}], [ActionModel("t", params={"a": 1})]),
        ({"actions": [{"tool_name": "t"}]}, [ActionModel("t")]),
        ([ActionModel("t")], [ActionModel("t")]),
        ([{"tool_name": "t"}, "text"], []),
        ([{"tool_name": "t", "unknown": 1}], []),
        ([{"policy_info": "an answer"}], []),
        ([], []),
        ("t", []),
    ],
)
def test_actions_are_found_in_an_output(output: object, found: list[ActionModel]) -> None:
    assert actions_in(output) == found


def test_another_value_is_no_action() -> None:
    with pytest.raises(InvalidInput, match=r"^actions: 'x' is not an ActionModel"):
        action_of("x", "actions")


def test_a_handoff_is_found_in_an_output() -> None:
    assert handoff_in({"handoff": "b"}) == Handoff("b")
    assert handoff_in({"handoff": "b", "content": 1}) == handoff_in(Handoff("b", 1)) == Handoff("b", 1)
    assert handoff_in({"handoff": "b", "other": 1}) is None
    assert handoff_in({"handoff": 1}) is None


def test_an_agent_gets_the_content_of_an_action() -> None:
    assert content_of(ActionModel(params={"content": "c", "x": 1}, policy_info="i")) == "c"
    assert content_of(ActionModel(params={"x": 1}, policy_info="i")) == {"x": 1}
    assert content_of(ActionModel(policy_info="i")) == "i"


def test_the_last_result_is_the_next_content() -> None:
    results = [ActionResult("a"), ActionResult(None, False, "broke")]
    after = observation_after(Observation("x", "me", info={"i": 1}), results)
    assert after == Observation("broke", "me", [], {"i": 1}, results)


def agent_of(policy: Policy, **options: Any) -> Code:  # Any: the definition's own
    definition = PolicyDefinition("p", policy, Place("here.py", 1), **options)

    async def code(ctx: AgentContext, value: object) -> object:
        return await definition.start(ctx, Observation.of(value))

    return code


class Searcher:
    def __init__(self) -> None:
        self.seen: list[object] = []

    async def async_policy(self, observation: Observation, info: Mapping[str, object] | None = None) -> object:
        self.seen.append(observation.content)
        if len(self.seen) == 1:
            return [ActionModel("search", params={"q": observation.content}), {"tool_name": "bad tool"}]
        errors = [each.error for each in observation.action_result if not each.success]
        return [ActionModel(policy_info=[self.seen, errors])]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_policy_acts_until_it_answers(cold: bool) -> None:
    """Its attributes survive a replay, which does not call it again. A failed action is a result."""
    world = World(cold=cold, functions=App("test").functions)
    searcher = Searcher()
    result = await world.play(agent_of(searcher), "x")
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == [["x", "ValueError: bad tool is bad"], ["ValueError: bad tool is bad"]]
    assert [(kind, name, data) for _, kind, name, data in world.asked] == [
        ("tool", "search", {"q": "x"}),
        ("tool", "bad tool", {}),
    ]
    assert [row[2] for row in world.rows if row[0] == "step"] == ["policy", "policy"]
    assert searcher.seen == [], "each run has an object of its own"


async def test_a_policy_that_never_answers_is_stopped() -> None:
    class Endless:
        def policy(self, observation: Observation, info: object = None) -> object:
            return ActionModel("search")

    for value, calls in (("x", 3), ({"content": "x", "info": {"max_steps": 2}}, 2)):
        world = World()
        result = await world.play(agent_of(Endless, max_steps=3), value)
        assert isinstance(result, Failed)
        assert result.type == "LimitExceeded"
        assert f"max_steps={calls}" in result.message
        assert len(world.asked) == calls


async def test_a_policy_that_has_finished_is_not_called_again() -> None:
    class Finished:
        finished = False

        async def async_policy(self, observation: Observation, info: object = None) -> object:
            await asyncio.sleep(0)
            self.finished = True
            return [ActionModel("search", policy_info="found")]

    world = World()
    result = await world.play(agent_of(Finished), "x")
    assert isinstance(result, Completed), result
    assert (result.output, world.asked) == (b'"found"', [])


async def test_a_policy_hands_over_only_where_it_may() -> None:
    class Hands:
        async def async_policy(self, observation: Observation, info: object = None) -> object:
            if observation.action_result:
                return "answer"
            return [ActionModel(agent_name="other", tool_name="search", params={"content": "c"})]

    for handoffs, output in ((["other"], {"handoff": "other", "content": "c"}), ([], "answer")):
        result = await World().play(agent_of(Hands), {"content": "x", "info": {"handoffs": handoffs}})
        assert isinstance(result, Completed), result
        assert json.loads(result.output) == output


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (object(), "is not a subclass of Agent and has no async_policy"),
        (type("Needs", (), {"__init__": lambda self, size: None, "policy": print}), "Needs() needs 'size'"),
        (type("Tools", (), {"policy": print, "tool_names": "search"}), "has tool_names='search': give a list"),
    ],
)
def test_an_object_without_a_usable_policy_is_refused(policy: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        PolicyDefinition("p", policy, Place("here.py", 1))
    assert str(refused.value).startswith("agent 'p'")
    assert message in str(refused.value)
