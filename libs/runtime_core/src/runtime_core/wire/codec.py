"""Converts the data of events to Python values and back: JSON and msgpack that every client can read.

Decoding is strict and bounded: a value that `decode` accepts can be written as JSON, is at most 64 levels deep and
holds no number that a 64-bit client would change. The depth is measured before a decoder runs, because decoders
recurse and input may be hostile.
"""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from itertools import accumulate

import msgspec

from runtime_core.errors import InvalidInput

JSON = "application/json"
MSGPACK = "application/msgpack"

MAX_DATA_BYTES = 1024 * 1024
"""The largest data of an event (1 MiB). Send larger data by reference."""
MAX_DEPTH = 64
"""How deep arrays and objects may be nested."""

_MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_AS_ZEROS = bytes.maketrans(b"123456789E", b"0" * 9 + b"e")
_LONG_NUMBER = b"0" * 19

MAX_SLOW_NUMBERS = 1000
"""How many numbers with exponents of three digits, and runs of 64 digits, JSON may hold: msgspec reads 30 of the former
in a millisecond, and 40 numbers of 300 digits."""
_LONG_DIGITS = b"0" * 64
_LONG_EXPONENTS = (b"e000", b"e+000", b"e-000")

_ALL_BYTES = bytes(range(256))
_NOT_QUOTE_OR_BRACKET = bytes(b for b in _ALL_BYTES if b not in b'"[]{}')
# As signed bytes: one level down, one level up.
_BRACKET_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")

_CONTAINER_HEADS = frozenset([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_NOT_CONTAINER_HEADS = bytes(b for b in _ALL_BYTES if b not in _CONTAINER_HEADS)


def _fixed_sizes() -> list[int]:
    """Return the size in bytes of a msgpack item for each head byte, or 0 if the head alone does not give it."""
    sizes = [0] * 256
    for head in (*range(0x80), 0xC0, 0xC1, 0xC2, 0xC3, *range(0xE0, 0x100)):
        sizes[head] = 1
    for head in range(0xA0, 0xC0):
        sizes[head] = 1 + (head & 31)
    numbers = {0xCC: 2, 0xD0: 2, 0xCD: 3, 0xD1: 3, 0xCA: 5, 0xCE: 5, 0xD2: 5, 0xCB: 9, 0xCF: 9, 0xD3: 9}
    extensions = {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
    for head, size in (numbers | extensions).items():
        sizes[head] = size
    return sizes


_FIXED_SIZES = _fixed_sizes()
# Head byte → (size of the length that follows, further bytes besides length and payload).
_SIZED = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},
}

_json_encoder = msgspec.json.Encoder()
_canonical_encoder = msgspec.json.Encoder(order="sorted")
_json_decoder = msgspec.json.Decoder()
_raw_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_msgpack_decoder = msgspec.msgpack.Decoder()
_pack = msgspec.msgpack.Encoder().encode
HUGE_INTEGER = "holds an integer outside 64 bits, with too many digits to be written; send hex(…) of it"
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""How msgpack writes NaN and infinities. Other numbers may contain the same bytes."""


def decode(data: bytes, content_type: str = JSON, limit: int = MAX_DATA_BYTES) -> object:
    """Return the value of `data`: None, bool, int, float, str, list, or dict with string keys.

    `content_type` is a `datacontenttype` (empty: JSON); parameters such as a charset are ignored. `limit` is in bytes.
    If a key occurs twice, its last value counts.

    Raises InvalidInput: field `datacontenttype` for an unsupported type, otherwise field `data`.
    """
    wanted = _format(content_type)
    if not data:
        raise InvalidInput("data", "is empty; send at least `null`")
    if len(data) > limit:
        raise InvalidInput(
            "data",
            f"is {len(data)} bytes, over the limit of {limit}; store it elsewhere and send a reference",
        )
    if wanted == JSON:
        return _decode_json(data)
    return _decode_msgpack(data)


def decode_object(data: bytes, depth: int = MAX_DEPTH) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, each still as JSON text.

    Raises InvalidInput, field `data`.
    """
    if _json_deeper_than(data, depth):
        raise _too_deep(depth)
    _refuse_slow_numbers(data)
    try:
        return _raw_object_decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("data", f"is not a JSON object: {_reason(data, error)}") from error


def encode(value: object, encoder: msgspec.json.Encoder = _json_encoder) -> bytes:
    """Return `value` as compact JSON, which `decode` accepts. The size is not checked.

    Raises InvalidInput, field `data`, for values that JSON cannot hold: unknown types, NaN and infinities,
    integers outside 64 bits, lone surrogates, and values that contain themselves or are deeper than 64 levels.
    """
    if sys.get_int_max_str_digits() != sys.int_info.default_max_str_digits:
        refuse_huge_integers(value)
    try:
        data = encoder.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidInput("data", f"holds text that UTF-8 cannot: {error.reason}") from error
    except RecursionError as error:
        raise InvalidInput("data", "is nested in itself or far too deep; send a flat value") from error
    except (TypeError, ValueError) as error:
        if has_too_many_digits(error):
            raise InvalidInput("data", HUGE_INTEGER) from error
        raise InvalidInput("data", f"cannot be JSON: {error}") from error
    if type(value) is str:
        return data  # a text passes all checks below, and most inputs and outputs are texts
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _json_deeper_than(data, MAX_DEPTH):
        raise _too_deep(MAX_DEPTH)
    _refuse_slow_numbers(data)
    # The encoder writes NaN and infinities as `null`, so a text without `null` has none.
    if value is not None and (b"null" in data or _has_long_number(data)):
        _refuse_foreign_numbers(value)
    return data


def refuse_huge_integers(value: object) -> None:
    """Refuse integers outside 64 bits without writing one: the digits of a large one take Python minutes.

    Only for a program that has lifted Python's limit of 4,300 digits.
    """
    try:
        _pack(value)
    except OverflowError:
        raise InvalidInput("data", HUGE_INTEGER) from None
    except Exception:
        return  # the encoder names what is wrong


def has_too_many_digits(error: Exception) -> bool:
    """Whether Python has refused to write an integer of more than 4,300 digits."""
    return str(error).startswith("Exceeds the limit")


def canonical(value: object) -> bytes:
    """Return JSON as `encode` does, with sorted keys, so that equal values have equal bytes. For digests."""
    return encode(value, _canonical_encoder)


def canonical_of(data: bytes) -> bytes:
    """Return JSON that `encode` has written with sorted keys, as `canonical` does."""
    return _canonical_encoder.encode(_json_decoder.decode(data))


def readable(data: bytes) -> object:
    """Return stored JSON as a value to show to people: None if empty, the text itself if it is not JSON."""
    if not data:
        return None
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return data.decode("utf-8", "replace")
    return value


def wrong_cursor(cursor: str) -> InvalidInput:
    """Return the error for a text that no page of a list gave as the place of the next one."""
    return InvalidInput("cursor", f"{quoted(cursor)} is not a cursor: send one from `next_cursor`, or none")


def quoted(value: object, width: int = 60) -> str:
    """Return `value` as one short line for an error message."""
    try:
        text = _json_encoder.encode(value).decode()
    except Exception:
        try:
            text = repr(value)
        except Exception:  # too many digits or levels, or the value's own error
            text = f"a value of type {type(value).__name__}"
    # Control characters could forge lines in a log.
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: width + 1])
    return text if len(text) <= width else text[: width - 1] + "…"


def _format(content_type: str) -> str:
    """Return JSON or MSGPACK for any spelling of the two."""
    if content_type in ("", JSON, MSGPACK):
        return content_type or JSON
    name = content_type.partition(";")[0].strip().lower()
    if name == JSON or (name.startswith("application/") and name.endswith("+json")):
        return JSON
    if name in _MSGPACK_NAMES:
        return MSGPACK
    raise InvalidInput("datacontenttype", f"{quoted(content_type)} is not supported; send `{JSON}` or `{MSGPACK}`")


def _decode_json(data: bytes) -> object:
    if _json_deeper_than(data, MAX_DEPTH):
        raise _too_deep(MAX_DEPTH)
    _refuse_slow_numbers(data)
    try:
        value = _json_decoder.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidInput("data", f"is not UTF-8: {error.reason} (byte {error.start} of a text)") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput("data", f"is not JSON: {_reason(data, error)}") from error
    if _has_long_number(data):
        _refuse_foreign_numbers(value)
    return value


def _reason(data: bytes, error: Exception) -> str:
    """Return why JSON was refused. msgspec reports data with half of a surrogate pair near its end as truncated."""
    if b"\\u" in data and isinstance(error, msgspec.DecodeError):
        try:
            json.loads(data)  # accepts half pairs
        except (ValueError, RecursionError):
            return str(error)
        return "a text holds half of a surrogate pair"
    return str(error)


def _decode_msgpack(data: bytes) -> object:
    if _msgpack_deeper_than(data, MAX_DEPTH):
        raise _too_deep(MAX_DEPTH)
    try:
        value = _msgpack_decoder.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidInput("data", f"is not UTF-8: {error.reason} (byte {error.start} of a text)") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput("data", f"is not msgpack: {error}") from error
    _refuse_foreign(value)
    return value


def _refuse_foreign(value: object) -> None:
    """Refuse values that JSON, or a client with 64-bit integers, cannot hold."""
    pending = [value]
    while pending:
        item = pending.pop()
        if item is None or isinstance(item, (str, bool)):
            continue
        if isinstance(item, int):
            if not _INT_MIN <= item <= _INT_MAX:
                raise InvalidInput("data", f"holds {quoted(item)}, an integer outside 64 bits; send it as text")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidInput("data", f"holds {item}, which is not a JSON number; send `null` or text")
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise InvalidInput("data", f"has the key {quoted(key)}, which is not text")
            pending.extend(item.values())
        else:
            kind = "bytes" if isinstance(item, bytes) else "an extension type"
            raise InvalidInput("data", f"holds {kind}, which JSON cannot hold; send text, such as base64")


def _refuse_foreign_numbers(value: object) -> None:
    """Do the same for a value without bytes. Packing it is thirty times as fast as a walk over its parts."""
    try:
        if _NOT_FINITE.search(_pack(value)) is None:
            return
    except OverflowError:
        pass  # the walk names the integer
    _refuse_foreign(msgspec.to_builtins(value, str_keys=True))


def _too_deep(depth: int) -> InvalidInput:
    return InvalidInput("data", f"is nested deeper than {depth} levels; send a flatter value")


def _has_long_number(data: bytes) -> bool:
    """Return whether JSON has a run of 19 digits: only such a run can be an integer outside 64 bits."""
    return _LONG_NUMBER in data.translate(_AS_ZEROS)  # a fifth of the time of a regular expression


def _refuse_slow_numbers(data: bytes) -> None:
    """Refuse JSON that decoders take seconds for. Outside strings only."""
    if len(data) < len(_LONG_EXPONENTS[0]) * MAX_SLOW_NUMBERS:
        return
    data = data.translate(_AS_ZEROS)
    if _slow_numbers(data) <= MAX_SLOW_NUMBERS:
        return
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _slow_numbers(b" ".join(data.split(b'"')[::2])) > MAX_SLOW_NUMBERS:
        raise InvalidInput(
            "data",
            f"holds more than {MAX_SLOW_NUMBERS} numbers with exponents of three digits, such as 1e300, or with 64 "
            "digits and more; send them as text",
        )


def _slow_numbers(zeros: bytes) -> int:
    found = zeros.count(_LONG_DIGITS)
    # Counting one letter is fast, and numbers seldom have it.
    return found if zeros.count(b"e") <= MAX_SLOW_NUMBERS - found else found + sum(map(zeros.count, _LONG_EXPONENTS))


def _json_deeper_than(data: bytes, depth: int) -> bool:
    """Return whether a decoder would nest arrays and objects deeper than `depth`.

    Exact for JSON. For other bytes it is an upper bound of the depth at which the decoder finds the error.
    """
    if data.count(b"[") + data.count(b"{") <= depth:
        return False
    # Keep brackets outside strings. Escaped backslashes go first, so that the `\"` left are escaped quotes.
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _NOT_QUOTE_OR_BRACKET)
    steps = b"".join(marks.split(b'"')[::2]).translate(_BRACKET_STEPS)
    return max(accumulate(array("b", steps)), default=0) > depth


def _msgpack_deeper_than(data: bytes, depth: int) -> bool:
    """Return whether msgpack nests arrays and maps deeper than `depth`; malformed bytes end the search."""
    if len(data.translate(None, _NOT_CONTAINER_HEADS)) <= depth:
        return False
    outer: list[int] = []  # the number of remaining items of each open container but the innermost
    left = 1  # the same for the innermost; the document itself counts as one
    at, end = 0, len(data)
    while at < end:
        while left == 0:
            if not outer:
                return False
            left = outer.pop()
        left -= 1
        head = data[at]
        size = _FIXED_SIZES[head]
        if size:
            at += size
        elif head in _SIZED:
            width, besides = _SIZED[head]
            at += 1 + width + besides + int.from_bytes(data[at + 1 : at + 1 + width])
        else:
            if head < 0xA0:
                width, items = 0, head & 15
            else:
                width = 2 if head in (0xDC, 0xDE) else 4
                items = int.from_bytes(data[at + 1 : at + 1 + width])
            is_array = head in (0xDC, 0xDD) or 0x90 <= head < 0xA0
            at += 1 + width
            outer.append(left)
            left = items if is_array else 2 * items
            if len(outer) > depth:
                return True
    return False


def typed(text: str, *, words: bool = False, field: str = "") -> object:
    """Parse an object, an array, a number or a quoted string as JSON; return any other text as is.

    With `words`, also parse `true`, `false` and `null`, the most common answers to questions. With `field`, raises
    InvalidInput(field) for text that begins like an object or an array and is not JSON.
    """
    stripped = text.strip()
    if stripped[:1] not in tuple('{["-0123456789') and not (words and stripped in ("true", "false", "null")):
        return text
    try:
        value: object = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError) as error:
        if field and stripped[0] in "{[":
            raise InvalidInput(field, _not_json(stripped, error)) from None
        return text
    return value


def _not_json(text: str, error: Exception) -> str:
    where, why = "", str(error)
    try:
        json.loads(text)
    except json.JSONDecodeError as found:
        line = f"line {found.lineno}, " if "\n" in text else ""
        where, why = f" at {line}column {found.colno}", found.msg
    except (ValueError, RecursionError):
        pass  # msgspec's own words are all there is
    return f"is not JSON{where} ({why}): correct it, or quote it to give it as text, as in '\"[draft] …\"'"
