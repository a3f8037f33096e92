"""Delays of retries, and the decision after a failed attempt."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from runtime_core.consumer.effects import Failed
from runtime_core.consumer.settle import (
    Decision,
    GiveUp,
    Park,
    RetryAt,
    decide,
    failed_from,
    failure_of,
    frames_of_user,
    reason_of,
    traceback_of,
)
from runtime_core.declare.declaration import MAX_DELAY_SECONDS, RetryPolicy
from runtime_core.errors import ConfigurationError

STEADY = RetryPolicy(attempts=3, base_seconds=0.5, factor=2.0, max_seconds=3.0, jitter=0.0)


def no_chance() -> float:
    return 0.0


def failed(**how: object) -> Failed:
    failure = Failed("ValueError", "bad")
    for name, value in how.items():
        setattr(failure, name, value)
    return failure


def test_delays_grow_by_the_factor_up_to_the_limit() -> None:
    policy = RetryPolicy(base_seconds=0.5, factor=2.0, max_seconds=3.0, jitter=0.0)

    assert [policy.delay_seconds(attempt, no_chance) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_only_shortens_a_delay() -> None:
    policy = RetryPolicy(base_seconds=10.0, factor=1.0, jitter=0.2)
    chance = random.Random(7)

    delays = [policy.delay_seconds(1, chance.random) for _ in range(500)]

    assert 8.0 <= min(delays) < 8.2
    assert 9.8 < max(delays) <= 10.0
    assert len(set(delays)) > 400


def test_a_huge_attempt_number_waits_the_longest_delay() -> None:
    assert STEADY.delay_seconds(100_000, no_chance) == 3.0
    growing = [STEADY.delay_seconds(attempt, no_chance) for attempt in range(1, 2000)]
    assert all(before <= after for before, after in pairwise(growing))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attempts": 0}, "RetryPolicy.attempts is 0"),
        ({"defects": 1}, "RetryPolicy.defects is 1"),
        ({"attempts": True}, "RetryPolicy.attempts is True"),
        ({"attempts": 2.5}, "RetryPolicy.attempts is 2.5"),
        ({"base_seconds": -1}, "RetryPolicy.base_seconds is -1"),
        ({"base_seconds": math.nan}, "RetryPolicy.base_seconds is nan"),
        ({"factor": 0.5}, "RetryPolicy.factor is 0.5"),
        ({"max_seconds": math.inf}, "RetryPolicy.max_seconds is inf"),
        ({"max_seconds": "60"}, "RetryPolicy.max_seconds is '60'"),
        ({"jitter": 1.5}, "RetryPolicy.jitter is 1.5"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        RetryPolicy(**settings)  # type: ignore[arg-type]  # wrong on purpose

    assert str(refused.value).startswith(named)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("attempt", "failure", "decision"),
    [
        (1, failed(), RetryAt(0.5, 2)),
        (2, failed(), RetryAt(1.0, 3)),
        (3, failed(), GiveUp(dead_letter=True, reason="attempts used up")),
        (9, failed(), GiveUp(dead_letter=True, reason="attempts used up")),
        (1, failed(retry_after_seconds=42.0), RetryAt(42.0, 2)),
        (1, failed(retry_after_seconds=0.0), RetryAt(0.0, 2)),
        (1, failed(retry_after_seconds=-5.0), RetryAt(0.0, 2)),
        (1, failed(retry_after_seconds=math.nan), RetryAt(0.0, 2)),
        (1, failed(retry_after_seconds=math.inf), RetryAt(MAX_DELAY_SECONDS, 2)),
        (3, failed(retry_after_seconds=42.0), GiveUp(dead_letter=True, reason="attempts used up")),
        (1, failed(retryable=False), GiveUp(dead_letter=True, reason="not retryable")),
        (1, failed(retryable=False, retry_after_seconds=1.0), GiveUp(dead_letter=True, reason="not retryable")),
        (1, failed(rejected=True), GiveUp(dead_letter=False, reason="rejected")),
        (3, failed(rejected=True, retryable=False), GiveUp(dead_letter=False, reason="rejected")),
        (1, failed(parked=True), Park()),
        (3, failed(parked=True, retryable=False), Park()),
    ],
)
def test_a_failed_attempt_is_retried_or_dead_lettered(attempt: int, failure: Failed, decision: Decision) -> None:
    assert decide(attempt, STEADY, failure, no_chance) == decision


@pytest.mark.parametrize("error", [TypeError("x"), NameError("x"), AttributeError("x"), ModuleNotFoundError("x")])
@pytest.mark.parametrize("outcome", [failure_of, failed_from])
def test_a_mistake_in_the_code_is_not_retried_by_default(
    error: Exception, outcome: Callable[[Exception], Failed]
) -> None:
    failure = outcome(error)
    assert decide(1, STEADY, failure, no_chance) == GiveUp(dead_letter=True, reason="not retryable")
    assert isinstance(decide(1, RetryPolicy(defects=True), failure, no_chance), RetryAt)


def test_other_errors_do_not_count_as_programming_errors() -> None:
    assert isinstance(decide(1, STEADY, failure_of(ValueError("x")), no_chance), RetryAt)
    assert isinstance(decide(1, STEADY, failed_from(OSError("x")), no_chance), RetryAt)


def test_a_policy_of_one_attempt_never_retries() -> None:
    once = RetryPolicy(attempts=1)

    assert decide(1, once, failed(), no_chance) == GiveUp(dead_letter=True, reason="attempts used up")


def test_a_dead_letters_reason_is_one_word() -> None:
    assert reason_of(Park()) == "diverged"
    assert reason_of(decide(3, STEADY, failed(), no_chance)) == "attempts_used_up"  # type: ignore[arg-type]  # gives up


def test_the_logged_frames_of_an_error_are_those_of_the_users_code() -> None:
    def of_the_user() -> None:
        try:
            RetryPolicy(attempts=0)  # raises in the framework
        except ConfigurationError as cause:
            raise ValueError("wrapped") from cause

    with pytest.raises(ValueError, match="wrapped") as caught:
        of_the_user()
    frames = frames_of_user(traceback_of(caught.value))
    assert 'raise ValueError("wrapped") from cause' in frames
    assert "Traceback" not in frames
    assert "ValueError: wrapped" not in frames

    with pytest.raises(ConfigurationError) as raised:
        RetryPolicy(attempts=0)
    frames = frames_of_user(traceback_of(raised.value))
    assert "RetryPolicy(attempts=0)" in frames
    assert "declaration.py" not in frames
    assert frames_of_user("") == ""


def test_the_logged_frames_leave_out_how_python_started() -> None:
    """The stack of a divergence begins with them."""
    own = '  File "/srv/desk/app.py", line 33, in report\n    found = await ctx.tool("search")'
    started = '  File "<frozen runpy>", line 88, in _run_code'
    assert frames_of_user(f"Traceback (most recent call last):\n{started}\n{own}\nDivergence: step 1") == own
