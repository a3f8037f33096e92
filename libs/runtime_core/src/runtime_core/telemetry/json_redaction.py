"""Redacts secrets in JSON, which stays valid JSON.

Strings with candidates (see `secret_search.py`) are redacted as texts, and the rest stays unchanged. If there are too
many candidates, only the upper levels of the JSON are kept.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec
import re2

from runtime_core.base.periodic import Slices
from runtime_core.telemetry.secret_search import HIDDEN, SECRET_MEMBERS, Allowance, SecretSearch, bytes_options, merged

LONGEST_ESCAPE = len("\\u0000")
SAVED_BY_ESCAPE = LONGEST_ESCAPE - 1
"""The most bytes that decoding saves per escape."""
FEW_ESCAPES = 1000
_BYTES_PER_ESCAPE = 128
"""Up to this number of escapes, and one in this number of bytes, replacing them one by one is fastest."""

_STRINGS_WITH_ESCAPES = 2
"""How many strings with escapes are skipped one by one before RE2 scans the rest."""
_HOPS = 8
"""How many escaped quotes, and backslashes before one, are checked one by one before msgspec reads the string."""
_BACKSLASH = ord("\\")
_ONLY_IN_STRINGS = re.compile(rb"[^]\[{}:,\x00-\x20\"\x5c0-9truefalsnE+.-]")
"""Matches a byte that valid JSON has only inside strings."""
_NEAR = 1024
"""Up to this distance, skipping whole strings is as fast."""
_NAME_BYTES = 32
"""How many bytes of a candidate are searched for one."""
_TO_LAST_QUOTE = re2.compile(rb'(?s:(?:(?:[^"\\]|\\.)*")*)', bytes_options())
_REST_OF_STRING = re2.compile(rb'(?s:(?:[^"\\]|\\.)*")', bytes_options())
_TO_STRING = re2.compile(rb'(?s:[^"]|"(?:[^"\\]|\\.)*")*', bytes_options())
"""Matches whole strings and the text between them, up to the start of an unclosed string."""

_ESCAPED = {b"\\": b"\\\\", b'"': b'\\"', b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\b": b"\\b", b"\f": b"\\f"}
"""The escapes of characters, the backslash first, since it is part of the others."""
_UNESCAPED = {written[1:]: decoded for decoded, written in _ESCAPED.items()} | {b"/": b"/"}

_check = msgspec.json.Decoder(msgspec.Raw).decode
_TRUNCATED = "Input data was truncated"
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_decode_text = msgspec.json.Decoder(str).decode
_decode_bytes = json.JSONDecoder(strict=False).decode
_encode = msgspec.json.Encoder().encode


Edits = list[tuple[int, int, bytes]]
"""Parts of some data, in order, and their replacements. Copying large data at each level of JSON would be slow."""


def string_around(data: bytes, at: int, position: int) -> tuple[int, int] | None:
    """Return the span of the string that contains `position`; None if no string does. `at` is between strings."""
    if position - at > _NEAR and (start := _quote_before(data, at, position)) >= 0:
        end = string_end(data, start)
        # In a string, since JSON has these bytes nowhere else: the quote does not end one.
        if _ONLY_IN_STRINGS.search(data, position, min(position + _NAME_BYTES, end - 1)) is not None:
            return start, end
    for _ in range(_STRINGS_WITH_ESCAPES):  # up to the first escape, every second quote ends a string
        escape = data.find(b"\\", at, position)
        until = position if escape < 0 else escape
        if data.count(b'"', at, until) % 2:
            start = data.rfind(b'"', at, until)
            end = string_end(data, start)
            if end > position:
                return start, end
            at = end
        elif escape < 0:
            return None
        else:
            at = escape + 1
    start = _TO_STRING.match(data, at, position).end()
    return (start, string_end(data, start)) if start < position else None


def _quote_before(data: bytes, at: int, position: int) -> int:
    """Return the last quote before `position` that is not escaped; -1 if there is none nearby."""
    quote = data.rfind(b'"', at, position)
    if quote <= at or data[quote - 1] != _BACKSLASH:
        return quote
    start = back = max(at, position - _LONG_STRING // 4)
    while back > at and start - back < _HOPS and data[back - 1] == _BACKSLASH:
        back -= 1
    if start - back == _HOPS:
        return -1
    start += (start - back) % 2  # not inside an escape
    end = int(_TO_LAST_QUOTE.match(data, start, position).end())
    return end - 1 if end > start else -1


def string_end(data: bytes, start: int) -> int:
    """Return the end of the string that starts here; a truncated string ends with the data."""
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
    """Like `string_end`; `at` is inside the string, but not inside an escape."""
    try:
        _check(memoryview(data)[start:])
        end = len(data)
    except msgspec.DecodeError as error:
        # msgspec is seven times as fast as RE2, and its error gives the position after the string and white space.
        reason = str(error)
        if reason == _TRUNCATED:
            return len(data)
        reached = _TRAILING.search(reason)
        if reached is None:
            string = _REST_OF_STRING.match(data, at)
            return len(data) if string is None else string.end()
        end = start + int(reached[1]) - 1
    return data.rfind(b'"', start, end) + 1


def unescaped(written: bytes, escapes: int) -> tuple[bytes, list[int] | None]:
    """Return the UTF-8 of a JSON string with `escapes` backslashes, and where in it each escaped character is.

    Returns None instead of these positions if the string has many escapes, or one with a number. Raises DecodeError,
    or ValueError.
    """
    few = escapes <= min(FEW_ESCAPES, 32 + len(written) // _BYTES_PER_ESCAPE)
    if few and (decoded := _few_unescaped(written)) is not None:
        return decoded
    if few or written.isascii() or b"\\u" in written:
        return _decode_text(written).encode(), None
    # In Latin-1 each byte is a character, which saves decoding and encoding UTF-8.
    text: str = _decode_bytes(written.decode("latin-1"))
    return text.encode("latin-1"), None


def _escapes_in(written: bytes) -> int:
    """Return the number of backslashes. `bytes.count` is slow if there are few."""
    found, at = 0, written.find(b"\\")
    while at >= 0:
        found += 1
        if found > len(written) >> 12:
            return written.count(b"\\")
        at = written.find(b"\\", at + 1)
    return found


def _few_unescaped(written: bytes) -> tuple[bytes, list[int]] | None:
    """Like `unescaped`; None if a character is written as a number, or the string is truncated."""
    if not written.endswith(b'"', 1):
        return None
    view = memoryview(written)  # copies a large text only once
    pieces: list[bytes | memoryview] = []
    positions: list[int] = []
    kept, at = 1, written.find(b"\\", 1)
    while at >= 0:
        character = _UNESCAPED.get(written[at + 1 : at + 2])
        if character is None or at + 2 == len(written):
            return None
        pieces += view[kept:at], character
        positions.append(at - 1 - len(positions))
        kept = at + 2
        at = written.find(b"\\", kept)
    pieces.append(view[kept:-1])
    return b"".join(pieces), positions


def escaped(text: bytes) -> bytes:
    """Return this UTF-8 as a JSON string."""
    if text.isascii():
        return _encode(text.decode())
    return json.dumps(text.decode("latin-1"), ensure_ascii=False).encode("latin-1")


def _escaped_edits(edits: Edits, positions: list[int], start: int) -> Edits:
    """Return edits of a text as edits of its JSON string, which starts at `start`; see `unescaped` for `positions`."""
    return [
        (
            start + 1 + begin + bisect_left(positions, begin),
            start + 1 + end + bisect_left(positions, end),
            escaped(made)[1:-1],
        )
        for begin, end, made in edits
    ]


def edited(data: bytes, edits: Edits) -> bytes:
    """Return the data with these edits; the same object if they change nothing."""
    if not edits:
        return data
    view = data if len(data) < _LONG_STRING else memoryview(data)  # slices of a memoryview are not copies
    pieces: list[bytes | memoryview] = []
    kept = 0
    for start, end, made in edits:
        pieces += view[kept:start], made
        kept = end
    pieces.append(view[kept:])
    whole = b"".join(pieces)
    return data if whole == data else whole


STRINGS = 10_000
"""How many strings of one payload are matched with the user's patterns before the rest is hidden."""

ESCAPES = 16_384
"""How many backslashes of one payload are decoded before texts with escapes are hidden as a whole."""

VALUES = 80
"""How many values of JSON with too many candidates are checked one by one before the rest is hidden."""

DECODED_BYTES = 524_288
"""How many bytes of strings are decoded, or as many as the payload has. Each level of JSON inside texts counts again.

A longer text that may hold a secret is hidden.
"""

NESTING = 3
"""How deep JSON inside texts is read. A deeper text that may hold a secret is hidden."""

_KEPT_LEVELS = 4
"""Levels of JSON that are kept if there are too many candidates: rows, their members, and the texts of an error."""
_KEPT_BYTES = (sys.maxsize, 131_072, 16_384, 16_384)
"""The largest array or object that is kept on each level."""
_KEPT_ELEMENTS = 200
_ELEMENT_BYTES = 128
"""An array of many elements with a shorter average is hidden as a whole; rows are longer."""
_MEMBER_BYTES = 1024
"""The same for the members of an object, each of which costs more."""
_NAMES_BYTES = 65_536
"""An object with more bytes of names is hidden as a whole: to write them again takes long."""

SLICE_BYTES = 65_536
"""How many bytes of rows with too many candidates are redacted before other work of the event loop runs."""
_ROW_BYTES = 1024
"""What a row costs in addition to its bytes, as bytes."""

_DECODED_COMMAS = 16_384
"""JSON with more commas is hidden as a whole before it is decoded: that many members or elements take too long."""

_LONGEST_SHOWN_NAME = 512
"""A longer name of a member that may hold a secret is hidden as a whole in JSON with too many candidates."""

_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")

_LONG_STRING = 16_384
_LONGEST_NAME = 2 + LONGEST_ESCAPE * max(map(len, SECRET_MEMBERS))
"""The most bytes of a secret's name in JSON, without `-` and `_`."""

_LOWER = bytes(range(256)).lower()

_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_rows = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_HIDDEN_TEXT = HIDDEN.encode()
_HIDDEN_VALUE = _encode(HIDDEN)
_HIDDEN_MEMBER = b"%b:%b" % (_HIDDEN_VALUE, _HIDDEN_VALUE)


class _TooManyCandidates(Exception):
    """The allowance for a payload is used up."""


class _Allowance(Allowance):
    """The remaining work for one payload."""

    __slots__ = ("decoded", "escapes", "strings", "values")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.decoded = max(DECODED_BYTES, size)
        self.escapes = ESCAPES
        self.strings = STRINGS
        self.values = VALUES


class JsonRedaction:
    """Redacts the secrets that a search finds in JSON."""

    def __init__(self, search: SecretSearch) -> None:
        self._search = search

    def data(self, data: bytes, first: re2._Match | None) -> bytes:
        """Implement `Redactor.data`; `first` is the first candidate."""
        try:
            return edited(data, self._json(data, _Allowance(len(data)), 0, first))
        except _TooManyCandidates:
            return self._coarsely(data.strip(), _Allowance(0))

    async def rows(self, data: bytes, first: re2._Match | None) -> bytes:
        """Implement `Redactor.rows`; `first` is the first candidate."""
        try:
            return edited(data, self._json(data, _Allowance(len(data)), 0, first))
        except _TooManyCandidates:
            try:
                rows = _rows(data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                return self._coarsely(data.strip(), _Allowance(0))
        slices = Slices(SLICE_BYTES)
        shown = []
        for row in rows:
            size = sum(len(bytes(value)) for value in row.values())
            await slices.worked(_ROW_BYTES + size)
            shown.append(self._coarse_object(row, size, _Allowance(0), 1, 0))
        return b"[%b]" % b",".join(shown)

    def _json(self, data: bytes, allowance: _Allowance, depth: int, first: re2._Match | None) -> Edits:
        """Return the edits that remove secrets from JSON; `first` is the first candidate. Raises _TooManyCandidates."""
        every = not self._search.matches_no_pattern(data)
        edits: Edits = []
        if first is None and not every:
            return edits
        # All strings are found first: if they are too many, none was decoded for nothing.
        strings: list[tuple[int, int, int, int, int]] = []
        at = 0
        while True:
            if every:
                string = self._any_string(data, at, allowance)
            else:
                string = self._found_string(data, at, allowance, first)
                first = None
            if string is None:
                break
            start, end, hit = string
            at, value = end, 0
            if (colon := _COLON.match(data, end)) is not None:
                value = colon.end()
                if _names_secret(data[start:end]):
                    at = string_end(data, value) if data[value : value + 1] == b'"' else value
            strings.append((start, end, hit, value, at))
        for start, end, hit, value, at in strings:
            if allowance.candidates > 0 or every or at > end:
                edits += self._string(data[start:end], start, allowance, depth, hit - start - 1, named=value > 0)
            else:
                edits.append((start, end, _HIDDEN_VALUE))
            if at - value > 2 and at > end:
                edits.append((value, at, _HIDDEN_VALUE))
        return edits

    def _any_string(self, data: bytes, at: int, allowance: _Allowance) -> tuple[int, int, int] | None:
        """Return the next string, and where in it to begin the search. `at` is between strings."""
        allowance.strings -= 1
        if allowance.strings < 0:
            raise _TooManyCandidates
        start = data.find(b'"', at)
        return None if start < 0 else (start, string_end(data, start), start)

    def _found_string(
        self, data: bytes, at: int, allowance: _Allowance, found: re2._Match | None
    ) -> tuple[int, int, int] | None:
        """Return the next string with a candidate, and the candidate's position; `found` is a candidate that is already
        known.

        `at` is between strings.
        """
        position = at
        while (found := found or self._search.candidate.search(data, position)) is not None:
            allowance.candidates -= 1
            if allowance.candidates < 0:
                raise _TooManyCandidates
            # One further, since a candidate may begin with the quote of its string.
            position = found.start() + 1
            if (string := string_around(data, at, position)) is not None:
                return *string, position - 1
            at, found = position, None
        return None

    def _string(self, written: bytes, start: int, allowance: _Allowance, depth: int, hit: int, *, named: bool) -> Edits:
        """Return the edits of a JSON string that starts at `start`. There is no candidate before `hit`."""
        if b"\\" in written:
            return self._escaped_string(written, start, allowance, depth, hit, named=named)
        text = written[1:-1] if written.endswith(b'"', 1) else written[1:]
        found = self._text(text, allowance, depth, max(0, hit), named=named)
        if not found:
            return found
        edits = [(start + 1 + begin, start + 1 + end, made) for begin, end, made in found]
        if len(text) == len(written) - 1:
            edits.append((start + len(written), start + len(written), b'"'))
        return edits

    def _escaped_string(
        self, written: bytes, start: int, allowance: _Allowance, depth: int, hit: int, *, named: bool
    ) -> Edits:
        whole: Edits = [(start, start + len(written), _HIDDEN_VALUE)]
        allowance.decoded -= len(written)
        if allowance.decoded < 0:
            return whole
        escapes = _escapes_in(written) if allowance.escapes > 0 else 1
        allowance.escapes -= escapes
        if allowance.escapes < 0:
            return whole
        cut = self._cut(written, escapes, allowance, hit)
        if cut and written[1:2] in (b"{", b"["):
            allowance.candidates = 0
            return whole
        try:
            text, positions = unescaped(written[:cut] + b'"' if cut else written, escapes)
        except (msgspec.DecodeError, ValueError):
            # Another program wrote half of a surrogate pair, or the data is truncated.
            return whole
        # The candidate may be a letter written as a number in the middle of a secret.
        numbered = hit < 0 or written.startswith(b"\\u", hit + 1)
        # Decoding makes nothing longer, neither before the candidate nor after it.
        saved = min(escapes * SAVED_BY_ESCAPE, (cut or len(written)) - len(text) + LONGEST_ESCAPE)
        at = 0 if numbered else max(0, hit - saved)
        if cut:
            edits = [*self._hidden(text, allowance, at), (len(text), len(text), _HIDDEN_TEXT)]
            allowance.candidates = 0
        else:
            edits = self._text(text, allowance, depth, at, named=named)
            if positions is not None:
                return _escaped_edits(edits, positions, start)
        made = edited(text, edits)
        return [] if made is text else [(start, start + len(written), escaped(made))]

    def _text(self, text: bytes, allowance: _Allowance, depth: int, at: int, *, named: bool) -> Edits:
        """Return the edits of a string's text. There is no candidate before `at`."""
        if named or text.lstrip()[:1] not in (b"{", b"["):
            return self._hidden(text, allowance, at)
        first = self._search.candidate.search(text, at)
        if first is None and not self._search.patterns:
            return []
        return self._nested(text, allowance, depth, first) if _is_json(text) else self._hidden(text, allowance, at)

    def _hidden(self, text: bytes, allowance: _Allowance, at: int) -> Edits:
        spans = self._search.spans(text, allowance, at)
        return [(start, end, _HIDDEN_TEXT) for start, end in merged(spans)] if spans else []

    def _cut(self, written: bytes, escapes: int, allowance: _Allowance, hit: int) -> int:
        """Return where a long string exceeds the allowed candidates, since the rest need not be decoded; 0 if nowhere.

        For strings with many escapes, which are slow to decode.
        """
        if escapes <= FEW_ESCAPES or len(written) < _LONG_STRING:
            return 0
        at = max(0, hit)
        for _ in range(allowance.candidates + 1):
            found = self._search.candidate.search(written, at)
            if found is None:
                return 0
            at = found.start() + 1
        # Not inside an escape.
        cut = at - 1
        while (escape := written.rfind(b"\\", max(1, cut - LONGEST_ESCAPE), cut)) >= 0:
            cut = escape
        return cut

    def _nested(self, text: bytes, allowance: _Allowance, depth: int, first: re2._Match | None) -> Edits:
        """Return the edits of JSON inside a text; hide all of it if it is too deep or has too many candidates."""
        whole: Edits = [(0, len(text), _HIDDEN_TEXT)]
        if depth >= NESTING:
            return whole
        try:
            return self._json(text, allowance, depth + 1, first)
        except _TooManyCandidates:
            return whole

    def _coarsely(self, data: bytes, allowance: _Allowance, level: int = 0, hit: int = 0) -> bytes:
        """Return JSON with its upper levels. Below, every value that may hold a secret is hidden as a whole.

        There is no candidate before `hit`.
        """
        head = data[:1]
        if head not in (b"[", b"{", b'"'):
            # A number or a word; at the top level it may not be JSON at all.
            return data if level else _HIDDEN_VALUE
        if level >= _KEPT_LEVELS or head == b'"' or len(data) > _KEPT_BYTES[level]:
            return _HIDDEN_VALUE
        if len(data) > _DECODED_COMMAS and data.count(b",") > _DECODED_COMMAS:
            return _HIDDEN_VALUE
        if not level and data.startswith(b"[{") and data.endswith(b"}]"):
            # A single row, the usual case: read it once, and not again to find its end.
            with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
                return b"[%b]" % self._coarse_object(_members(data[1:-1]), len(data), allowance, 1, hit - 1)
        try:
            if head == b"{":
                return self._coarse_object(_members(data), len(data), allowance, level, hit)
            values = _elements(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return _HIDDEN_VALUE
        if len(data) < _ELEMENT_BYTES * (len(values) - _KEPT_ELEMENTS):
            return _HIDDEN_VALUE
        return b"[%b]" % self._coarse_values(values, None, len(data), allowance, level, hit)

    def _coarse_object(
        self, members: Mapping[str, msgspec.Raw], size: int, allowance: _Allowance, level: int, hit: int
    ) -> bytes:
        if size < _MEMBER_BYTES * (len(members) - _KEPT_ELEMENTS):
            return _HIDDEN_VALUE
        if size > _NAMES_BYTES and size - sum(len(bytes(value)) for value in members.values()) > _NAMES_BYTES:
            return _HIDDEN_VALUE
        written = [b"%b:%b" % (_encode(name), bytes(value)) for name, value in members.items()]
        return b"{%b}" % self._coarse_values(written, list(members.items()), size, allowance, level, hit)

    def _coarse_values(
        self,
        values: Sequence[bytes],
        members: Sequence[tuple[str, msgspec.Raw]] | None,
        size: int,
        allowance: _Allowance,
        level: int,
        hit: int,
    ) -> bytes:
        """Return the elements of an array, or the members (also as `members`) of an object, joined. Only those with a
        hit change. `size` and `hit` are as in the whole array or object, with its brackets and white space."""
        data = b",".join(values)
        lengths = list(accumulate(map(len, values)))  # without the commas, since a generator would take thrice as long
        every = not self._search.matches_no_pattern(data)
        pieces: list[bytes] = []
        kept, at = 0, max(0, hit - (size - len(data)))
        while at < len(data):
            found = None if every else self._search.candidate.search(data, at)
            if found is None and not every:
                break
            place = at if found is None else found.start()
            index = bisect_right(range(len(lengths)), place, key=lambda index: lengths[index] + index + 1)
            start, end = lengths[index - 1] + index if index else 0, lengths[index] + index
            allowance.values -= 1
            if allowance.values < 0:
                # A value in an object needs a name.
                pieces += data[kept:start], _HIDDEN_VALUE if members is None else _HIDDEN_MEMBER
                kept = len(data)
                break
            if members is None:
                first = 0 if found is None else found.start() - start
                shown = self._coarsely(data[start:end], allowance, level + 1, first)
            else:
                before_end = None if found is None else end - found.start()
                shown = self._coarse_member(*members[index], allowance, level + 1, before_end)
            pieces += data[kept:start], shown
            kept, at = end, end + 1
        pieces.append(data[kept:])
        return b"".join(pieces)

    def _coarse_member(self, name: str, raw: msgspec.Raw, allowance: _Allowance, level: int, hit: int | None) -> bytes:
        """Return a member; its first candidate is `hit` bytes before its end, or anywhere if None."""
        value = bytes(raw)
        in_value = hit is not None and hit <= len(value)
        if value[:1] == b'"' and _is_secret_name(name):
            value = _HIDDEN_VALUE
        elif in_value or self._search.candidate.search(value) is not None or not self._search.matches_no_pattern(value):
            first = len(value) - hit if in_value and hit is not None else 0
            value = self._coarsely(value, allowance, level, first)
        if in_value:
            return b"%b:%b" % (_encode(name), value)
        written = name.encode()
        in_name = hit is not None or self._search.candidate.search(written) is not None
        if in_name and len(written) > _LONGEST_SHOWN_NAME:
            return b"%b:%b" % (_HIDDEN_VALUE, value)
        shown = self._search.hidden(written, allowance)
        return b"%b:%b" % (_encode(shown.decode("utf-8", "replace")), value)


def _names_secret(written: bytes) -> bool:
    if len(written) > _LONGEST_NAME:
        for part in (written[:_LONG_STRING], written):  # few are long only by `-` and `_`
            if len(part.translate(None, b"-_")) > _LONGEST_NAME:
                return False
    try:
        return _is_secret_name(_decode_text(written))
    except (msgspec.DecodeError, UnicodeError):
        return False


def _is_secret_name(name: str) -> bool:
    return name.isascii() and name.encode().translate(_LOWER, b"-_").decode() in SECRET_MEMBERS


def _is_json(data: bytes) -> bool:
    try:
        _check(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
