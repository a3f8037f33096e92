"""The forms of input of an agent that a model drives."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.llm.input import read
from weft.errors import InvalidInput

PICTURE = {"kind": "image-url", "url": "http://localhost/a.png"}


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("Say hello.", "Say hello."),
        (["Look:", PICTURE], ["Look:", PICTURE]),
        ([{"type": "text", "text": "Look:"}, {"type": "image", "url": PICTURE["url"]}], ["Look:", PICTURE]),
        ({"prompt": "Say hello."}, "Say hello."),
        ({"prompt": ["Look:", PICTURE]}, ["Look:", PICTURE]),
        ({"content": "seen", "observer": "searcher"}, "seen"),
        ({"content": "seen", "images": [PICTURE["url"]]}, ["seen", PICTURE]),
        ({"topic": "streams", "année": 2024}, '{"topic": "streams", "année": 2024}'),
        ([{"name": "a"}, {"name": "b"}], '[{"name": "a"}, {"name": "b"}]'),
        (3, "3"),
        (False, "false"),
    ],
)
def test_the_prompt_is_read_in_each_form(given: Any, prompt: Any) -> None:
    assert read(given).prompt == prompt


def test_a_history_may_come_with_it() -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    found = read({"prompt": "And now?", "history": said})
    assert found.history is not None
    assert [message["kind"] for message in found.history] == ["request", "response"]
    assert found.history[1]["parts"][0]["content"] == "Hi"


def test_a_history_that_ends_with_a_question_needs_no_prompt() -> None:
    found = read({"history": [{"role": "user", "content": "Hello"}], "handed": ["triage"]})
    assert found.prompt is None
    assert found.handed == ["triage"]


def test_the_info_of_a_swarm_is_read() -> None:
    found = read({"content": "seen", "info": {"team": ["a", "b"], "handoffs": "c", "max_steps": 3}})
    assert found.names("team") == ["a", "b"]
    assert found.names("handoffs") == []
    assert found.info["max_steps"] == 3


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (None, "input"),
        ("", "input"),
        ("  ", "input"),
        ({"prompt": ""}, "input.prompt"),
        ({"prompt": 1}, "input.prompt"),
        ({"prompt": [1]}, "input.prompt.0"),
        ({"prompt": [{"kind": "image-url"}]}, "input.prompt.0.url"),
        ({"prompt": [{"kind": "binary", "data": "AA=="}]}, "input.prompt.0.media_type"),
        ({"prompt": "a", "histroy": []}, "input.histroy"),
        ({"history": []}, "input.prompt"),
        ({"history": [{"role": "assistant", "content": "Hi"}]}, "input.prompt"),
        ({"prompt": "a", "history": [{"role": "robot", "content": "Hi"}]}, "input.history.0"),
        ({"prompt": "a", "history": "none"}, "input.history"),
        ({"content": None}, "input.content"),
    ],
)
def test_an_unreadable_part_of_the_input_is_named(given: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(given)
    assert refused.value.field == field
