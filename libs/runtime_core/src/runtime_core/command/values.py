"""Values that people type: text, unless it is plainly JSON."""

from __future__ import annotations

import msgspec

from runtime_core.errors import InvalidInput

_JSON_BEGINS = frozenset('{["-0123456789')


def typed(text: str, *, words: bool = False) -> object:
    """JSON where the text is an object, an array, a number or a quoted string; else the text itself.

    With `words` also `true`, `false` and `null` are JSON: answers to questions are mostly those.
    """
    stripped = text.strip()
    if stripped[:1] not in _JSON_BEGINS and not (words and stripped in ("true", "false", "null")):
        return text
    try:
        value: object = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value


def json_of(text: str, option: str) -> bytes:
    """JSON as it was typed, checked. Raises InvalidInput that names the option."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(option, f"is not JSON ({error}); quote texts, as in '\"text\"'") from None
    return text.encode()
