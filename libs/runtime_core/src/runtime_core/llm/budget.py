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


Message = dict[str, Any]  # Any: the JSON of one message
Estimate = Callable[[Sequence[Message]], int]
"""The tokens of messages."""

BYTES_PER_TOKEN = 3
"""English has about four in a token, code about three; in most other scripts a character is three bytes and a token."""
MESSAGE_TOKENS = 4
"""What a message costs beside its content."""
MEDIA_TOKENS = 1600
"""An image or another piece of media, whose bytes say nothing of its tokens."""

_CONTENT = ("content", "args", "tool_name", "instructions", "tool_call_id")
"""Members of messages and their parts that reach the model; the others are about them."""


def estimate_tokens(messages: Sequence[Message]) -> int:
    """By the bytes of what reaches the model."""
    total = 0
    for message in messages:
        parts = message.get("parts") or ()
        total += MESSAGE_TOKENS + _tokens(_size(message.get("instructions")))
        for part in parts:
            total += MESSAGE_TOKENS + sum(_content(part.get(member)) for member in _CONTENT)
    return total


def tokens_of_json(values: Iterable[object]) -> int:
    """The tokens of tools and schemas, which are sent as JSON."""
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
"""From so many estimated tokens on a count says how wrong the estimate of text is; below, what is added to any text."""


@dataclass(slots=True)
class _Error:
    added: float = 0.0
    """The most tokens by which the count of a small request was over its estimate."""
    times: float = 1.0
    """The most by which that of a large one was over it."""

    def note(self, estimated: float, counted: float) -> None:
        if estimated < LARGE_TOKENS:
            self.added = max(self.added, counted - estimated)
        else:
            self.times = max(self.times, counted / estimated)


class Measured:
    """Of one process, by model. A model that was not asked yet is taken for as wrong as the worst of the others."""

    def __init__(self) -> None:
        self._of: dict[str, _Error] = {}
        self._worst = _Error()

    def note(self, model: str, estimated: float, counted: float) -> None:
        """The provider has counted the input of a call that was estimated before. Both in tokens."""
        for error in (self._of.setdefault(model, _Error()), self._worst):
            error.note(estimated, counted)

    def corrected(self, model: str, estimated: int) -> int:
        """The estimate in the light of what was counted until now."""
        error = self._of.get(model, self._worst)
        return max(int(estimated + error.added), int(estimated * error.times))


TOLD_AT = 3
"""So many equal calls in a row, and the model is told."""
ENDED_AT = 6
"""So many, and the conversation ends."""
MAX_HANDED = 10
"""How often one conversation may be handed over."""


class ConversationFailed(StepError):
    """A model's conversation has ended without an answer.

    `type` says why: OutputInvalid, ToolCallsInvalid, RepeatedCall, TurnLimit, HandoffLimit, ContentFiltered.
    """


class Guards:
    """Counts over one run. Its input is what was journaled, so a replay counts the same."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last: tuple[str, bytes] = ("", b"")
        self._in_a_row = 0

    def called(self, name: str, arguments: object) -> str:
        """Note a call that is made; what the model is to be told of it, mostly nothing. Raises ConversationFailed."""
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
