"""Which rule of a script answers a request to the server that stands for OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.openai_server import chat, responses
from tests.openai_server.answering import parts_of, say
from tests.openai_server.asked import Asked
from tests.openai_server.driver import Rule, When, answer, calls, failing, rate_limited, turns
from tests.openai_server.script import Chooser

CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello [c-1]"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "Is it raining?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "rain in Bern"},
]
INPUT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello [c-1]"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    {"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]},
    {"type": "reasoning", "id": "rs-1", "summary": []},
    {"type": "function_call", "call_id": "call-1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call-1", "output": "rain in Bern"},
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def asked(messages: Sequence[dict[str, Any]] = MESSAGES, **fields: Any) -> Asked:
    return chat.read({"model": "gpt-test", "messages": messages, "tools": TOOLS, **fields}, {})


def chosen(rules: Sequence[Rule], questions: Sequence[Asked], opened: Sequence[str] = ()) -> list[str | None]:
    """Return the name of the rule that answers each of these questions, asked one after the other."""
    chooser = Chooser(tuple(rules), lambda gate: gate in opened)
    names = [chooser.choose(question) for question in questions]
    return [None if found is None else found[0] for found in names]


def test_both_formats_say_the_same() -> None:
    by_chat = asked()
    items = {
        "model": "gpt-test",
        "input": INPUT,
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "weather"}],
    }
    by_responses = responses.read(items, {})
    for field in ("conversation", "system", "users", "results", "ends_in_result", "model_messages", "turn", "tools"):
        assert getattr(by_chat, field) == getattr(by_responses, field), field
    assert (by_chat.model_messages, by_chat.turn, by_chat.users[-1]) == (2, 1, "Is it raining?")


@pytest.mark.parametrize(
    ("matching", "other"),
    [
        (When(api="chat"), When(api="responses")),
        (When(model="gpt-*"), When(model="o-*")),
        (When(stream=False), When(stream=True)),
        (When(conversation="c-?"), When(conversation="c-2")),
        (When(system="brief"), When(system="long")),
        (When(user="raining"), When(user="Hello")),
        (When(first_user="Hello"), When(first_user="raining")),
        (When(result="Bern"), When(result="Rome")),
        (When(after="weather"), When(after="time")),
        (When(tool="weather"), When(tool="time")),
        (When(messages=6), When(messages=5)),
        (When(user_messages=2), When(user_messages=1)),
        (When(model_messages=2), When(model_messages=1)),
        (When(turn=1), When(turn=2)),
        (When(tool_results=1), When(tool_results=0)),
    ],
)
def test_a_rule_answers_matching_requests(matching: When, other: When) -> None:
    rules = (answer("a", when=other).but(name="other"), answer("b", when=matching).but(name="matching"))
    assert chosen(rules, [asked()]) == ["matching"]
    assert chosen(rules[:1], [asked()]) == [None]


def test_after_a_tool_means_that_its_result_is_the_last_word() -> None:
    spoken = asked([*MESSAGES, {"role": "assistant", "content": "Yes."}])
    assert chosen([answer("a", when=When(after="weather"))], [asked(), spoken]) == ["0", None]


def test_the_first_rule_that_is_not_used_up_answers() -> None:
    one, two = asked(user="one"), asked(user="two")
    each = [rate_limited(times=1), answer("Hello.")]
    assert chosen(each, [one, two, one, two]) == ["0", "0", "1", "1"]
    in_all = [rate_limited(in_all=1), answer("Hello.")]
    assert chosen(in_all, [one, two, one]) == ["0", "1", "1"]


def test_a_rule_may_answer_for_a_while_or_until_a_gate_is_open() -> None:
    assert chosen([rate_limited(seconds=3600), answer("Hello.")], [asked()] * 2) == ["0", "0"]
    assert chosen([rate_limited(seconds=0), answer("Hello.")], [asked()]) == ["1"]
    until = [rate_limited(until="calm"), answer("Hello.")]
    assert chosen(until, [asked()]) == ["0"]
    assert chosen(until, [asked()], ["calm"]) == ["1"]


def test_chance_follows_from_the_seed_and_the_request_not_from_the_order() -> None:
    questions = [asked(user=f"c-{number}") for number in range(50)]
    rules = [failing(500, probability=0.5, seed=1), answer("Hello.")]
    found = chosen(rules, questions)
    assert set(found) == {"0", "1"}
    assert chosen(rules, questions[::-1]) == found[::-1]
    assert chosen([failing(500, probability=0.5, seed=2), answer("Hello.")], questions) != found
    assert chosen([failing(500, probability=0.0), failing(503, probability=1.0)], questions[:1]) == ["1"]


def test_turns_are_recognized_by_the_answers_of_the_model() -> None:
    rules = turns(calls(("weather", {})), calls(("weather", {})), answer("Rain."))
    assert chosen(rules, [asked(), asked(MESSAGES[:2])]) == ["2", "0"]


def test_a_request_is_identified_by_its_question() -> None:
    assert asked().digest == asked(temperature=1).digest
    others = [asked(model="gpt-other"), asked(MESSAGES[:-1]), asked(user="someone")]
    assert len({asked().digest, *(other.digest for other in others)}) == 4


def test_blanks_are_filled_in_texts_and_in_arguments() -> None:
    question = asked([{"role": "user", "content": 'Say "a\nb" [c-4]'}])
    rule = calls(("note", {"said": "{user}", "from": "{conversation}"}), text="{conversation} {turn} {results}|{other}")
    assert rule.answer is not None
    said = say(rule.answer, question)
    assert said.text == "c-4 0 |{other}"
    assert said.calls[0].arguments == '{"said": "Say \\"a\\nb\\" [c-4]", "from": "c-4"}'
    assert say(rule.answer, question) == said


def test_a_text_in_parts_is_the_text() -> None:
    for text in ("", "a", "abcdefg"):
        for count in (1, 2, 4, 100):
            parts = parts_of(text, count)
            assert "".join(parts) == text
            assert len(parts) <= count
            assert all(parts)
