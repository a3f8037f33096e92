"""The gate that delays calls after a rate limit."""

from __future__ import annotations

import random

from runtime_core.llm.models import MAX_SPREAD_SECONDS, Gate, Pacing


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_an_open_gate_lets_everyone_pass() -> None:
    assert Gate(Clock(), random.random).closed_for() is None


def test_callers_of_a_closed_gate_return_in_order_after_it_opens() -> None:
    clock = Clock()
    gate = Gate(clock, random.Random(7).random)
    places = [gate.close(5.0), *(gate.closed_for() for _ in range(50))]
    times = [place for place in places if place is not None]
    assert len(times) == 51
    assert times == sorted(set(times)), "each later than the one before"
    assert min(times) > 5.0
    assert gate.held_back == 50
    clock.now += 5.0
    assert gate.closed_for() is None


def test_a_storm_does_not_wait_forever() -> None:
    gate = Gate(Clock(), lambda: 0.5)
    gate.close(1.0)
    places = [gate.closed_for() or 0.0 for _ in range(10_000)]
    assert max(places) <= 1.0 + MAX_SPREAD_SECONDS


def test_a_shorter_limit_does_not_open_what_is_closed_for_longer() -> None:
    clock = Clock()
    gate = Gate(clock, lambda: 0.5)
    gate.close(10.0)
    gate.close(1.0)
    clock.now += 5.0
    assert gate.closed_for() is not None


def test_a_gate_that_closes_again_assigns_places_after_the_new_time() -> None:
    clock = Clock()
    gate = Gate(clock, lambda: 0.5)
    gate.close(1.0)
    clock.now += 1.5
    assert gate.closed_for() is None
    assert gate.close(1.0) > 1.0


def test_each_provider_model_and_key_has_its_own_gate() -> None:
    pacing = Pacing(Clock(), lambda: 0.5)
    pacing.gate(("openai", "a")).close(9.0)
    assert pacing.gate(("openai", "a")).closed_for() is not None
    assert pacing.gate(("openai", "b")).closed_for() is None
