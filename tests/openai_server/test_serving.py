"""The server that stands for OpenAI in tests, read by OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from tests.openai_server.driver import (
    OpenAIServer,
    Usage,
    When,
    answer,
    broken,
    calls,
    cut,
    failing,
    gated,
    output,
    rate_limited,
    refusal,
    turns,
)

MODEL = "gpt-test"
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
async def client(openai_server: OpenAIServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=openai_server.url, api_key=openai_server.key, max_retries=0) as client:
        yield client


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_a_text_is_answered_by_the_first_rule_that_matches(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(answer("Sun.", when=When(user="Bern")), answer("You asked {user}", usage=Usage(10, 3, cached=4)))
    bern = await client.chat.completions.create(model=MODEL, messages=said("Weather in Bern?"))
    rome = await client.chat.completions.create(model=MODEL, messages=said("in Rome?"))
    assert (bern.choices[0].message.content, bern.choices[0].finish_reason, bern.model) == ("Sun.", "stop", MODEL)
    assert rome.choices[0].message.content == "You asked in Rome?"
    assert rome.usage is not None
    assert (rome.usage.prompt_tokens, rome.usage.completion_tokens, rome.usage.total_tokens) == (10, 3, 13)
    assert rome.usage.prompt_tokens_details is not None
    assert rome.usage.prompt_tokens_details.cached_tokens == 4


async def test_a_request_without_a_matching_rule_gets_an_error(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(answer("Sun.", when=When(model="other-*")))
    with pytest.raises(openai.BadRequestError, match="no rule of the script matches"):
        await client.chat.completions.create(model=MODEL, messages=said("Hello"))


async def test_a_conversation_with_tools_keeps_its_own_messages(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(turns(calls(("weather", {"city": "{user}"}), ("time", {})), answer("{results}")))
    messages = said("Bern [c-7]")
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    asked = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert asked.tool_calls is not None
    made = [
        (call.function.name, json.loads(call.function.arguments))
        for call in asked.tool_calls
        if call.type == "function"
    ]
    assert made == [("weather", {"city": "Bern [c-7]"}), ("time", {})]
    messages.append(asked.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(asked.tool_calls, ("rain", "noon"), strict=True)
    ]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "rain, noon"
    entries = openai_server.ledger(conversation="c-7")
    assert [(entry.complete, entry.status, entry.model_messages, entry.tool_results) for entry in entries] == [
        (True, 200, 0, 0),
        (True, 200, 1, 2),
    ]
    assert openai_server.request(2)["messages"] == json.loads(json.dumps(messages))


async def test_the_same_question_has_the_same_answer_and_is_counted_as_repeated(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(calls(("weather", {})))
    answers = [await client.chat.completions.create(model=MODEL, messages=said("Hello")) for _ in range(2)]
    await client.chat.completions.create(model=MODEL, messages=said("Hello!"))
    assert answers[0].choices == answers[1].choices
    assert answers[0].usage == answers[1].usage
    assert [answer.id.rpartition("-")[2] for answer in answers] == ["1", "2"]
    assert [entry.number for entry in openai_server.repeated()] == [2]
    counts = openai_server.counts()
    assert (counts.asked, counts.complete, counts.repeated, counts.statuses) == (3, 3, 1, {"200": 3})


async def test_a_stream_brings_text_calls_and_usage(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(calls(("weather", {"city": "Bern"}), ("time", {}), text="Let me look.", usage=Usage(7, 5)))
    async with client.chat.completions.stream(
        model=MODEL, messages=said("?"), stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Bern"}'),
        ("time", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.total_tokens == 12
    assert openai_server.ledger()[0].complete


async def test_structured_output_uses_the_requested_mode(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(output({"city": "Bern"}))
    native = await client.chat.completions.create(
        model=MODEL,
        messages=said("?"),
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )
    assert json.loads(native.choices[0].message.content or "") == {"city": "Bern"}
    tool: Any = {"type": "function", "function": {"name": "final_result", "parameters": SCHEMA}}
    called = await client.chat.completions.create(model=MODEL, messages=said("?"), tools=[tool])
    assert called.choices[0].message.tool_calls is not None
    (call,) = called.choices[0].message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("final_result", {"city": "Bern"})


async def test_a_rule_may_answer_a_few_times_in_each_conversation(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(output({"city": 1}).but(times=2), output({"city": "Bern"}))
    found = {
        name: [
            json.loads(
                (await client.chat.completions.create(model=MODEL, messages=said(name))).choices[0].message.content
                or ""
            )["city"]
            for _ in range(3)
        ]
        for name in ("[c-1]", "[c-2]")
    }
    assert found == {"[c-1]": [1, 1, "Bern"], "[c-2]": [1, 1, "Bern"]}


async def test_refusals_and_finish_reasons_are_returned(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(refusal("No.", when=When(user="bad")), answer("Ra", finish_reason="length"))
    refused = await client.chat.completions.create(model=MODEL, messages=said("bad"))
    short = await client.chat.completions.create(model=MODEL, messages=said("good"))
    assert refused.choices[0].message.refusal == "No."
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("Ra", "length")


async def test_a_rate_limit_names_the_time_to_retry(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(
        rate_limited(after=2, times=1),
        rate_limited(after_ms=250, times=1),
        rate_limited(after=90, date=True, times=1),
        answer("At last."),
    )
    limits = []
    for _ in range(3):
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(model=MODEL, messages=said("Hello"))
        limits.append(raised.value)
    headers = [limit.response.headers for limit in limits]
    assert headers[0]["retry-after"] == "2"
    assert headers[1]["retry-after-ms"] == "250"
    assert parsedate_to_datetime(headers[2]["retry-after"]).tzinfo is not None
    assert limits[0].code == "rate_limit_exceeded"
    done = await client.chat.completions.create(model=MODEL, messages=said("Hello"))
    assert done.choices[0].message.content == "At last."
    assert openai_server.counts().statuses == {"429": 3, "200": 1}
    # A refusal is not an answer: the question was answered once.
    assert openai_server.counts().complete == 1
    assert openai_server.repeated() == []


async def test_a_rate_limit_lasts_until_the_test_ends_it(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(rate_limited(until="calm"), answer("Hello."))
    for _ in range(3):
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=said("Hello"))
    openai_server.release("calm")
    done = await client.chat.completions.create(model=MODEL, messages=said("Hello"))
    assert done.choices[0].message.content == "Hello."


async def test_errors_have_the_status_and_the_shape_of_the_service(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    openai_server.play(failing(503, "Overloaded.", times=1), answer("Hello."), models=[MODEL])
    with pytest.raises(openai.InternalServerError, match="Overloaded") as overloaded:
        await client.chat.completions.create(model=MODEL, messages=said("Hello"))
    assert overloaded.value.status_code == 503
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        await client.chat.completions.create(model="gpt-none", messages=said("Hello"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=said("Hello"))
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert openai_server.counts().statuses == {"503": 1, "404": 1, "401": 1}


async def test_failures_by_probability_are_the_same_for_the_same_seed(
    openai_server: OpenAIServer, client: AsyncOpenAI
) -> None:
    rounds = []
    for _ in range(2):
        openai_server.play(failing(500, probability=0.5, seed=3), answer("Hello."))
        before = len(openai_server.ledger())
        for number in range(20):
            with contextlib.suppress(openai.InternalServerError):
                await client.chat.completions.create(model=MODEL, messages=said(f"[c-{number}]"))
        rounds.append([entry.status for entry in openai_server.ledger()[before:]])
    assert rounds[0] == rounds[1]
    assert set(rounds[0]) == {200, 500}


async def test_invalid_bodies_are_sent_unchanged(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(broken("{not JSON", times=1), broken("", times=1), answer("Hello."))
    raw = client.chat.completions.with_raw_response
    bodies = [(await raw.create(model=MODEL, messages=said("Hello"))).text for _ in range(2)]
    assert bodies == ["{not JSON", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_ends_before_anything_was_sent(
    openai_server: OpenAIServer, client: AsyncOpenAI, stream: bool
) -> None:
    openai_server.play(cut(answer("Hello."), headers=False, times=1), answer("Hello again."))
    with pytest.raises(openai.APIConnectionError):
        await client.chat.completions.create(model=MODEL, messages=said("Hello"), stream=stream)
    (entry,) = openai_server.ledger()
    assert (entry.status, entry.complete, entry.pieces, entry.ended is None) == (None, False, 0, False)


async def test_a_connection_ends_in_the_middle_of_a_body(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(cut(answer("Hello."), after=1))
    with pytest.raises(openai.APIConnectionError):
        await client.chat.completions.create(model=MODEL, messages=said("Hello"))
    (entry,) = openai_server.ledger()
    assert (entry.status, entry.complete, entry.pieces) == (200, False, 1)
    assert entry.usage is not None


async def test_a_connection_ends_in_the_middle_of_a_stream(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(cut(answer("one two three four"), after=3))
    stream = await client.chat.completions.create(model=MODEL, messages=said("Hello"), stream=True)
    chunks = aiter(stream)
    texts = [(await anext(chunks)).choices[0].delta.content for _ in range(3)]
    with pytest.raises(openai.APIConnectionError):
        await anext(chunks)
    assert texts == ["", "one t", "wo th"]
    assert not openai_server.ledger()[0].complete


async def test_a_stream_ends_with_an_error(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(cut(answer("one two three four"), after=3, error="The model is gone."))
    chunks = aiter(await client.chat.completions.create(model=MODEL, messages=said("Hello"), stream=True))
    for _ in range(3):
        await anext(chunks)
    with pytest.raises(openai.APIError, match="The model is gone"):
        await anext(chunks)
    assert not openai_server.ledger()[0].complete


async def test_a_stream_is_released_piece_by_piece(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(gated(answer("one two three four"), "{conversation}", after=2))
    stream = await client.chat.completions.create(model=MODEL, messages=said("[c-1]"), stream=True)
    texts = aiter(stream)
    assert [(await anext(texts)).choices[0].delta.content for _ in range(2)] == ["", "one t"]
    (entry,) = await openai_server.waits("c-1")
    assert (entry.pieces, entry.complete) == (2, False)
    openai_server.release("c-1", 1)
    assert (await anext(texts)).choices[0].delta.content == "wo th"
    (entry,) = await openai_server.waits("c-1")
    assert entry.pieces == 3
    openai_server.release("c-1")
    rest = [chunk.choices[0].delta.content async for chunk in texts]
    assert rest == ["ree f", "our", None]
    assert openai_server.ledger()[0].complete


async def test_a_client_that_disconnects_at_a_gate_is_noticed(openai_server: OpenAIServer) -> None:
    openai_server.play(gated(answer("Hello."), "shut", headers=False))
    async with AsyncOpenAI(base_url=openai_server.url, api_key=openai_server.key, max_retries=0) as client:
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=said("Hello")))
        await openai_server.waits("shut")
        asking.cancel()
        await asyncio.wait((asking,))
        (entry,) = await openai_server.until(lambda entries: entries[0].ended, "the client has left")
    assert (entry.left, entry.complete, entry.waits) == (True, False, None)


async def test_the_ledger_outlives_a_kill_of_the_server(openai_server: OpenAIServer, client: AsyncOpenAI) -> None:
    openai_server.play(answer("Hello.", when=When(user="now")), gated(answer("Hello."), "shut"))
    asked_by = {"x-asked-by": "handler-1"}
    await client.chat.completions.create(model=MODEL, messages=said("now"), extra_headers=asked_by)
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=said("later")))
    await openai_server.waits("shut")
    openai_server.kill()
    with pytest.raises(openai.APIConnectionError):
        await asking
    kept = [(entry.number, entry.complete, entry.ended is None, entry.asked_by) for entry in openai_server.kept()]
    assert kept == [(1, True, False, "handler-1"), (2, False, True, None)]
    openai_server.start()
    openai_server.play(answer("Hello."))
    await client.chat.completions.create(model=MODEL, messages=said("later"))


async def test_a_script_with_a_wrong_field_is_refused(openai_server: OpenAIServer) -> None:
    body = b'{"rules": [{"answer": {"text": "", "colour": 1}}]}'
    with pytest.raises(AssertionError, match=r"unknown field `colour`.*rules\[0\]"):
        openai_server._ask("POST", "/script", msgspec.Raw(body), type=dict)
