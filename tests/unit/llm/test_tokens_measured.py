"""Providers' counts correct estimates, only upwards."""

from __future__ import annotations

from runtime_core.llm.tokens import LARGE_TOKENS, EstimateErrors


def test_without_a_count_the_estimate_stands() -> None:
    assert EstimateErrors().corrected("m", 20) == 20


def test_a_constant_error_of_small_requests_is_added_once() -> None:
    estimate_errors = EstimateErrors()
    estimate_errors.note("m", 20, 120)
    estimate_errors.note("m", 30, 60)
    assert estimate_errors.corrected("m", 10) == 110
    assert estimate_errors.corrected("m", 100_000) == 100_100, "and not five times as much"


def test_a_large_request_corrects_the_token_estimate() -> None:
    estimate_errors = EstimateErrors()
    estimate_errors.note("m", LARGE_TOKENS, 2 * LARGE_TOKENS)
    assert estimate_errors.corrected("m", 1000) == 2000


def test_estimates_that_were_too_high_stay() -> None:
    estimate_errors = EstimateErrors()
    estimate_errors.note("m", 20, 5)
    estimate_errors.note("m", 1000, 500)
    assert estimate_errors.corrected("m", 1000) == 1000


def test_a_model_without_a_count_is_as_wrong_as_the_worst() -> None:
    estimate_errors = EstimateErrors()
    estimate_errors.note("a", 20, 30)
    estimate_errors.note("b", 20, 70)
    assert estimate_errors.corrected("c", 20) == 70
    assert estimate_errors.corrected("a", 20) == 30
