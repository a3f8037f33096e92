"""Requests as they are recorded, and what an attempt counts and waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from runtime_core.llm.attempt import (
    Attempts,
    _usage,
    backoff,
    label_of,
    messages_json,
    messages_of,
    overhead_tokens,
    request_json,
    with_tools,
)
from runtime_core.llm.failures import RATE_LIMITED

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
SEARCH = ToolDefinition(name="search", description="Searches.", parameters_json_schema={"type": "object"})
ANSWER = ToolDefinition(name="final", parameters_json_schema={"type": "object"})


def asked(at: datetime) -> ModelRequest:
    return ModelRequest([UserPromptPart("hi", timestamp=at)], timestamp=at)


def test_a_request_is_recorded_without_the_clock_of_its_process() -> None:
    answer = ModelResponse([TextPart("hello")], timestamp=NOON)
    parameters = ModelRequestParameters(function_tools=[SEARCH], output_tools=[ANSWER], output_mode="tool")
    one, other = (
        request_json([asked(at), answer], "m", {"temperature": 0}, parameters)
        for at in (NOON, NOON + timedelta(hours=1))
    )
    assert one == other
    assert messages_of(one["messages"])[1] == answer, "the model's own time stays"
    assert [tool["name"] for tool in one["tools"]] == ["search", "final"]
    assert (one["settings"], one["output"]) == ({"temperature": 0}, {"mode": "tool"})
    assert set(request_json([asked(NOON)], "m", None, ModelRequestParameters())) == {"messages", "model"}


def test_messages_are_the_same_after_their_json() -> None:
    messages: list[ModelMessage] = [asked(NOON), ModelResponse([TextPart("hello")], timestamp=NOON)]
    assert messages_of(messages_json(messages)) == messages


def test_a_hook_may_change_the_tools_of_a_request() -> None:
    parameters = ModelRequestParameters(function_tools=[SEARCH], output_tools=[ANSWER])
    tools = [
        {"name": "own", "description": "Added.", "arguments": {"type": "object"}},
        {"name": "final", "description": "", "arguments": {"type": "string"}},
    ]
    made = with_tools(parameters, tools)
    assert [(tool.name, tool.description) for tool in made.function_tools] == [("own", "Added.")]
    assert [tool.parameters_json_schema for tool in made.output_tools] == [{"type": "string"}]


def test_a_model_that_is_not_open_has_a_name() -> None:
    def factory() -> None: ...

    assert label_of("openai:m") == "openai:m"
    assert label_of(type("Named", (), {"model_id": "x:m"})()) == "x:m"
    assert label_of(factory).endswith("factory")
    assert label_of(NOON) == "datetime"


def test_tools_and_schemas_count_as_tokens() -> None:
    request = {"tools": [{"name": "search"}], "output": {"schema": {"type": "object", "title": "x" * 400}}}
    assert overhead_tokens({}) < overhead_tokens({"tools": request["tools"]}) < overhead_tokens(request)


def test_unanswered_attempts_are_counted_by_reason() -> None:
    tries = Attempts(NOON, None)
    for kind in (RATE_LIMITED, "Timeout", RATE_LIMITED):
        tries.count({"error": {"type": kind}})
    tries.count({})
    assert (tries.rate_limits, tries.outages) == (2, 2)


@pytest.mark.parametrize(("number", "seconds"), [(1, 0.5), (2, 0.75), (3, 1.125), (50, 60.0), (10**9, 60.0)])
def test_waits_grow_up_to_a_bound(number: int, seconds: float) -> None:
    assert backoff((0.5, 60.0), 1.5, number) == seconds


def test_only_what_a_provider_reports_is_usage() -> None:
    plain = ModelResponse([], usage=RequestUsage(input_tokens=3, output_tokens=2))
    assert _usage(plain) == {"input_tokens": 3, "output_tokens": 2, "tokens": 5, "requests": 1}
    cached = ModelResponse([], usage=RequestUsage(input_tokens=3, cache_read_tokens=1, details={"reasoning_tokens": 7}))
    assert (_usage(cached)["cached_tokens"], _usage(cached)["reasoning_tokens"]) == (1, 7)
