"""How many tokens a request will be, before any provider has counted them: rather too many than too few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from runtime_core.codec import encode

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
