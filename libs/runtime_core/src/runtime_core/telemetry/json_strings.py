"""Strings of JSON: where they begin and end in the bytes, what they say, and how they are written.

Everything here takes time linear in the bytes, whatever they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec
import re2

from runtime_core.telemetry.secret_patterns import bytes_options

LONGEST_ESCAPE = len("\\u0000")
SAVED_BY_ESCAPE = LONGEST_ESCAPE - 1
"""The most bytes by which a text gets shorter for each of its escapes."""
FEW_ESCAPES = 1000
"""Up to so many escapes, it is fastest to replace one after the other."""

_HOPS = 64
"""How many escaped quotes, and backslashes before one, are looked at one by one before RE2 goes over the rest."""
_BACKSLASH = ord("\\")
_REST_OF_STRING = re2.compile(rb'(?s:(?:[^"\\]|\\.)*")', bytes_options())
_TO_STRING = re2.compile(rb'(?s:[^"]|"(?:[^"\\]|\\.)*")*', bytes_options())
"""Goes over whole strings and what is between them: up to the start of a string that is still open."""

_WRITTEN = {b"\\": b"\\\\", b'"': b'\\"', b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\b": b"\\b", b"\f": b"\\f"}
"""How characters are escaped: the backslash first, since it is part of the others."""
_SAID = {written[1:]: said for said, written in _WRITTEN.items() if said != b"\\"} | {b"/": b"/"}

_skip = msgspec.json.Decoder(msgspec.Raw).decode
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_decode_text = msgspec.json.Decoder(str).decode
_decode_bytes = json.JSONDecoder(strict=False).decode
_encode = msgspec.json.Encoder().encode


def string_around(data: bytes, at: int, look: int) -> tuple[int, int] | None:
    """The string that is open at `look`, or None. `at` is between strings."""
    if data.find(b"\\", at, look) < 0:
        start = data.rfind(b'"', at, look) if data.count(b'"', at, look) % 2 else look
    else:
        for _ in range(_HOPS):
            start = data.find(b'"', at, look)
            if start < 0:
                return None
            end = string_end(data, start)
            if end > look:
                return start, end
            at = end
        start = _TO_STRING.match(data, at, look).end()
    return (start, string_end(data, start)) if start < look else None


def string_end(data: bytes, start: int) -> int:
    """Where the string that starts here ends; one that is cut off ends with the data."""
    at = start + 1
    for _ in range(_HOPS):
        end = data.find(b'"', at)
        if end < 0:
            return len(data)
        back = end
        while back > at and end - back < _HOPS and data[back - 1] == _BACKSLASH:
            back -= 1
        if end - back == _HOPS:
            break
        if (end - back) % 2 == 0:
            return end + 1
        at = end + 1
    return _long_string_end(data, start, at)


def _long_string_end(data: bytes, start: int, at: int) -> int:
    """As `string_end`; `at` is inside of the string, and not inside of an escape."""
    try:
        _skip(memoryview(data)[start:])
        end = len(data)
    except msgspec.DecodeError as error:
        # msgspec is seven times as fast as RE2, and says where it is after the string and white space.
        reached = _TRAILING.search(str(error))
        if reached is None:
            string = _REST_OF_STRING.match(data, at)
            return len(data) if string is None else string.end()
        end = start + int(reached[1])
    return data.rfind(b'"', start, end) + 1


def unescaped(written: bytes, escapes: int) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The UTF-8 that a string of JSON with so many backslashes says, and what writes it again.

    Raises DecodeError, or ValueError.
    """
    if escapes <= FEW_ESCAPES and (said := _few_unescaped(written)) is not None:
        # It has no character that must be written as a number, unless it was not.
        return said, _escaped_by_letters
    if written.isascii() or b"\\u" in written:
        return _decode_text(written).encode(), escaped
    # As Latin-1 each byte is a character: no time goes to reading UTF-8 and writing it again.
    text: str = _decode_bytes(written.decode("latin-1"))
    return text.encode("latin-1"), escaped


def _few_unescaped(written: bytes) -> bytes | None:
    """As `unescaped`; None where a character is written as a number, or the string is cut off."""
    if not written.endswith(b'"', 1):
        return None
    pieces = iter(written[1:-1].split(b"\\"))
    said = [next(pieces)]
    for piece in pieces:
        if piece:
            character = _SAID.get(piece[:1])
            if character is None:
                return None
            said += character, piece[1:]
        else:
            # Two backslashes: what follows the second one says itself.
            rest = next(pieces, None)
            if rest is None:
                return None
            said += b"\\", rest
    return b"".join(said)


def escaped(text: bytes) -> bytes:
    """A string of JSON that says this UTF-8."""
    if text.isascii():
        return _encode(text.decode())
    return json.dumps(text.decode("latin-1"), ensure_ascii=False).encode("latin-1")


def _escaped_by_letters(text: bytes) -> bytes:
    for character, written in _WRITTEN.items():
        text = text.replace(character, written)
    return b"".join((b'"', text, b'"'))
