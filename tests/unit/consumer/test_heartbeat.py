"""A consumer remembers a bounded number of ended tasks, and knows since when it remembers all of them."""

from __future__ import annotations

from runtime_core.consumer.heartbeat import ENDED_TASK_KEPT_MS, EndedTasks

NOW = 1_700_000_000_000


def test_a_task_is_known_until_it_is_forgotten() -> None:
    ended = EndedTasks()
    ended.add_remembered([("a", NOW - 5)], NOW)
    ended.add_reported(["b"], NOW + 1, NOW)
    assert "a" in ended.ended_ms
    assert "b" in ended.ended_ms
    ended.forget("a")
    ended.forget("never heard of")
    assert "a" not in ended.ended_ms


def test_the_oldest_give_way_and_their_time_is_no_longer_covered() -> None:
    ended = EndedTasks(most=2)
    ended.add_remembered([("a", NOW - 30), ("b", NOW - 20)], NOW)
    assert ended.since_ms == NOW - ENDED_TASK_KEPT_MS, "the broker has forgotten older ones"
    ended.add_reported(["c"], NOW, NOW - 10)
    assert [task in ended.ended_ms for task in "abc"] == [False, True, True]
    assert ended.since_ms == NOW - 30
    ended.add_reported(["b"], NOW + 1, NOW)
    ended.add_reported(["d"], NOW + 2, NOW + 1)
    assert [task in ended.ended_ms for task in "bcd"] == [True, False, True], "a second report counts as new"


def test_old_ones_are_dropped() -> None:
    ended = EndedTasks()
    ended.add_reported(["a"], NOW, NOW - 1)
    ended.add_reported([], NOW + ENDED_TASK_KEPT_MS - 1, NOW + ENDED_TASK_KEPT_MS - 2)
    assert "a" in ended.ended_ms
    ended.add_reported([], NOW + ENDED_TASK_KEPT_MS, NOW + ENDED_TASK_KEPT_MS - 1)
    assert "a" not in ended.ended_ms
    assert ended.since_ms == NOW


def test_a_silence_that_is_longer_than_the_brokers_memory_leaves_a_gap() -> None:
    ended = EndedTasks()
    ended.add_remembered([], NOW)
    later = NOW + 3 * ENDED_TASK_KEPT_MS
    ended.add_reported(["a"], later, NOW)
    assert "a" in ended.ended_ms
    assert ended.since_ms == later - ENDED_TASK_KEPT_MS
