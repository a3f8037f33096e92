"""What a conversation may cost: prices, estimated and counted tokens, and the guards that end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from runtime_core import codec
from runtime_core.codec import encode
from runtime_core.errors import ConfigurationError, StepError

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, in the same currency as `max_cost`.

    `cached_input` is for input in the provider's cache; None for the price of any input. Reasoning tokens are output.
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
        """Return the cost of these tokens; `input_tokens` include `cached_tokens`."""
        cached = min(cached_tokens, input_tokens)
        cached_price = self.input if self.cached_input is None else self.cached_input
        return ((input_tokens - cached) * self.input + cached * cached_price + output_tokens * self.output) / _MILLION


def price_of(prices: Mapping[str, Any], *names: str) -> Price | None:  # Any: Price, as `checked` has seen
    """Return the price of the first of a model's names that the table contains; None if it contains none.

    An exact name takes precedence over a pattern (`gpt-*`), and a longer pattern over a shorter one. Names match with
    their provider (`openai:gpt-x`) and without it.
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


Message = dict[str, Any]  # Any: the JSON of one message
Estimate = Callable[[Sequence[Message]], int]
"""Estimates the number of tokens of messages."""

BYTES_PER_TOKEN = 3
"""English has about four per token, code about three; in most other scripts a character is three bytes, one token."""
MESSAGE_TOKENS = 4
"""The tokens of a message beside its content."""
MEDIA_TOKENS = 1600
"""The tokens of an image or other media, whose size in bytes does not indicate its tokens."""

_CONTENT = ("content", "args", "tool_name", "instructions", "tool_call_id")
"""The members of messages and parts that reach the model; all others are metadata."""


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate tokens from the bytes that reach the model."""
    total = 0
    for message in messages:
        parts = message.get("parts") or ()
        total += MESSAGE_TOKENS + _tokens(_size(message.get("instructions")))
        for part in parts:
            total += MESSAGE_TOKENS + sum(_content(part.get(member)) for member in _CONTENT)
    return total


def tokens_of_json(values: Iterable[object]) -> int:
    """Estimate the tokens of tools and schemas, which are sent as JSON."""
    return sum(_tokens(len(encode(value))) for value in values)


def _content(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_content, value))
    if isinstance(value, Mapping) and ("media_type" in value or str(value.get("kind", "")).endswith("-url")):
        return MEDIA_TOKENS
    return _tokens(_size(value))


def _size(value: object) -> int:
    if value is None or value == "":
        return 0
    return len(value.encode(errors="replace")) if isinstance(value, str) else len(encode(value))


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


LARGE_TOKENS = 256
"""The estimate, in tokens, from which a count measures a relative error; below it, a count measures a constant."""


@dataclass(slots=True)
class _Error:
    added: float = 0.0
    """The most tokens by which the count of a small request exceeded its estimate."""
    times: float = 1.0
    """The highest ratio of a large request's count to its estimate."""

    def note(self, estimated: float, counted: float) -> None:
        if estimated < LARGE_TOKENS:
            self.added = max(self.added, counted - estimated)
        else:
            self.times = max(self.times, counted / estimated)


class Measured:
    """The estimation errors of one process, by model. An unseen model inherits the worst observed error."""

    def __init__(self) -> None:
        self._of: dict[str, _Error] = {}
        self._worst = _Error()

    def note(self, model: str, estimated: float, counted: float) -> None:
        """Record the estimate of a call's input and the provider's count, both in tokens."""
        for error in (self._of.setdefault(model, _Error()), self._worst):
            error.note(estimated, counted)

    def corrected(self, model: str, estimated: int) -> int:
        """Return the estimate, corrected by the observed errors."""
        error = self._of.get(model, self._worst)
        return max(int(estimated + error.added), int(estimated * error.times))


TOLD_AT = 3
"""The number of equal calls in a row from which the model gets a warning."""
ENDED_AT = 6
"""The number of equal calls in a row that ends the conversation."""
MAX_HANDED = 10
"""The most handoffs of one conversation."""


class ConversationFailed(StepError):
    """A model's conversation has ended without an answer.

    `type` is the reason: OutputInvalid, ToolCallsInvalid, RepeatedCall, TurnLimit, HandoffLimit, ContentFiltered.
    """


class Guards:
    """Counts repeated calls in one run. It counts journaled calls, so a replay counts the same."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last: tuple[str, bytes] = ("", b"")
        self._in_a_row = 0

    def called(self, name: str, arguments: object) -> str:
        """Count a call and return a warning for the model, usually empty. Raises ConversationFailed."""
        this = (name, codec.canonical(arguments))
        self._in_a_row = self._in_a_row + 1 if this == self._last else 1
        self._last = this
        if self._in_a_row >= ENDED_AT:
            raise ConversationFailed(
                "RepeatedCall",
                f"{self._what} has called {name} {ENDED_AT} times in a row with the same arguments: say in its "
                "instructions when to stop, or let the tool say why nothing changes",
            )
        if self._in_a_row < TOLD_AT:
            return ""
        return (
            f"You have made this call {self._in_a_row} times in a row with the same arguments. Use the results that "
            f"you have, or try something else: after {ENDED_AT} times the conversation is ended."
        )
