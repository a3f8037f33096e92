"""Limits that end a conversation that would not end by itself."""

from __future__ import annotations

import pytest

from runtime_core.llm.failures import ConversationFailed
from runtime_core.llm.pydantic_ai.durability import FAIL_AT, WARN_AT, RepeatedCalls


def guards() -> RepeatedCalls:
    return RepeatedCalls("agent 'a'")


def test_a_model_that_repeats_a_call_is_warned_and_then_stopped() -> None:
    counted = guards()
    told = [counted.called("search", {"query": "a", "limit": 1}) for _ in range(FAIL_AT - 1)]
    assert [bool(each) for each in told] == [number >= WARN_AT for number in range(1, FAIL_AT)]
    with pytest.raises(ConversationFailed, match="agent 'a' called search 6 times in a row") as ended:
        counted.called("search", {"limit": 1, "query": "a"})
    assert ended.value.type == "RepeatedCall"


def test_a_different_call_in_between_resets_the_count() -> None:
    counted = guards()
    for _ in range(4):
        assert counted.called("search", {"query": "a"}) == ""
        assert counted.called("search", {"query": "a"}) == ""
        assert counted.called("search", {"query": "b"}) == ""
