"""What a consumer remembers of tasks that ended early is bounded, and it knows what it does not know."""

from __future__ import annotations

from runtime_core.consumer.ended_tasks import KEEP_MS, EndedTasks

NOW = 1_700_000_000_000


def test_a_task_is_known_until_it_is_forgotten() -> None:
    ended = EndedTasks()
    ended.recalled([("a", NOW - 5)], NOW)
    ended.heard(["b"], NOW + 1, NOW)
    assert "a" in ended
    assert "b" in ended
    ended.forget("a")
    ended.forget("never heard of")
    assert "a" not in ended


def test_the_oldest_give_way_and_their_time_is_no_longer_covered() -> None:
    ended = EndedTasks(most=2)
    ended.recalled([("a", NOW - 30), ("b", NOW - 20)], NOW)
    assert ended.since_ms == NOW - KEEP_MS, "older ones the broker has forgotten"
    ended.heard(["c"], NOW, NOW - 10)
    assert [task in ended for task in "abc"] == [False, True, True]
    assert ended.since_ms == NOW - 30
    ended.heard(["b"], NOW + 1, NOW)
    ended.heard(["d"], NOW + 2, NOW + 1)
    assert [task in ended for task in "bcd"] == [True, False, True], "told again counts as new"


def test_old_ones_are_dropped() -> None:
    ended = EndedTasks()
    ended.heard(["a"], NOW, NOW - 1)
    ended.heard([], NOW + KEEP_MS - 1, NOW + KEEP_MS - 2)
    assert "a" in ended
    ended.heard([], NOW + KEEP_MS, NOW + KEEP_MS - 1)
    assert "a" not in ended
    assert ended.since_ms == NOW


def test_a_silence_that_is_longer_than_the_brokers_memory_leaves_a_gap() -> None:
    ended = EndedTasks()
    ended.recalled([], NOW)
    later = NOW + 3 * KEEP_MS
    ended.heard(["a"], later, NOW)
    assert "a" in ended
    assert ended.since_ms == later - KEEP_MS
