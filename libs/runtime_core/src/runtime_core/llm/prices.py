"""What tokens cost: a table that the user gives, by the model's name or a pattern of names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from runtime_core.errors import ConfigurationError

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in a currency of the user's choice: the same as in `max_cost`.

    `cached_input` is for input that the provider had in its cache; None: as any input. Reasoning tokens are output.
    """

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if name == "cached_input" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigurationError(f"Price.{name} is {value!r}: give the price of a million tokens, from 0 on")

    def cost(self, input_tokens: float, output_tokens: float, cached_tokens: float = 0) -> float:
        """Of so many tokens; `cached_tokens` are a part of `input_tokens`."""
        cached = min(cached_tokens, input_tokens)
        cached_price = self.input if self.cached_input is None else self.cached_input
        return ((input_tokens - cached) * self.input + cached * cached_price + output_tokens * self.output) / _MILLION


def price_of(prices: Mapping[str, Any], *names: str) -> Price | None:  # Any: Price, as `checked` has seen
    """The price of the first of a model's names that the table knows; None: it knows none.

    A name itself goes before a pattern (`gpt-*`), and a longer pattern before a shorter one. A name is looked for with
    its provider (`openai:gpt-x`) and without.
    """
    known = [known for name in names if name for known in (name, name.partition(":")[2]) if known]
    for name in known:
        if name in prices:
            return _checked(name, prices[name])
    for pattern in sorted(prices, key=len, reverse=True):
        if any(fnmatchcase(name, pattern) for name in known):
            return _checked(pattern, prices[pattern])
    return None


def _checked(name: str, price: object) -> Price:
    if not isinstance(price, Price):
        raise ConfigurationError(f"prices[{name!r}] is {price!r}: give a Price(input=…, output=…)")
    return price
