"""The server that stands for OpenAI in tests, read by pydantic-ai's models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from typing_extensions import TypedDict

from tests.openai_server.driver import OpenAIServer, Usage, When, answer, calls, output, rate_limited, turns

TOOLS = ModelRequestParameters(
    function_tools=[ToolDefinition(name="weather", parameters_json_schema={"type": "object", "properties": {}})],
    allow_text_output=True,
)


class City(TypedDict):
    name: str


@pytest.fixture(params=["chat", "responses"])
async def model(request: pytest.FixtureRequest, openai_server: OpenAIServer) -> AsyncIterator[Model[Any]]:
    async with AsyncOpenAI(base_url=openai_server.url, api_key=openai_server.key, max_retries=0) as client:
        provider = OpenAIProvider(openai_client=client)
        if request.param == "chat":
            yield OpenAIChatModel("gpt-test", provider=provider)
        else:
            yield OpenAIResponsesModel("gpt-test", provider=provider)


async def test_a_request_is_answered(openai_server: OpenAIServer, model: Model[Any]) -> None:
    openai_server.play(calls(("weather", {"city": "Bern"}), ("weather", {}), usage=Usage(9, 4, cached=3)))
    response = await model_request(model, [ModelRequest.user_text_prompt("?")], model_request_parameters=TOOLS)
    found = [(part.tool_name, part.args_as_dict()) for part in response.parts if isinstance(part, ToolCallPart)]
    assert found == [("weather", {"city": "Bern"}), ("weather", {})]
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (9, 4, 3)
    assert response.model_name == "gpt-test"
    # A response of this API has calls among its items and no reason of its own for them.
    assert response.finish_reason == ("tool_call" if isinstance(model, OpenAIChatModel) else "stop")


async def test_a_request_is_answered_by_a_stream(openai_server: OpenAIServer, model: Model[Any]) -> None:
    openai_server.play(calls(("weather", {"city": "Bern"}), text="Let me look.", usage=Usage(9, 4)))
    messages = [ModelRequest.user_text_prompt("?")]
    async with model_request_stream(model, messages, model_request_parameters=TOOLS) as stream:
        events = [event async for event in stream]
        response = stream.get()
    assert len(events) > 4
    assert response.text == "Let me look."
    (call,) = [part for part in response.parts if isinstance(part, ToolCallPart)]
    assert call.args_as_dict() == {"city": "Bern"}
    assert (response.usage.input_tokens, response.usage.output_tokens) == (9, 4)
    (entry,) = openai_server.ledger()
    assert (entry.stream, entry.complete) == (True, True)


async def test_a_rate_limit_says_how_long(openai_server: OpenAIServer, model: Model[Any]) -> None:
    openai_server.play(rate_limited(after=7))
    with pytest.raises(ModelHTTPError) as raised:
        await model_request(model, [ModelRequest.user_text_prompt("?")])
    assert raised.value.status_code == 429
    assert raised.value.retry_after == 7


@pytest.mark.parametrize("native", [False, True])
async def test_an_agent_reaches_its_structured_output(
    openai_server: OpenAIServer, model: Model[Any], native: bool
) -> None:
    openai_server.play(
        turns(
            calls(("weather", {"city": "Bern"})),
            output({"wrong": "Bern"}, when=When(tool_results=1)),
            output({"name": "{conversation}"}),
        )
    )
    agent = Agent(model, output_type=NativeOutput(City) if native else City, retries=2)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"Rain in {city}."

    result = await agent.run("Where does it rain? [c-5]")
    assert result.output == {"name": "c-5"}
    entries = openai_server.ledger(conversation="c-5")
    assert [(entry.model_messages, entry.complete) for entry in entries] == [(0, True), (1, True), (2, True)]
    assert result.usage.input_tokens == sum(entry.usage.input for entry in entries if entry.usage)
    assert openai_server.repeated() == []


async def test_a_conversation_is_recognized_by_its_marked_first_message(
    openai_server: OpenAIServer, model: Model[Any]
) -> None:
    openai_server.play(answer("{turn}", when=When(user="again")), answer("Hello."))
    agent = Agent(model)
    first = await agent.run("Hello [c-9]")
    second = await agent.run("And again", message_history=first.all_messages())
    assert second.output == "0"
    assert [(entry.conversation, entry.model_messages) for entry in openai_server.ledger()] == [("c-9", 0), ("c-9", 1)]
