"""One model call of an agent against the test server: both APIs, streamed and not."""

from __future__ import annotations

import json

import pytest

from runtime_core.llm.prices import Price
from runtime_core.llm.settings import OutputSpec, ToolSpec
from runtime_core.testing.local import LocalApp
from tests.integration.llm.asking import app_of, asked, settings, shown
from tests.openai_server.driver import OpenAIServer, Usage, answer, calls, output

APIS = ("openai-chat:gpt-test", "openai-responses:gpt-test")
WEATHER = ToolSpec("weather", "The weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
CITY = OutputSpec(
    "final_result",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_a_text_comes_with_its_usage_and_cost(openai_server: OpenAIServer, api: str, stream: bool) -> None:
    openai_server.play(answer("Rain.", usage=Usage(input=1_000, output=200, cached=400)))
    prices = {"gpt-*": Price(input=2.0, output=10.0, cached_input=0.5)}
    async with LocalApp(app_of(settings(openai_server, api, stream=stream, prices=prices))) as client:
        task = await client.submit("asker", "Weather?")
        response = await task.result(timeout=60)
    said = response.value()
    assert (said["text"], said["finish"], said["model"], said["provider"]) == ("Rain.", "stop", "gpt-test", "openai")
    cost = (600 * 2.0 + 400 * 0.5 + 200 * 10.0) / 1_000_000
    assert said["usage"]["cost"] == pytest.approx(cost)
    used = {"input_tokens": 1_000, "output_tokens": 200, "tokens": 1_200, "requests": 1, "cached_tokens": 400}
    assert {name: response.usage[name] for name in used} == used
    assert response.models["gpt-test"]["cost"] == pytest.approx(cost)
    assert openai_server.counts().repeated == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_tool_calls_come_with_their_arguments(openai_server: OpenAIServer, api: str, stream: bool) -> None:
    openai_server.play(calls(("weather", {"city": "Bern"}), ("weather", '{"city": ')))
    async with LocalApp(app_of(settings(openai_server, api, stream=stream), tools=(WEATHER,))) as client:
        said = await asked(client)
    assert said["calls"] == [["weather", {"city": "Bern"}], ["weather", '{"city": ']]
    assert said["finish"] == "tool_call"


@pytest.mark.parametrize("api", APIS)
async def test_structured_output_comes_by_a_tool_or_natively(openai_server: OpenAIServer, api: str) -> None:
    openai_server.play(output({"city": "Bern"}))
    async with LocalApp(app_of(settings(openai_server, api), output=CITY)) as client:
        assert (await asked(client))["calls"] == [["final_result", {"city": "Bern"}]]
    native = OutputSpec(CITY.name, CITY.schema, "native")
    async with LocalApp(app_of(settings(openai_server, api), output=native)) as client:
        assert json.loads((await asked(client))["text"]) == {"city": "Bern"}


@pytest.mark.parametrize("api", APIS)
async def test_text_goes_to_the_client_while_it_is_written(openai_server: OpenAIServer, api: str) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    openai_server.play(answer(text))
    async with LocalApp(app_of(settings(openai_server, api))) as client:
        task = await client.submit("asker", "Tell me a lot")
        events = [event async for event in task.stream()]
    assert shown(events) == text
    pieces = [event for event in events if event.type == "weft.output.delta"]
    assert 1 < len(pieces) < 200, "pieces are put together, but not all of them"
    assert {event.data["attempt"] for event in pieces} == {1}
    assert all("/" in event.data["run_id"] for event in pieces)
