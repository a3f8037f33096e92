"""How often a failed attempt is tried again, and how long each retry waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from runtime_core.errors import ConfigurationError

MAX_DELAY_SECONDS = 366 * 86_400.0
"""No retry waits longer than a year: beyond it the arithmetic of clocks, not the wait, is what one would test."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: attempt n that failed is tried again after `base · factorⁿ⁻¹` seconds, at most `max`.

    `attempts` counts all attempts, the first one included: 1 means no retry. `jitter` is the part of a delay
    that is left to chance (0.2: between 80 % and 100 % of it), so that what failed together does not come back
    together and no delay is longer than `max_seconds`.
    """

    attempts: int = 5
    base_seconds: float = 0.5
    factor: float = 2.0
    max_seconds: float = 60.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy.attempts is {self.attempts!r}: give a whole number from 1 up")
        for name, low, high in (
            ("base_seconds", 0.0, MAX_DELAY_SECONDS),
            ("factor", 1.0, math.inf),
            ("max_seconds", 0.0, MAX_DELAY_SECONDS),
            ("jitter", 0.0, 1.0),
        ):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                wanted = f"from {low:g} up" if high == math.inf else f"from {low:g} to {high:g}"
                raise ConfigurationError(f"RetryPolicy.{name} is {value!r}: give a number {wanted}")

    def delay_seconds(self, attempt: int, random: Callable[[], float]) -> float:
        """Seconds to wait after `attempt` (from 1) has failed; `random` gives numbers in [0, 1)."""
        try:
            delay = min(self.max_seconds, self.base_seconds * self.factor ** (max(attempt, 1) - 1))
        except OverflowError:  # a float power overflows long after the delay has reached its limit
            delay = self.max_seconds
        return delay * (1.0 - self.jitter * random())
