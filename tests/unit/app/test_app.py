"""Valid and invalid declarations of an app."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from runtime_core.app.app import App
from runtime_core.declare.declaration import Agent, RetryPolicy
from runtime_core.declare.mcp_server import MCPServer, MCPSettings
from runtime_core.declare.tool import Tool, ToolContext, ToolSettings
from runtime_core.engines.function import EngineFunction, EngineFunctionSettings
from runtime_core.errors import ConfigurationError
from runtime_core.runs.definition import AgentDefinition, AgentSettings, handles
from tests.unit.runs.fake_context import context, run

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class Facts(BaseModel):
    topic: str
    facts: list[str] = []


# ---------------------------------------------------------------- the programming model


async def test_the_documented_app_can_be_declared_checked_and_described() -> None:
    app = App("desk", version="3")

    @app.tool
    async def search(ctx: ToolContext, query: str) -> list[dict[str, object]]:
        return [{"query": query}]

    @app.tool(name="slow", timeout_seconds=5, retry=RetryPolicy(attempts=2), repeatable=False, pool="gpu")
    def slow_one(n: int) -> int:
        return n

    @app.engine_function
    def rank(passages: list[dict[str, object]]) -> list[dict[str, object]]:
        return passages[::-1]

    @app.engine_function(name="rank-all", pool="big")
    def rank_all() -> int:
        return 1

    @app.agent("researcher", retry=RetryPolicy(attempts=1), pool="p", timeout_seconds=9, tools=["search", slow_one])
    async def researcher(ctx: AgentContext, topic: str) -> str:
        return topic.upper()

    class Writer(Agent):
        """Writes."""

        @handles(Facts)
        async def on_facts(self, message: Facts, ctx: AgentContext) -> str:
            return message.topic

    app.add_agent("writer", Writer)
    app.check()

    assert list(app.tools) == ["search", "slow"]
    assert list(app.engine_functions) == ["rank", "rank-all"]
    assert list(app.agents) == ["researcher", "writer"]
    slow, agent = app.tools["slow"], app.agents["researcher"]
    assert (slow.timeout_seconds, slow.retry.attempts, slow.repeatable, slow.pool) == (5.0, 2, False, "gpu")
    assert (agent.timeout_seconds, agent.retry.attempts, agent.pool) == (9.0, 1, "p")
    # The decorators leave functions as they were.
    assert slow_one(3) == 3
    assert await researcher(context(), "a") == "A"
    assert app.engine_functions["rank"].bound(b'{"passages": [{"a": 1}, {}]}')() == [{}, {"a": 1}]
    assert await run(agent, "redis") == "REDIS"
    assert await run(app.agents["writer"], {"topic": "x"}) == "x"

    manifest = app.manifest()
    assert (manifest.app, manifest.version, manifest.format) == ("desk", "3", 1)
    assert manifest.agents["researcher"].input == {"type": "string"}
    assert manifest.agents["writer"].description == "Writes."
    assert manifest.tools["slow"].repeatable is False
    assert manifest.engine_functions["rank-all"].pool == "big"


def test_included_apps_merge_and_a_shared_part_may_come_twice() -> None:
    shared, left, right, main = App("shared"), App("left"), App("right"), App("main")

    @shared.tool
    def search() -> None: ...

    left.include(shared)
    right.include(shared)

    @right.agent("worker", tools=[search])
    async def work(ctx: AgentContext) -> None: ...

    main.include(left)
    main.include(right)
    main.check()

    assert main.tools["search"] is shared.tools["search"]
    assert list(main.agents) == ["worker"]
    assert list(left.agents) == []


# ---------------------------------------------------------------- what is refused


def _duplicate_tool(app: App) -> None:
    app.tool(name="it")(lambda: 1)
    app.tool(name="it")(lambda: 2)


def _duplicate_agent(app: App) -> None:
    @app.agent("it")
    async def a(ctx: AgentContext) -> None: ...

    @app.agent("it")
    async def b(ctx: AgentContext) -> None: ...


def _duplicate_engine_function(app: App) -> None:
    app.engine_function(name="it")(lambda: 1)
    app.engine_function(name="it")(lambda: 2)


def _duplicate_by_include(app: App) -> None:
    other = App("other")
    app.tool(name="it")(lambda: 1)
    other.tool(name="it")(lambda: 2)
    app.include(other)


def _unannotated(app: App) -> None:
    app.tool(name="it")(lambda query: query)


def _method_in_class(app: App) -> None:
    class Tools:
        @app.tool
        def it(self, query: str) -> None: ...


def _variadic(app: App) -> None:
    @app.tool
    def it(*queries: str) -> None: ...


def _keywords(app: App) -> None:
    @app.engine_function
    def it(**queries: str) -> None: ...


def _position_only(app: App) -> None:
    @app.tool
    def it(query: str, /) -> None: ...


def _not_callable(app: App) -> None:
    app.tool("it")  # type: ignore[call-overload]  # wrong on purpose


def _a_class(app: App) -> None:
    app.tool(Facts)


def _sync_agent(app: App) -> None:
    app.agent("it")(lambda ctx: None)  # type: ignore[type-var]  # wrong on purpose


def _agent_without_name(app: App) -> None:
    async def it(ctx: AgentContext) -> None: ...

    app.agent(it)  # type: ignore[arg-type]  # wrong on purpose


def _agent_without_context(app: App) -> None:
    @app.agent("it")
    async def it(topic: str) -> None: ...


def _agent_of_two_inputs(app: App) -> None:
    @app.agent("it")
    async def it(ctx: AgentContext, topic: str, limit: int) -> None: ...


def _agent_of_untyped_input(app: App) -> None:
    @app.agent("it")
    async def it(ctx: AgentContext, topic) -> None: ...  # type: ignore[no-untyped-def]  # wrong on purpose


def _agent_that_yields(app: App) -> None:
    @app.agent("it")
    async def it(ctx: AgentContext):  # type: ignore[no-untyped-def]  # wrong on purpose
        yield 1


def _tool_that_yields(app: App) -> None:
    @app.tool
    def it():  # type: ignore[no-untyped-def]  # wrong on purpose
        yield 1


def _async_engine_function(app: App) -> None:
    @app.engine_function
    async def it() -> None: ...


def _wrong_timeout(app: App) -> None:
    app.tool(name="it", timeout_seconds=0)(lambda: 1)


def _wrong_retry(app: App) -> None:
    app.tool(name="it", retry=3)(lambda: 1)  # type: ignore[call-overload]  # wrong on purpose


def _unknown_option(app: App) -> None:
    def it() -> None: ...

    app.tool(retries=3)(it)  # type: ignore[call-overload]  # wrong on purpose


def _unknown_option_of_an_agent(app: App) -> None:
    @app.agent("it", labels=["a"])  # type: ignore[call-arg]  # wrong on purpose
    async def it(ctx: AgentContext) -> None: ...


def _unknown_option_of_a_class(app: App) -> None:
    app.add_agent("it", Agent, poll="gpu")  # type: ignore[call-arg]  # wrong on purpose


def _unknown_option_of_a_job(app: App) -> None:
    def it() -> None: ...

    app.batch_job(cpus=2)(it)  # type: ignore[call-overload]  # wrong on purpose


def _unknown_option_of_a_server(app: App) -> None:
    app.add_mcp("it", cmd=["program"])  # type: ignore[call-arg]  # wrong on purpose


def _wrong_pool(app: App) -> None:
    app.engine_function(name="it", pool="a:b")(lambda: 1)


def _unnamed(app: App) -> None:
    app.tool(lambda: 1)


def _two_contexts(app: App) -> None:
    @app.tool
    def it(a: ToolContext, b: ToolContext) -> None: ...


def _no_agent_class(app: App) -> None:
    app.add_agent("it", Facts)  # type: ignore[arg-type]  # wrong on purpose


def _same_message_twice(app: App) -> None:
    class It(Agent):
        @handles(Facts)
        async def one(self, message: Facts, ctx: AgentContext) -> None: ...

        @handles(Facts)
        async def two(self, message: Facts, ctx: AgentContext) -> None: ...

    app.add_agent("it", It)


def _sync_handler(app: App) -> None:
    class It(Agent):
        @handles(Facts)  # type: ignore[type-var]  # wrong on purpose
        def one(self, message: Facts, ctx: AgentContext) -> None: ...

    app.add_agent("it", It)


def _handler_without_context(app: App) -> None:
    class It(Agent):
        @handles(Facts)
        async def one(self, message: Facts) -> None: ...

    app.add_agent("it", It)


def _handles_nothing(app: App) -> None:
    class It(Agent):
        pass

    app.add_agent("it", It)


def _constructor_with_arguments(app: App) -> None:
    class It(Agent):
        def __init__(self, url: str) -> None: ...

        @handles(Facts)
        async def one(self, message: Facts, ctx: AgentContext) -> None: ...

    app.add_agent("it", It)


def _state_that_is_no_dict(app: App) -> None:
    class It(Agent):
        state = 3  # type: ignore[assignment]  # wrong on purpose

        @handles(Facts)
        async def one(self, message: Facts, ctx: AgentContext) -> None: ...

    app.add_agent("it", It)


def _unknown_tool(app: App) -> None:
    app.tool(name="search")(lambda: 1)

    @app.agent("it", tools=["serach"])
    async def it(ctx: AgentContext) -> None: ...

    app.check()


def _tools_as_text(app: App) -> None:
    app.agent("it", tools="search")(lambda ctx: None)  # type: ignore[type-var]  # wrong on purpose


def _input_without_json(app: App) -> None:
    @app.agent("it")
    async def it(ctx: AgentContext, app: App) -> None: ...

    app.check()


def _includes_no_app(app: App) -> None:
    app.include("other")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            _duplicate_tool,
            r"^tool 'it' is declared twice, at \S*test_app\.py:\d+ and at \S*test_app\.py:\d+: rename one",
        ),
        (_duplicate_agent, "^agent 'it' is declared twice, at "),
        (_duplicate_engine_function, "^engine function 'it' is declared twice, at "),
        (_duplicate_by_include, "^tool 'it' is declared twice, at "),
        (_unannotated, r"^tool 'it' \(\S*test_app\.py:\d+\): argument 'query' has no type: write query: str"),
        (_method_in_class, r"argument 'self' has no type: .* \(a method: declare it from an instance"),
        (_variadic, r"^tool 'it' \(.*\) takes \*queries: name each argument"),
        (_keywords, r"^engine function 'it' \(.*\) takes \*\*queries"),
        (_position_only, r"takes 'query' by position only: remove the '/'"),
        (_not_callable, r"^'it' \(.*test_app\.py:\d+\) cannot be a tool: give a function"),
        (_a_class, r"cannot be a tool: give a function"),
        (_sync_agent, r"^agent 'it' \(.*\) is not async: write async def"),
        (_agent_without_name, r"needs a name: write @app\.agent\('name'\)"),
        (_agent_without_context, r"^agent 'it' \(.*\) does not take ctx: AgentContext first"),
        (_agent_of_two_inputs, r"^agent 'it' \(.*\) takes 2 inputs: take one"),
        (_agent_of_untyped_input, r"^agent 'it' \(.*\): argument 'topic' has no type"),
        (_agent_that_yields, r"is a generator: use await ctx\.emit"),
        (_tool_that_yields, r"^tool 'it' \(.*\) is a generator: return a list"),
        (_async_engine_function, r"^engine function 'it' \(.*\) is async: declare a plain function"),
        (_wrong_timeout, r"^tool 'it' \(.*\) has timeout_seconds=0: give a number above 0"),
        (
            _unknown_option,
            r"^tool 'it' \(.*test_app\.py:\d+\) has no option 'retries': did you mean retry\? choose from name, ",
        ),
        (
            _unknown_option_of_an_agent,
            r"^agent 'it' \(.*test_app\.py:\d+\) has no option 'labels': choose from retry, pool, ",
        ),
        (_unknown_option_of_a_class, r"^agent 'it' \(.*test_app\.py:\d+\) has no option 'poll': did you mean pool\?"),
        (
            _unknown_option_of_a_job,
            r"^engine function 'it' \(.*test_app\.py:\d+\) has no option 'cpus': choose from name, ",
        ),
        (
            _unknown_option_of_a_server,
            r"^MCP server 'it' \(.*test_app\.py:\d+\) has no option 'cmd': did you mean cwd\?",
        ),
        (_wrong_retry, r"^tool 'it' \(.*\) has retry=3: give a RetryPolicy"),
        (_wrong_pool, r"^engine function 'it' \(.*\) has pool='a:b'"),
        (_unnamed, r"^tool name '<lambda>' \(.*\) is invalid"),
        (_two_contexts, r"^tool 'it' \(.*\) takes a ToolContext twice, 'a' and 'b'"),
        (_no_agent_class, r"^agent 'it' \(.*test_app\.py:\d+\): .* is not a subclass of Agent"),
        (_same_message_twice, r"^agent 'it' \(.*\): one and two both handle Facts: keep one"),
        (_sync_handler, r"^agent 'it', method 'one' \(.*\) is not async"),
        (
            _handler_without_context,
            r"^agent 'it', method 'one' \(.*\) has other arguments: write async def one\(self, m",
        ),
        (_handles_nothing, r"^agent 'it' \(.*\) handles nothing: mark an async method of It"),
        (_constructor_with_arguments, r"^agent 'it' \(.*\): It\(\) needs 'url'"),
        (_state_that_is_no_dict, r"^agent 'it' \(.*\): It\.state is not a dict"),
        (_unknown_tool, r"^agent 'it' \(.*\) names the unknown tool 'serach': did you mean search\?"),
        (_tools_as_text, r"^agent 'it' \(.*\) has tools='search': give a list of names"),
        (_input_without_json, r"^agent 'it', input 'app' \(.*\): a value of type App cannot be read from JSON"),
        (_includes_no_app, r"cannot include 'other': give an App"),
    ],
)
def test_wrong_declarations_are_refused_in_one_line_with_their_place(
    declare: Callable[[App], None], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        declare(App("test"))

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("declares", "options", "constructor"),
    [
        (App.tool, ToolSettings, Tool),
        (App.engine_function, EngineFunctionSettings, EngineFunction),
        (App.agent, AgentSettings, AgentDefinition),
        (App.add_mcp, MCPSettings, MCPServer),
    ],
)
def test_the_help_of_a_declaration_describes_each_option_with_its_default(
    declares: Callable[..., object], options: type, constructor: type
) -> None:
    described = " ".join((inspect.getdoc(declares) or "").partition("Args:")[2].split())
    defaults = inspect.signature(constructor).parameters
    shown = dict(re.findall(r"(\w+) \([^:]+\): .*?Default: ((?:\([^)]*\)|'[^']*'|[\w.-])+)", described))

    assert {name: ast.literal_eval(default.rstrip(".")) for name, default in shown.items()} == {
        name: defaults[name].default for name in options.__annotations__
    }


@pytest.mark.parametrize("name", ["", "1a", "a b", "a/b", "a:b", "a~b", "a\n", "\x00", "ä", "a" * 129, "-a", None, 5])
def test_names_that_would_break_keys_and_paths_are_refused(name: str) -> None:
    async def it(ctx: AgentContext) -> None: ...

    with pytest.raises(ConfigurationError) as refused:
        App("test").agent(name)(it)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a", "_", "web-search.v2", "A_1", "a" * 128])
def test_valid_names_are_accepted(name: str) -> None:
    async def it(ctx: AgentContext) -> None: ...

    app = App("test")
    app.agent(name)(it)

    assert list(app.agents) == [name]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "60", None])
def test_invalid_limits_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout_seconds="):
        App("test").engine_function(name="it", timeout_seconds=seconds)(lambda: 1)


@pytest.mark.parametrize(("name", "version"), [("", "1"), ("a b", "1"), ("a", ""), (5, "1"), ("a", 1)])
def test_an_apps_own_name_and_version_are_checked(name: str, version: str) -> None:
    with pytest.raises(ConfigurationError):
        App(name, version=version)
