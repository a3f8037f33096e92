"""Dead letters are grouped by what their errors have in common."""

from __future__ import annotations

import json
import time

import pytest

from runtime_core.state_manager.dead_letters import GROUP_CHARACTERS, DeadLetter, LetterFilter


def letter(message: str, kind: str = "ValueError") -> DeadLetter:
    return DeadLetter("1-0", 0, "1-0", {"error": json.dumps({"type": kind, "message": message}).encode()})


@pytest.mark.parametrize(
    ("message", "group"),
    [
        ("no answer within 30 s\nat line 5", "no answer within … s"),
        ("order-7 of 'Ada Lovelace' is gone", "… of … is gone"),
        ('"text" is not of type "integer"', "… is not of type …"),
        ("it isn't there, and can't be", "it isn't there, and can't be"),
        ("0x7f3c at https://host-1.example/a?b=2", "… at …?b=…"),
        ("a\tb\x1b[31m  c", "a b…[… c"),
        ("plain", "plain"),
    ],
)
def test_errors_that_differ_in_values_only_are_one_group(message: str, group: str) -> None:
    found = letter(message)
    assert found.shown_group("error") == f"ValueError: {group}"
    assert found in LetterFilter(error=found.shown_group("error")), "the filter follows the same rule"


@pytest.mark.parametrize("text", ["word ", "'", '"', "7", "a" * 50 + " ", "\\"])
def test_a_group_is_bounded_in_size_and_time(text: str) -> None:
    began = time.thread_time()
    found = letter(text * (2_000_000 // len(text)))
    assert len(found.shown_group("error")) <= GROUP_CHARACTERS
    assert time.thread_time() - began < 1
