"""One model call of an agent against the test server: both APIs, streamed and not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from typing_extensions import TypedDict

from runtime_core.llm.tokens import Price, said
from tests.integration.llm.asking import app_of, asked, asker, shown
from tests.openai_server.driver import OpenAIServer, Usage, answer, calls, failing, output, turns
from weft.hooks import Change, HookEvent
from weft.testing import LocalApp

APIS = ("openai-chat:gpt-test", "openai-responses:gpt-test")


class City(TypedDict):
    city: str


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_a_text_has_its_usage_and_cost(openai_server: OpenAIServer, api: str, stream: bool) -> None:
    openai_server.play(answer("Rain.", usage=Usage(input=1_000, output=200, cached=400)))
    prices = {"gpt-*": Price(input=2.0, output=10.0, cached_input=0.5)}
    async with LocalApp(app_of(asker(openai_server, api, stream=stream, prices=prices))) as client:
        task = await client.submit("asker", "Weather?")
        response = await task.result(timeout=60)
    assert response.value() == "Rain."
    cost = (600 * 2.0 + 400 * 0.5 + 200 * 10.0) / 1_000_000
    used = {"input_tokens": 1_000, "output_tokens": 200, "tokens": 1_200, "requests": 1, "cached_tokens": 400}
    assert {name: response.usage[name] for name in used} == used
    assert response.models["gpt-test"]["cost"] == pytest.approx(cost)
    assert openai_server.counts().repeated == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
async def test_tool_calls_come_with_their_arguments(openai_server: OpenAIServer, api: str, stream: bool) -> None:
    openai_server.play(turns(calls(("weather", {"city": "Bern"}), ("weather", '{"city": ')), answer("{results}")))
    app = app_of(asker(openai_server, api, stream=stream, tools=["weather"]))
    results: list[Any] = []

    @app.tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    @app.hook("after_llm_call", always=True)
    def note(event: HookEvent) -> None:
        results.append(event.payload)

    async with LocalApp(app) as client:
        told = (await asked(client))["text"]
    assert told.startswith("rain in Bern, ")
    assert "the call was not made: its arguments are not a JSON object" in told
    first, second = results
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_call", "stop")
    assert [part["tool_name"] for part in first["message"]["parts"]] == ["weather", "weather"]
    assert [bool(call.get("wrong")) for call in first["decided"]] == [False, True], "decided when the answer came"


@pytest.mark.parametrize("api", APIS)
async def test_structured_output_comes_by_a_tool_or_natively(openai_server: OpenAIServer, api: str) -> None:
    openai_server.play(output({"city": "Bern"}))
    for mode in ("tool", "native"):
        async with LocalApp(app_of(asker(openai_server, api, output=City, output_mode=mode))) as client:
            assert (await asked(client))["text"] == {"city": "Bern"}


@pytest.mark.parametrize("api", APIS)
async def test_text_is_streamed_to_the_client(openai_server: OpenAIServer, api: str) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    openai_server.play(answer(text))
    async with LocalApp(app_of(asker(openai_server, api))) as client:
        task = await client.submit("asker", "Tell me a lot")
        events = [event async for event in task.stream()]
    assert shown(events) == text
    pieces = [event for event in events if event.type == "weft.output.delta"]
    assert 1 < len(pieces) < 200, "pieces are put together, but not all of them"
    assert {event.data["attempt"] for event in pieces} == {1}
    assert all("/" in event.data["run_id"] for event in pieces)


async def test_a_model_of_the_client_and_a_function_that_makes_one_are_taken(openai_server: OpenAIServer) -> None:
    def made() -> OpenAIChatModel:
        provider = OpenAIProvider(base_url=openai_server.url, api_key=openai_server.key)
        return OpenAIChatModel("gpt-test", provider=provider)

    for model in (made, made()):
        openai_server.play(failing(503, times=1), answer("Right."))
        agent = asker(openai_server, model, base_url=None, api_key=None)
        # Twice: the connections of the first event are closed at its end, and a Model outlives that.
        for _ in range(2):
            async with LocalApp(app_of(agent)) as client:
                answered = await asked(client)
            assert (answered["text"], answered["model"]) == ("Right.", "gpt-test")
    assert [entry.retry for entry in openai_server.ledger()] == [openai_server.ledger()[0].retry] * 6


async def test_settings_reach_the_model_and_are_recorded(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("Right."))
    agent = asker(openai_server, settings={"temperature": 0.25, "max_tokens": 77})
    async with (local := LocalApp(app_of(agent), trajectory=True)) as client:
        task = await client.submit("asker", "Say something", session_id="s-1")
        await task.result(timeout=60)
        recorded = await local.recorded(task.task_id)
    body = openai_server.request(1)
    assert (body["temperature"], body["max_completion_tokens"]) == (0.25, 77)
    [row] = [step for step in recorded.steps if step.kind == "model"]
    assert row.name == "openai-chat:gpt-test"
    given, got = msgspec.json.decode(row.input), msgspec.json.decode(row.output)
    assert given["settings"] == {"temperature": 0.25, "max_tokens": 77}
    assert given["messages"][0]["parts"][0]["content"] == "Say something"
    assert got["message"]["parts"][0]["content"] == "Right."
    wanted = {
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-test",
        "gen_ai.request.temperature": 0.25,
        "gen_ai.agent.name": "asker",
        "gen_ai.conversation.id": "s-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "server.address": "127.0.0.1",
    }
    assert {name: row.attributes.get(name) for name in wanted} == wanted


async def test_a_postponed_call_has_a_row_with_its_error(openai_server: OpenAIServer) -> None:
    openai_server.play(failing(503, "down", times=1), answer("Right."))
    async with (local := LocalApp(app_of(asker(openai_server)), trajectory=True)) as client:
        task = await client.submit("asker", "Say something")
        await task.result(timeout=60)
        recorded = await local.recorded(task.task_id)
    first, second = [step for step in recorded.steps if step.kind == "model"]
    assert first.error is not None
    assert (first.error.type, first.error.message) == ("ModelOutage", "HTTP 503: down")
    assert first.attributes["error.type"] == "ModelOutage"
    assert second.error is None


async def test_a_hook_may_choose_another_model_and_other_messages(openai_server: OpenAIServer) -> None:
    openai_server.play(answer("You said {user}"))
    app = app_of(asker(openai_server))

    @app.hook("before_llm_call", always=True)
    def change(event: HookEvent) -> Change:
        return Change({**event.payload, "model": "openai-chat:gpt-other", "messages": [said("something else")]})

    async with LocalApp(app) as client:
        answered = await asked(client)
    assert (answered["model"], answered["text"]) == ("gpt-other", "You said something else")
