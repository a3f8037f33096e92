"""Declarations by name, by version and by the declared object."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from runtime_core.app.app import App
from runtime_core.app.registry import DeclaredSubscriber, Registry
from runtime_core.base.text import money
from runtime_core.declare.declaration import Agent, Place
from runtime_core.declare.tool import Tool
from runtime_core.errors import ConfigurationError
from runtime_core.runs.definition import handles

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.ports import Definition
    from runtime_core.runs.ports import Functions as FunctionsPort


def test_declarations_are_found_by_name_and_by_object() -> None:
    app = App("test")

    @app.tool(name="find")
    def search() -> None: ...

    @app.agent("worker")
    async def work(ctx: AgentContext) -> None: ...

    class Writer(Agent):
        @handles(str)
        async def on_text(self, message: str, ctx: AgentContext) -> None: ...

    app.add_agent("writer", Writer)
    functions = app.functions

    assert functions.tool(search) is functions.tool("find") is app.tools["find"]
    assert functions.agent(work) is app.agents["worker"]
    assert functions.agent(Writer) is app.agents["writer"]
    assert functions.tool("search") is None
    assert functions.tool(work) is None
    assert functions.tool([]) is None
    assert functions.engine_function(search) is None


def test_a_function_of_two_names_must_be_named_by_text() -> None:
    app = App("test")

    def search() -> None: ...

    app.tool(name="a")(search)
    app.tool(name="b")(search)

    assert app.functions.tool("b") is app.tools["b"]
    with pytest.raises(ConfigurationError, match=r"search is declared as 'a' and 'b': use one"):
        app.functions.tool(search)


def test_an_app_fits_what_a_run_asks_for() -> None:
    functions: FunctionsPort = Registry()  # checked by the type checker
    app = App("test")

    @app.agent("a")
    async def a(ctx: AgentContext) -> None: ...

    definition: Definition = app.agents["a"]

    assert functions.tool("x") is None
    assert definition.name == "a"


def test_a_version_of_an_engine_function_is_named() -> None:
    app = App("test")
    app.engine_function(name="only", version="1")(lambda: 1)
    app.engine_function(name="rank", version="1")(lambda: 1)
    app.engine_function(name="rank", version="2")(lambda: 2)
    find = app.functions.engine_function

    assert find("rank@2") is app.engine_functions["rank@2"]
    assert find("only") is app.engine_functions["only@1"]
    assert find("others") is None
    with pytest.raises(ConfigurationError, match=r"'rank' has several versions: use one of 'rank@1' and 'rank@2'"):
        find("rank")
    with pytest.raises(ConfigurationError, match=r"'rank' has no version '3'; this app declares 'rank@1' and 'rank@2'"):
        find("rank@3")


def test_names_are_the_same_after_pickling() -> None:
    app = App("test")
    app.tool(name="find")(money)
    app.tool(name="seek")(money)

    again = pickle.loads(pickle.dumps(app.functions.tools))

    assert list(again.view) == ["find", "seek"]
    assert again.find("find").name == "find"
    with pytest.raises(TypeError):
        again.view["other"] = again.view["find"]


def test_a_replaced_declaration_keeps_its_name_and_object() -> None:
    tools = App("test").functions.tools
    first, other = Tool(money, Place("a.py", 1), name="it"), Tool(money, Place("b.py", 2), name="it")
    tools.add(first)
    tools.add(first)
    with pytest.raises(ConfigurationError, match=r"tool 'it' is declared twice, at a\.py:1 and at b\.py:2"):
        tools.add(other)
    tools.replace(first, other)
    assert tools.find("it") is tools.find(money) is other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"category": ""}, 'subscribe("")'),
        ({"category": "agent", "topic": 3}, "subscribe: topic"),
        ({"category": "agent", "order": True}, "subscribe: order"),
        ({"category": "agent", "function": 3}, "subscribe: 3 is not callable"),
    ],
)
def test_a_subscriber_that_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        DeclaredSubscriber(**{"topic": "", "function": print, **given})
    assert str(refused.value).startswith(message)
