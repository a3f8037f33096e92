"""The limits of one replica and of a request."""

from __future__ import annotations

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.gateway.requests import BODIES_MAX_BYTES, CALLERS_MAX, OVERLOADED, RATE, STREAMS, Limits, Problem
from runtime_core.gateway.tasks import _structured


def test_a_caller_sends_a_burst_and_then_as_fast_as_its_rate() -> None:
    now = 0.0
    limits = Limits(10, 1, lambda: now)
    for _ in range(11):
        limits.count_request("a")
    with pytest.raises(Problem) as refused:
        limits.count_request("a")
    assert refused.value.kind is RATE
    assert refused.value.retry_after_seconds == pytest.approx(0.1)
    limits.count_request("b")
    now = 0.11
    limits.count_request("a")


def test_the_rates_of_many_callers_take_bounded_memory() -> None:
    limits = Limits(1, 1, lambda: 0.0)
    for number in range(CALLERS_MAX + 100):
        limits.count_request(str(number))
    assert len(limits._spent) == CALLERS_MAX


def test_bodies_share_memory_and_give_it_back() -> None:
    limits = Limits(0, 1)
    with limits.body() as count:
        count(BODIES_MAX_BYTES)
        with limits.body() as other, pytest.raises(Problem) as refused:
            other(1)
        assert refused.value.kind is OVERLOADED
    with limits.body() as count:
        count(BODIES_MAX_BYTES)


def test_a_closed_stream_makes_room() -> None:
    limits = Limits(0, 1)
    limits.open_stream()
    with pytest.raises(Problem) as refused:
        limits.open_stream()
    assert refused.value.kind is STREAMS
    limits.close_stream()
    limits.open_stream()


def test_an_event_in_json_is_read_within_the_bounds_of_the_wire() -> None:
    deep = b'{"specversion":"1.0","type":"weft.task.submit","source":"s","id":"i","data":%b1%b}' % (
        b"[" * 100_000,
        b"]" * 100_000,
    )
    with pytest.raises(InvalidInput, match="nested deeper"):
        _structured(deep)
