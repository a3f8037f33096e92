"""A request between two partitions that lose their last writes, exhaustively. See docs/model.md."""

from __future__ import annotations

import pytest

from tests.model.search import search
from tests.model.tail_loss import Guards, TailLoss


@pytest.mark.parametrize("faults", [1, 2, 3])
def test_a_request_is_answered_once_even_if_a_partition_loses_its_tail(faults: int) -> None:
    result = search(TailLoss(faults))
    print(result)
    assert not result.broken, result


@pytest.mark.parametrize(
    ("guards", "broken"),
    [
        (Guards(repeat=False), "the agent waits for ever"),
        (Guards(known_answers=False), "work goes on for ever"),
        (Guards(answer_if_missing=False), "a question was answered twice"),
        (Guards(dedupe=False), "a question started two runs"),
        (Guards(delete_after=False, repeat=False), "the agent waits for ever"),
    ],
    ids=str,
)
def test_a_dropped_guard_breaks_the_question(guards: Guards, broken: str) -> None:
    result = search(TailLoss(2, guards))
    print(result)
    assert result.broken == broken, result


def test_the_repeat_also_covers_a_relay_that_deletes_first() -> None:
    assert not search(TailLoss(2, Guards(delete_after=False))).broken
