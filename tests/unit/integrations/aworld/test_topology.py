"""The topology of a swarm: how it is read, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from runtime_core.declare.declaration import label
from runtime_core.errors import InvalidInput
from runtime_core.integrations.aworld.description import describe, read_description, task_of
from runtime_core.integrations.aworld.orchestration import HandoffSwarm, HybridSwarm, Swarm, TeamSwarm, WorkflowSwarm
from runtime_core.integrations.aworld.task import Task
from runtime_core.integrations.aworld.topology import GraphBuildType, Loopable


def named(kind: str, agent: object) -> str:
    return label(agent)


@pytest.mark.parametrize(
    ("swarm", "agents"),
    [
        (Swarm("a"), ["a"]),
        (Swarm("a", ["b", "c"], "d"), ["a", "b", "c", "d"]),
        (Swarm("a", [("b", "c"), "d"]), ["a", "b", "c", "d"]),
        (WorkflowSwarm("a", Swarm("b", Loopable("c", 3))), ["a", "b", "c"]),
        (HandoffSwarm(("a", "b"), ("b", "c"), ("b", "a")), ["a", "b", "c"]),
        (HandoffSwarm(("a", "b"), ("b", "a"), root_agent="b"), ["b", "a"]),
        (TeamSwarm("lead", "x", "y"), ["lead", "x", "y"]),
        (TeamSwarm("x", "y", root_agent="lead"), ["lead", "x", "y"]),
        (Swarm("lead", "x", build_type="hybrid"), ["lead", "x"]),
        (HybridSwarm("lead", "x"), ["lead", "x"]),
    ],
)
def test_agents_come_once_and_in_order_and_a_swarm_travels_as_json(swarm: Swarm, agents: list[str]) -> None:
    assert swarm.ordered_agents == agents
    assert list(swarm.agents) == agents
    described = describe(Task(id="t", swarm=swarm), named)
    back = task_of(read_description(msgspec.json.encode(described)), "t", "")
    assert isinstance(back.swarm, Swarm)
    assert (back.swarm.build_type, back.swarm.ordered_agents) == (swarm.build_type, agents)
    assert describe(back, named) == described


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Swarm(), "swarm: is empty"),
        (lambda: Swarm("a", []), "swarm.1: is empty"),
        (lambda: Swarm("a", None), "swarm.1: None is not an agent"),
        (lambda: Swarm("a", ""), "swarm.1: an agent's name is empty"),
        (lambda: Swarm("a", "b", "a"), "no cycles, but a → b → a: use Loopable"),
        (lambda: Swarm("a", ["b", ("c", "a")]), "no cycles, but a → c → a"),
        (lambda: Swarm("a", build_type="star"), "swarm.build_type: 'star' is not one of workflow"),
        (lambda: Swarm("a", max_steps=0), "swarm.max_steps: 0"),
        (lambda: Swarm("a", "b", root_agent="c"), "swarm.root_agent: c is not in the topology"),
        (lambda: Swarm("a", "b", root_agent="b"), "swarm.root_agent: a workflow begins with its first"),
        (lambda: HandoffSwarm("a", "b"), "swarm.0: 'a' is not a pair"),
        (lambda: HandoffSwarm(("a", ["b"])), "swarm.0: a HANDOFF connects agents"),
        (lambda: HandoffSwarm(), "swarm: is empty"),
        (lambda: TeamSwarm("a", ["b"]), "swarm.1: a team consists of a leader and its members"),
        (lambda: Loopable("a", 0), "max_run_times: 0"),
    ],
)
def test_an_impossible_topology_is_refused_in_one_line(make: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()  # type: ignore[operator]  # a lambda each
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_that_contains_itself_is_a_cycle() -> None:
    group: list[object] = ["a"]
    group.append(group)
    with pytest.raises(InvalidInput, match="contains itself is a cycle"):
        Swarm(group)


def test_two_branches_may_have_the_same_agent() -> None:
    assert Swarm(["a", ("b", "a")]).ordered_agents == ["a", "b"]


def test_handoffs_are_those_of_the_edges() -> None:
    swarm = Swarm(("a", "b"), ("a", "c"), ("c", "a"), build_type=GraphBuildType.HANDOFF)
    assert (swarm.handoffs("a"), swarm.handoffs("b"), swarm.handoffs("c")) == (["b", "c"], [], ["a"])
