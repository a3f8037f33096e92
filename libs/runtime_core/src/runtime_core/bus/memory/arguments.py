"""Reading the words of a command: numbers, patterns, options; and printing numbers as a server prints them."""

from __future__ import annotations

import math
import re
from functools import lru_cache

from runtime_core.bus.memory.replies import Args, syntax_error
from runtime_core.errors import ServerError

_SMALLEST = -(1 << 63)
_GREATEST = (1 << 63) - 1
# Above this a double no longer holds every integer, and servers switch to the exponent form.
_EXACT = 1 << 52

NOT_INTEGER = "ERR value is not an integer or out of range"
NOT_FLOAT = "ERR value is not a valid float"


def integer(word: bytes, error: str = NOT_INTEGER) -> int:
    """A signed 64-bit integer in its only spelling: no sign `+`, no leading zeros, no blanks."""
    try:
        value = int(word)
    except ValueError:
        raise ServerError(error) from None
    if not _SMALLEST <= value <= _GREATEST or b"%d" % value != word:
        raise ServerError(error)
    return value


def fits_integer(value: int) -> bool:
    """Whether a sum is still a signed 64-bit integer."""
    return _SMALLEST <= value <= _GREATEST


def real(word: bytes, error: str = NOT_FLOAT) -> float:
    """A double; `inf`, `+inf` and `-inf` are numbers, `nan` is not."""
    if not word or word[:1].isspace() or word[-1:].isspace() or b"_" in word:
        raise ServerError(error)
    try:
        value = float(word)
    except ValueError:
        raise ServerError(error) from None
    if math.isnan(value):
        raise ServerError(error)
    return value


def print_real(value: float) -> bytes:
    """A score as servers print it: 17 significant digits, integers without a point."""
    if value == int(value) if math.isfinite(value) else False:
        whole = int(value)
        if -_EXACT <= whole <= _EXACT:
            return b"%d" % whole
    return b"%.17g" % value


def print_lua_number(value: float) -> bytes:
    """A number that a script passes as a word of a command."""
    if type(value) is int and -(10**17) < value < 10**17:
        return b"%d" % value
    return b"%.17g" % value


def option_value(args: Args, position: int) -> bytes:
    """The word after the option at `position`."""
    if position + 1 >= len(args):
        raise syntax_error()
    return args[position + 1]


def score_bound(word: bytes) -> tuple[float, bool]:
    """One end of a score range: its value and whether it is excluded (`(1.5`)."""
    error = "ERR min or max is not a float"
    if word[:1] == b"(":
        return real(word[1:], error), True
    return real(word, error), False


@lru_cache(maxsize=256)
def glob(pattern: bytes) -> re.Pattern[bytes]:
    """A pattern with `*`, `?`, `[a-c]`, `[^a]` and `\\` as an expression to be matched in full."""
    out = bytearray()
    at = 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        if char == b"*":
            out += b".*"
        elif char == b"?":
            out += b"."
        elif char == b"[" and (end := pattern.find(b"]", at + 1)) > 0:
            inner = pattern[at + 1 : end]
            negated = inner[:1] == b"^"
            ranges = re.sub(rb"([\[\]&~|\\^])", rb"\\\1", inner[negated:])
            out += b"[" + (b"^" if negated else b"") + ranges + b"]"
            at = end
        elif char == b"\\" and at + 1 < len(pattern):
            at += 1
            out += re.escape(pattern[at : at + 1])
        else:
            out += re.escape(char)
        at += 1
    return re.compile(bytes(out), re.DOTALL)
