"""Keyed agents that call each other in a circle, exhaustively. See docs/model.md."""

from __future__ import annotations

import pytest

from tests.model.lock_order import Guards, LockOrder
from tests.model.search import search


@pytest.mark.parametrize("agents", [2, 3, 4])
def test_a_ring_of_requests_is_answered_with_deadlock(agents: int) -> None:
    result = search(LockOrder(agents))
    print(result)
    assert not result.broken, result


def test_requests_without_a_cycle_are_never_refused() -> None:
    result = search(LockOrder(3, open_ring=True))
    print(result)
    assert not result.broken, result


def test_time_limits_end_a_cycle_that_nobody_can_detect() -> None:
    result = search(LockOrder(3, Guards(detect=False, deadline=True)))
    print(result)
    assert not result.broken, result


@pytest.mark.parametrize(
    "guards",
    [Guards(detect=False), Guards(detect_in_commit=False), Guards(follow=1)],
    ids=["no detection", "detection before the commit", "detection follows one wait"],
)
def test_a_dropped_guard_leaves_tasks_waiting_forever(guards: Guards) -> None:
    result = search(LockOrder(3, guards))
    print(result)
    assert "waits for ever" in result.broken, result
