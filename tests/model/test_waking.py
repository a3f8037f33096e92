"""A run that waits for several results, with time limits and cancels, exhaustively. See docs/model.md."""

from __future__ import annotations

import pytest

from tests.model.search import search
from tests.model.waking import Guards, Waking

BREAKS = {
    "look_again": "the run stays 'waits', released 0 times",
    "one_resume": "two resumes of one run",
    "if_absent": "a step was answered twice",
    "settle_cancelled": "the run stays 'refused', released 0 times",
    "cancel_ends_waiting": "a cancelled run goes on waiting",
    "ended_is_fenced": "a late result wrote to an ended run",
}


def test_a_waiting_run_wakes_once_and_ends_once() -> None:
    result = search(Waking())
    print(result)
    assert not result.broken, result


@pytest.mark.parametrize("guard", Guards._fields)
def test_a_dropped_guard_breaks_waking(guard: str) -> None:
    result = search(Waking(Guards()._replace(**{guard: False})))
    print(result)
    assert result.broken == BREAKS[guard], result
