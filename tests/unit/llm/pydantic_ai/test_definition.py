"""Declaring an agent of pydantic-ai: its tools and their settings, its deps, and agents that cannot run durably."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic_ai import Agent, FunctionToolset

from runtime_core.app.app import App
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.llm.pydantic_ai.definition import PydanticAgent, tool_call


@dataclass
class Deps:
    user: str


def test_the_app_declares_the_tools_with_the_agent() -> None:
    agent = Agent("test", toolsets=[FunctionToolset([_plus], id="sums")])
    agent.tool_plain(name="add")(_plus)
    app = App("names")
    app.add_pydantic_agent("counter", agent)
    assert sorted(app.tools) == ["counter.add", "counter.sums._plus"]
    app.check()
    entry = app.tools["counter.add"].entry()
    assert entry.description == "The sum."
    assert entry.arguments is not None
    assert entry.arguments["required"] == ["left", "right"]

    agent.tool_plain(name="late")(_plus)
    with pytest.raises(ConfigurationError, match=r"counter\.late.*after the agent's last"):
        app.check()


def _plus(left: int, right: int) -> int:
    """The sum."""
    return left + right


def test_the_settings_of_a_tool_are_in_its_metadata() -> None:
    agent = Agent("test")
    agent.tool_plain(metadata={"weft": {"repeatable": False, "timeout_seconds": 3.0, "pool": "slow"}})(_plus)
    app = App("settings")
    app.add_pydantic_agent("counter", agent)
    tool = app.tools["counter._plus"]
    assert (tool.repeatable, tool.timeout_seconds, tool.pool) == (False, 3.0, "slow")


def test_an_agent_that_cannot_run_durably_is_refused_where_it_is_declared() -> None:
    app = App("refused")
    with pytest.raises(ConfigurationError, match="not an agent of pydantic-ai"):
        app.add_pydantic_agent("wrong", object())
    with pytest.raises(ConfigurationError, match="unique `id`"):
        app.add_pydantic_agent("unnamed", Agent("test", toolsets=[FunctionToolset([_plus])]))
    with pytest.raises(ConfigurationError, match="pass a function that creates them"):
        app.add_pydantic_agent("live", Agent("test", deps_type=Deps), deps=Deps("ann"))  # type: ignore[arg-type]


async def test_deps_come_from_the_input_or_from_a_function() -> None:
    def definition(make: Any = None) -> PydanticAgent:
        app = App("deps")
        app.add_pydantic_agent("asks", Agent("test", deps_type=Deps), deps=make)
        found = app.agents["asks"]
        assert isinstance(found, PydanticAgent)
        return found

    assert await definition().dependencies.make({"user": "ann"}) == Deps("ann")
    assert await definition(lambda: Deps("made")).dependencies.make(None) == Deps("made")
    assert await definition(lambda data: Deps(data["of"])).dependencies.make({"of": "bob"}) == Deps("bob")

    async def later(data: Any) -> Deps:
        return Deps("later")

    assert await definition(later).dependencies.make(None) == Deps("later")
    with pytest.raises(InvalidInput, match=r"input\.deps.*needs deps of type Deps"):
        await definition().dependencies.make(None)
    with pytest.raises(InvalidInput, match=r"input\.deps\.user"):
        await definition().dependencies.make({"user": []})


def test_the_call_that_a_tool_serves_is_known_inside_it_only() -> None:
    with pytest.raises(LookupError):
        tool_call()
