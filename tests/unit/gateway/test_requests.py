"""The limits of one replica and of a request."""

from __future__ import annotations

import pytest

from runtime_core.errors import InvalidInput
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    BODIES_MAX_BYTES,
    CALLERS_MAX,
    OVERLOADED,
    RATE,
    RETRY_SECONDS,
    STREAMS,
    Limits,
    Problem,
)
from runtime_core.gateway.tasks import _structured
from runtime_core.state_manager.publishers import Publisher


def test_a_caller_sends_a_burst_and_then_as_fast_as_its_rate() -> None:
    now = 0.0
    limits = Limits(10, 1, monotonic=lambda: now)
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
    limits = Limits(1, 1, monotonic=lambda: 0.0)
    for number in range(CALLERS_MAX + 100):
        limits.count_request(str(number))
    assert len(limits._spent) == CALLERS_MAX


def test_bodies_share_memory_and_release_it() -> None:
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
    limits.open_stream("a")
    with pytest.raises(Problem) as refused:
        limits.open_stream("b")
    assert refused.value.kind is STREAMS
    limits.close_stream("a")
    limits.open_stream("b")


def test_one_caller_holds_a_share_of_the_streams() -> None:
    limits = Limits(0, 9, 50)
    acme = [Caller(name, scope=Publisher(name=f"key-{name}", tenant="acme")) for name in ("k1", "k2")]
    for number in range(5):
        limits.open_stream(acme[number % 2].holder)
    for caller in acme:  # keys of one tenant share its bound
        with pytest.raises(Problem) as refused:
            limits.open_stream(caller.holder)
        assert refused.value.kind is STREAMS
        assert refused.value.retry_after_seconds == RETRY_SECONDS
        assert "this caller has 5" in refused.value.detail
    others = [Caller("acme"), Caller("k3", scope=Publisher(name="key-k3", tenant="other")), Caller("127.0.0.1")]
    for caller in others:
        limits.open_stream(caller.holder)
    for caller in others:
        limits.close_stream(caller.holder)
    limits.close_stream(acme[0].holder)
    limits.open_stream(acme[1].holder)
    assert list(limits._streams) == [acme[0].holder], "callers without streams take no memory"


def _take_all(limits: Limits, caller: str) -> int:
    taken = 0
    try:
        while True:
            limits.open_stream(caller)
            taken += 1
    except Problem:
        return taken


def test_greedy_callers_leave_streams_to_others() -> None:
    limits = Limits(0, 1000, 50)
    assert [_take_all(limits, caller) for caller in "abcde"] == [500, 250, 125, 63, 31]
    limits.open_stream("f")
    for _ in range(400):
        limits.close_stream("a")
    assert _take_all(limits, "a") == 165, "with the 100 that it kept, as many as the others leave"


def test_each_caller_may_have_one_stream() -> None:
    limits = Limits(0, 2, 1)
    limits.open_stream("a")
    with pytest.raises(Problem):
        limits.open_stream("a")
    limits.open_stream("b")


def test_an_event_in_json_is_read_within_the_bounds_of_the_wire() -> None:
    deep = b'{"specversion":"1.0","type":"weft.task.submit","source":"s","id":"i","data":%b1%b}' % (
        b"[" * 100_000,
        b"]" * 100_000,
    )
    with pytest.raises(InvalidInput, match="nested deeper"):
        _structured(deep)
