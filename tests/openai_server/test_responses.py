"""The server that stands for OpenAI in tests: its responses, read by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.openai_server.driver import (
    OpenAIServer,
    Usage,
    When,
    answer,
    calls,
    cut,
    gated,
    output,
    rate_limited,
    refusal,
    turns,
)

MODEL = "gpt-test"


@pytest.fixture
async def client(openai_server: OpenAIServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=openai_server.url, api_key=openai_server.key, max_retries=0) as client:
        yield client


async def test_a_response_has_its_text_and_usage(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(answer("You are {system}.", usage=Usage(10, 5, cached=4, reasoning=2)))
    response = await client.responses.create(model=MODEL, input="Who am I?", instructions="a cat")
    assert (response.output_text, response.status, response.model) == ("You are a cat.", "completed", MODEL)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10, 5, 15)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 2)


async def test_a_conversation_calls_tools_and_gets_their_results(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(
        turns(
            calls(("weather", {"city": "Bern"}), ("time", {}), text="Let me look."),
            answer("{results}", when=When(after="time", api="responses")),
        )
    )
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hello [c-3]"}]}]
    first = await client.responses.create(model=MODEL, input=items)
    made = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in made] == [("weather", {"city": "Bern"}), ("time", {})]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in zip(made, ("rain", "noon"), strict=True)
    ]
    second = await client.responses.create(model=MODEL, input=items)
    assert second.output_text == "rain, noon"
    assert [(entry.conversation, entry.model_messages, entry.tool_results) for entry in openai_server.ledger()] == [
        ("c-3", 0, 0),
        ("c-3", 1, 2),
    ]


async def test_a_stream_ends_with_the_whole_response(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(calls(("weather", {"city": "Bern"}), text="Let me look.", usage=Usage(7, 5)))
    async with client.responses.stream(model=MODEL, input="?") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert deltas == ["Let", " me", " lo", "ok."]
    assert final.output_text == "Let me look."
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    assert final.usage is not None
    assert final.usage.total_tokens == 12
    assert openai_server.ledger()[0].complete


async def test_the_events_of_a_stream_are_numbered_and_framed(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(answer("Sun.", reasoning="Look up.").but(pieces=1))
    events = [event async for event in await client.responses.create(model=MODEL, input="?", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


async def test_structured_output_is_the_text_where_a_format_is_asked(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(output({"city": "Bern"}))
    response = await client.responses.create(
        model=MODEL, input="?", text={"format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}}}
    )
    assert json.loads(response.output_text) == {"city": "Bern"}


async def test_refusals_and_incomplete_responses_are_returned(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(refusal("No.", when=When(user="bad")), answer("Ra", finish_reason="length"))
    refused = await client.responses.create(model=MODEL, input="bad")
    (message,) = refused.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "refusal"
    assert part.refusal == "No."
    short = await client.responses.create(model=MODEL, input="good")
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


async def test_faults_are_those_of_chat_completions(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(
        rate_limited(after=3, times=1),
        cut(answer("Hello."), after=3, times=1),
        gated(answer("Hello."), "{conversation}", after=2),
    )
    with pytest.raises(openai.RateLimitError) as limited:
        await client.responses.create(model=MODEL, input="[c-1]")
    assert limited.value.response.headers["retry-after"] == "3"
    events = aiter(await client.responses.create(model=MODEL, input="[c-1]", stream=True))
    for _ in range(3):
        await anext(events)
    with pytest.raises(openai.APIConnectionError):
        await anext(events)
    events = aiter(await client.responses.create(model=MODEL, input="[c-1]", stream=True))
    await openai_server.waits("c-1")
    openai_server.release("c-1")
    assert [event.type async for event in events][-1] == "response.completed"
    assert [entry.complete for entry in openai_server.ledger() if entry.answer] == [False, True]


async def test_a_stream_ends_with_an_error(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(cut(answer("Hello."), after=5, error="The model is gone."))
    events = [event async for event in await client.responses.create(model=MODEL, input="?", stream=True)]
    last = events[-1]
    assert last.type == "error"
    assert (last.message, last.sequence_number) == ("The model is gone.", 5)
    assert not openai_server.ledger()[0].complete


async def test_a_response_that_is_not_kept_cannot_be_continued(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(answer("Hello."))
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        await client.responses.create(model=MODEL, input="?", previous_response_id="resp_1")
