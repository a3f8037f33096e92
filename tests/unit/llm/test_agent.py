"""Declaring an agent that a model drives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from runtime_core.llm.agent import ModelAgent
from runtime_core.llm.input import is_conversation
from weft import App, Approve, LLMAgent
from weft.errors import ConfigurationError, InvalidInput


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"instructions": 3}, "instructions"),
        ({"tools": "search"}, "tools"),
        ({"handoffs": "writer"}, "handoffs"),
        ({"members": 3}, "members"),
        ({"approval": [lambda name: True]}, "approval"),
        ({"approval": Approve("pay")}, "approval"),
        ({"output_mode": "json"}, "output_mode"),
        ({"max_turns": 0}, "max_turns"),
        ({"output_retries": -1}, "output_retries"),
        ({"tool_retries": True}, "tool_retries"),
        ({"temperature": 0}, "no argument temperature"),
        ({"name": 3}, "name=3: pass text"),
        ({"description": 3}, "description=3: pass text"),
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000': pass a URL"),
        ({"api_key": b"secret"}, "api_key=a value that is not text: pass text"),
        ({"settings": 3}, "settings=3: pass a dict"),
        ({"settings": {3: 1}}, "settings=.*: pass a dict"),
        ({"prices": {"m": 2.0}}, "prices=.*: pass a dict of models"),
        ({"window": 3}, "window=3: pass KeepAll"),
        ({"estimate": 3}, "estimate=3: pass a function"),
        ({"stream": "yes"}, "stream='yes': pass True or False"),
        ({"retry": 3}, "retry=3: pass a RetryPolicy"),
        ({"call_seconds": -1}, "call_seconds=-1: pass seconds"),
        ({"connect_seconds": 0}, "connect_seconds=0: pass seconds"),
        ({"silence_seconds": "10"}, "silence_seconds='10': pass seconds"),
        ({"rate_limit_patience_seconds": float("nan")}, "rate_limit_patience_seconds=nan: pass seconds"),
    ],
)
def test_an_impossible_argument_of_an_agent_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LLMAgent(**{"model": "openai-chat:m", **arguments})


def test_a_function_that_is_not_a_tool_of_the_app_is_refused_at_the_check() -> None:
    app = App("desk")

    def search(query: str) -> str:
        return query

    app.add_agent("researcher", LLMAgent("openai-chat:m", tools=[search, "files.*", "elsewhere"]))
    with pytest.raises(ConfigurationError, match=r"agent 'researcher' .* names the unknown tool"):
        app.check()


def test_tools_of_other_apps_may_be_named_before_they_are_known() -> None:
    app = App("desk")
    app.add_agent("researcher", LLMAgent("openai-chat:m", tools=["files.*", "elsewhere"]))
    app.check()


def test_tools_may_be_named_where_it_is_declared_as_for_any_agent() -> None:
    app = App("desk")

    @app.tool
    def search(query: str) -> str:
        return query

    app.add_agent("researcher", LLMAgent("openai-chat:m"), tools=["search"])
    app.check()
    definition = app.agents["researcher"]
    assert isinstance(definition, ModelAgent)
    found = definition.toolset(app.functions, (), definition.decode_input(b'"a"'))
    assert [spec.name for spec in found.specs] == ["search"]


def test_the_manifest_says_what_other_agents_need_to_know() -> None:
    app = App("desk")
    app.add_agent("counter", LLMAgent("openai-chat:m", description="Counts.", output=list[int]))
    app.add_agent("talker", LLMAgent("openai-chat:m", handoffs=["counter"]))
    entries = app.manifest().agents
    assert entries["counter"].description == "Counts."
    assert entries["counter"].output == {"items": {"type": "integer"}, "type": "array"}
    assert is_conversation(entries["counter"].input)
    assert entries["talker"].output is None, "whoever takes the conversation over may answer with anything"


def test_an_input_is_refused_before_the_run_begins() -> None:
    app = App("desk")
    app.add_agent("talker", LLMAgent("openai-chat:m"))
    with pytest.raises(InvalidInput, match="input: is empty"):
        app.agents["talker"].decode_input(b'""')
    with pytest.raises(InvalidInput, match="input"):
        app.agents["talker"].decode_input(b"{")


def test_a_key_is_never_shown() -> None:
    agent = LLMAgent("openai-chat:m", api_key="secret-key")
    assert "secret-key" not in f"{agent!r} {agent.model!r}"


def test_declaring_such_agents_loads_no_client_of_models() -> None:
    program = (
        "import sys\n"
        "from weft import App, Approve, LLMAgent\n"
        "app = App('desk')\n"
        "app.add_agent('a', LLMAgent('openai-chat:m', output=list[int], approval=[Approve('pay')], tools=['x']))\n"
        "app.check()\n"
        "app.manifest()\n"
        "heavy = ('pydantic_ai', 'openai', 'mcp', 'opentelemetry', 'jsonschema_rs')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr
