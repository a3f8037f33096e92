"""Decides what follows a failed attempt. Pure: no clock, no broker; randomness is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from runtime_core.consumer.effects import Failed
from runtime_core.declare.retry_policy import MAX_DELAY_SECONDS, RetryPolicy


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Retry: the broker's timer appends the event when `delay_seconds` have passed."""

    delay_seconds: float
    attempt: int
    """The number of the next attempt."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This was the last attempt: the waiting step, or the task, is answered with the error."""

    dead_letter: bool
    """Whether the event is kept as a dead letter. A run that its own code rejected is an answer, not a defect."""
    reason: str
    """`rejected`, `not retryable` or `attempts used up`."""


@dataclass(frozen=True, slots=True)
class Park:
    """Neither retried nor failed: kept as a dead letter, the run stays suspended for a rollback or a fix."""


Decision = RetryAt | GiveUp | Park

REJECTED = "rejected"
NOT_RETRYABLE = "not retryable"
USED_UP = "attempts used up"


def decide(attempt: int, policy: RetryPolicy, failed: Failed, random: Callable[[], float]) -> Decision:
    """Return what happens after `attempt` (from 1) ended as `failed`; `random` returns numbers in [0, 1).

    The first rule that fits wins: parked, rejected, not retryable, attempts used up, retry. A retry that the code
    requests counts as an attempt like any other, so code that always requests one does end; only the delay is the
    requested one.
    """
    if failed.parked:
        return Park()
    if failed.rejected:
        return GiveUp(dead_letter=False, reason=REJECTED)
    if not failed.retryable:
        return GiveUp(dead_letter=True, reason=NOT_RETRYABLE)
    if attempt >= policy.attempts:
        return GiveUp(dead_letter=True, reason=USED_UP)
    if failed.retry_after_seconds is None:
        delay = policy.delay_seconds(attempt, random)
    else:
        delay = _usable(failed.retry_after_seconds)
    return RetryAt(delay, attempt + 1)


def reason_of(decision: GiveUp | Park) -> str:
    """The dead letter's reason, as one word for lists and metrics."""
    return "diverged" if isinstance(decision, Park) else decision.reason.replace(" ", "_")


def _usable(seconds: float) -> float:
    """A delay that user code requests may be negative, infinite or NaN; a timer's score may not."""
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), MAX_DELAY_SECONDS)
