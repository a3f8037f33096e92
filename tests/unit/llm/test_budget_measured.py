"""Estimates are corrected by what providers have counted, upwards only."""

from __future__ import annotations

from runtime_core.llm.budget import LARGE_TOKENS, Measured


def test_without_a_count_the_estimate_stands() -> None:
    assert Measured().corrected("m", 20) == 20


def test_what_was_added_to_a_small_request_is_added_to_all() -> None:
    measured = Measured()
    measured.note("m", 20, 120)
    measured.note("m", 30, 60)
    assert measured.corrected("m", 10) == 110
    assert measured.corrected("m", 100_000) == 100_100, "and not five times as much"


def test_a_large_request_says_how_wrong_text_is_estimated() -> None:
    measured = Measured()
    measured.note("m", LARGE_TOKENS, 2 * LARGE_TOKENS)
    assert measured.corrected("m", 1000) == 2000


def test_estimates_that_were_too_high_stay() -> None:
    measured = Measured()
    measured.note("m", 20, 5)
    measured.note("m", 1000, 500)
    assert measured.corrected("m", 1000) == 1000


def test_a_model_without_a_count_is_as_wrong_as_the_worst() -> None:
    measured = Measured()
    measured.note("a", 20, 30)
    measured.note("b", 20, 70)
    assert measured.corrected("c", 20) == 70
    assert measured.corrected("a", 20) == 30
