"""Takes secrets out of what is kept or shown: rows of the trajectory, errors, dead letters, log lines, spans.

What is taken out, `***` stands in its place:

- values of the environment's variables that are named like a key (`OPENAI_API_KEY`, `*_TOKEN`, `*_SECRET`, …), and
  passwords of URLs in any variable; what the process has learned since, as a key that an app gives in its code;
- text that looks like a key of a known service, a bearer token, an `Authorization` header, a password in a URL;
- JSON members that are named like one (`api_key`, `password`, `access_token`, …), where their value is text;
- what the user's own patterns match (`WEFT_REDACT`).

Text is hostile: whatever it holds, the time is linear in its bytes and about that of one search. RE2 takes one look at
everything (`secret_patterns.py`). Only places that it finds are looked at closely, at most `PLACES` of a payload. After
those, the rest of the text is hidden, and of JSON every value that may hold a secret.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise

import msgspec
import re2

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.secret_patterns import (
    LONGEST_WORD,
    RESTS,
    RULE,
    SECRET_MEMBERS,
    bytes_options,
    end_of_word,
    look_for,
)

HIDDEN = "***"
"""What stands in the place of a secret."""

SHORTEST_SECRET = 8
"""Characters. A shorter value of a variable is too likely to be a word of its own, as `test`."""

_KEY_VARIABLE = re.compile(
    r"(?:.*_)?(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"://[^\s:/@\"'<>]*:([^\s/@\"'<>]+)@")  # for variables, which are the user's own

PLACES = 128
"""How many places of one payload are looked at closely. Beyond them all that may be a secret is hidden."""

STRINGS = 10_000
"""How many strings of one JSON payload are matched with the user's patterns, before the rest is hidden likewise."""

ESCAPES = 65_536
"""How many backslashes of one JSON payload are decoded, before a text with escapes is hidden as a whole."""

VALUES = 256
"""How many values of JSON with too many places are looked at one by one, before the rest is hidden."""

NESTING = 3
"""How deep JSON inside of texts is read. A text further down that may hold a secret is hidden."""

READ_CHARACTERS = 65_536
"""How much of a long text is read where only its start or its end is kept."""
CUT_MARGIN = 4_096
"""Characters beside such a cut that are left out: half of a secret there looks like no secret."""

_KEPT_LEVELS = 4
"""Levels of JSON that are kept where too much of it may be secret: rows, their members, and texts of an error's."""
_KEPT_BYTES = 16_384
"""The largest array or object that is kept on the third level and below."""
_KEPT_ELEMENTS = 200
_ELEMENT_BYTES = 128
"""An array with many elements that are on average shorter than this is hidden as a whole; rows are longer."""
_MEMBER_BYTES = 512
"""The same for the members of an object, each of which costs more."""

_COLON = re.compile(rb"\s*+:\s*+")

_REST_OF_STRING = re2.compile(rb'(?s:(?:[^"\\]|\\.)*")', bytes_options())
_LONG_STRING = 16_384
_LONGEST_ESCAPE = len("\\u0000")
_SAVED_BY_ESCAPE = _LONGEST_ESCAPE - 1
"""The most bytes by which a text gets shorter for each of its escapes."""
_HOPS = 64
"""How many escaped quotes, and backslashes before one, are looked at one by one before RE2 goes over the rest."""
_BACKSLASH = ord("\\")

_TO_STRING = re2.compile(rb'(?s:[^"]|"(?:[^"\\]|\\.)*")*', bytes_options())
"""Goes over whole strings and what is between them: up to the start of a string that is still open."""

_LINES = bytes.maketrans(b'"', b"\n")
_OUTER_ANCHOR = re.compile(r"\\[Az]|\(\?[a-zA-Z]*-")

_decode_text = msgspec.json.Decoder(str).decode
_decode_bytes = json.JSONDecoder(strict=False).decode
_LONGEST_NAME = 2 + _LONGEST_ESCAPE * max(map(len, SECRET_MEMBERS))
"""The most bytes that JSON takes for a name of a secret, without `-` and `_`."""

_check = msgspec.json.Decoder(msgspec.Raw).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_HIDDEN_VALUE = _encode(HIDDEN)
_HIDDEN_MEMBER = b"%b:%b" % (_HIDDEN_VALUE, _HIDDEN_VALUE)


class _Allowance:
    """What one payload may still cost."""

    __slots__ = ("escapes", "places", "strings", "values")

    def __init__(self) -> None:
        self.escapes = ESCAPES
        self.places = PLACES
        self.strings = STRINGS
        self.values = VALUES


class _Reached:
    """Says what a rule hides of what the look has found.

    Reads to the end of a secret once, and not again from each place inside it.
    """

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def by(self, text: bytes, found: re2._Match) -> tuple[int, int] | None:
        here, end = found.span()
        if text.startswith(b":", here):
            # A URL: the look has matched it to its `@`.
            colon = text.find(b":", here + 1, end)
            return (colon + 1, end - 1) if colon > 0 else None
        match = RULE.match(text, here)
        if match is None:
            return None
        group = match.lastindex or 0
        start, end = match.span(group)
        end_of_rest = RESTS.get(group)
        if end_of_rest is None and end - start >= LONGEST_WORD and text[start] not in b"'\"":
            end_of_rest = end_of_word
        if end_of_rest is not None:
            if end > self._ends.get(group, 0):
                self._ends[group] = end_of_rest(text, end)
            end = self._ends[group]
        return start, end


class _TooManyPlaces(Exception):
    """The allowance for a JSON payload is spent."""


class Redactor:
    """What a process knows of secrets, and how it takes them out. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re2._Regexp] = ()) -> None:
        self._patterns = tuple(patterns)
        self._secrets: tuple[str, ...] = ()
        self._by_head: dict[bytes, list[bytes]] = {}
        self._lines = _in_lines(self._patterns)
        for secret in secrets:
            self.learn(secret)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], patterns: str = "") -> Redactor:
        """Knows the variables that are named like keys; `patterns` as `patterns_of` takes them."""
        return cls(secrets_of(environ), patterns_of(patterns))

    def learn(self, secret: str | None) -> None:
        """Take this value out too from now on, as a key that the code gives; one under 8 characters is left alone."""
        if not secret or len(secret) < SHORTEST_SECRET or secret in self._secrets:
            return
        self._secrets = (*self._secrets, secret)
        known = secret.encode("utf-8", "surrogatepass")
        # The longest first: a shorter one may be a part of it.
        same = self._by_head.get(known[:SHORTEST_SECRET], [])
        self._by_head[known[:SHORTEST_SECRET]] = sorted((*same, known), key=len, reverse=True)
        self.__dict__.pop("_look", None)

    def text(self, text: str) -> str:
        """The text without secrets; the same object where it has none."""
        data = text.encode("utf-8", "surrogatepass")
        first = self._look.search(data)
        if first is None and not self._patterns:
            return text
        spans = self._spans(data, _Allowance(), len(data) if first is None else first.start())
        return _text_without(text, data, spans) if spans else text

    def start(self, text: str) -> str:
        """A text without secrets; of a long one the start. Redact before you shorten: a rule finds no half secret."""
        shown = self.text(text[:READ_CHARACTERS])
        cut = len(text) > READ_CHARACTERS and not shown.endswith(HIDDEN)
        return shown[:-CUT_MARGIN] if cut else shown

    def end(self, text: str) -> str:
        """A text without secrets; of a long one the end, as `start`."""
        shown = self.text(text[-READ_CHARACTERS:])
        return shown[CUT_MARGIN:] if len(text) > READ_CHARACTERS else shown

    def data(self, data: bytes) -> bytes:
        """JSON without secrets in its strings, else byte for byte as it was; the same object where it has none.

        JSON inside of a string, as the arguments of a tool call are written, is gone through too.
        """
        first = self._look.search(data)
        if first is None and (not self._patterns or self._matches_no_pattern(data)):
            return data
        try:
            return self._json(data, _Allowance(), 0, first)
        except _TooManyPlaces:
            return self._coarsely(data.strip(), _Allowance())

    def rows(self, data: bytes) -> bytes:
        """Rows of the trajectory, a JSON array, without secrets: however many they are, each stays a row."""
        first = self._look.search(data)
        if first is None and (not self._patterns or self._matches_no_pattern(data)):
            return data
        try:
            return self._json(data, _Allowance(), 0, first)
        except _TooManyPlaces:
            try:
                rows = _elements(data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                return self._coarsely(data.strip(), _Allowance())
            return b"[%b]" % b",".join([self._coarse_row(bytes(row)) for row in rows])

    def _coarse_row(self, row: bytes) -> bytes:
        if self._look.search(row) is None and self._matches_no_pattern(row):
            return row
        return self._coarsely(row, _Allowance(), 1)

    def attributes(self, attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
        """Attributes of a span or a row without secrets."""
        return {
            name: self.text(value)
            if isinstance(value, str)
            else [self.text(each) for each in value]
            if isinstance(value, list)
            else value
            for name, value in attributes.items()
        }

    @cached_property
    def _look(self) -> re2._Regexp:
        """Finds the places to look at closely. Made at its first use, and again when a secret was learned."""
        return look_for(self._secrets)

    def _matches_no_pattern(self, data: bytes) -> bool:
        """Whether no pattern of the user's can match a string of this JSON. False also where that is not certain."""
        if not self._patterns:
            return True
        if self._lines is None or b"\\" in data:
            return False
        # Each string without escapes is a line of its own, once its quotes are line breaks.
        return self._lines.search(data.translate(_LINES)) is None

    def _hidden(self, text: bytes, allowance: _Allowance, at: int = 0) -> bytes:
        """A text without secrets; the same object where it has none. Before `at` the look finds nothing."""
        spans = self._spans(text, allowance, at)
        return _without(text, spans, HIDDEN.encode()) if spans else text

    def _spans(self, text: bytes, allowance: _Allowance, at: int) -> list[tuple[int, int]]:
        """Where a text has secrets. Before `at` the look finds nothing."""
        spans: list[tuple[int, int]] = []
        look = self._look
        reached = _Reached()
        while (found := look.search(text, at)) is not None:
            here = found.start()
            if allowance.places <= 0:
                spans.append((here, len(text)))
                break
            allowance.places -= 1
            at = here + 1
            for secret in self._by_head.get(text[here : here + SHORTEST_SECRET], ()):
                if text.startswith(secret, here):
                    spans.append((here, here + len(secret)))
                    break
            if (span := reached.by(text, found)) is not None:
                spans.append(span)
                if span[1] == len(text):
                    break
        for pattern in self._patterns:
            for found in pattern.finditer(text):
                if allowance.places <= 0:
                    spans.append((found.start(), len(text)))
                    break
                allowance.places -= 1
                if found.end() > found.start():
                    spans.append(found.span())
        return spans

    def _json(self, data: bytes, allowance: _Allowance, depth: int, first: re2._Match | None) -> bytes:
        """JSON without secrets; `first` is the first place that the look has found. Raises _TooManyPlaces."""
        every = not self._matches_no_pattern(data)
        if first is None and not every:
            return data
        pieces: list[bytes] = []
        kept = at = 0
        while True:
            if every:
                string = self._any_string(data, at, allowance)
            else:
                string = self._found_string(data, at, allowance, first)
                first = None
            if string is None:
                break
            start, end, hit = string
            colon = _COLON.match(data, end)
            shown = self._string(data[start:end], allowance, depth, hit - start - 1, named=colon is not None)
            if shown is not None:
                pieces += data[kept:start], shown
                kept = end
            at = end
            if colon is not None and _names_secret(data[start:end]):
                value = colon.end()
                at = _string_end(data, value) if data[value : value + 1] == b'"' else value
                if at - value > 2:
                    pieces += data[kept:value], _HIDDEN_VALUE
                    kept = at
        if not pieces:
            return data
        pieces.append(data[kept:])
        made = b"".join(pieces)
        return data if made == data else made

    def _any_string(self, data: bytes, at: int, allowance: _Allowance) -> tuple[int, int, int] | None:
        """The next string, and where in it to begin to look. `at` is between strings."""
        allowance.strings -= 1
        if allowance.strings < 0:
            raise _TooManyPlaces
        start = data.find(b'"', at)
        return None if start < 0 else (start, _string_end(data, start), start)

    def _found_string(
        self, data: bytes, at: int, allowance: _Allowance, found: re2._Match | None
    ) -> tuple[int, int, int] | None:
        """The next string in which the look finds something, and where; `found`, where it has looked.

        `at` is between strings.
        """
        look = at
        while (found := found or self._look.search(data, look)) is not None:
            allowance.places -= 1
            if allowance.places < 0:
                raise _TooManyPlaces
            # One further: what is found may begin with the quote of its string.
            look = found.start() + 1
            if (string := _string_around(data, at, look)) is not None:
                return *string, look - 1
            at, found = look, None
        return None

    def _string(self, written: bytes, allowance: _Allowance, depth: int, hit: int, *, named: bool) -> bytes | None:
        """A string of JSON without secrets, in quotes; None where it has none. The look finds nothing before `hit`."""
        escaped = b"\\" in written
        at = max(0, hit)
        text = written[1:-1] if written.endswith(b'"', 1) else written[1:]
        if escaped:
            escapes = written.count(b"\\")
            allowance.escapes -= escapes
            if allowance.escapes < 0:
                return _HIDDEN_VALUE
            cut = self._cut(written, allowance, hit)
            if cut and written[1:2] in (b"{", b"["):
                allowance.places = 0
                return _HIDDEN_VALUE
            try:
                text = _unescaped(written[:cut] + b'"' if cut else written)
            except (msgspec.DecodeError, ValueError):
                # Another program wrote half of a surrogate pair, or the data is cut off.
                return _HIDDEN_VALUE
            # The look may have found a letter that is written as a number, in the middle of a secret.
            numbered = written.startswith(b"\\u", at + 1)
            at = 0 if numbered else max(0, at - _SAVED_BY_ESCAPE * escapes)
            if cut:
                made = self._hidden(text, allowance, at)
                allowance.places = 0
                return _escaped(made + HIDDEN.encode())
        if not named and text.lstrip()[:1] in (b"{", b"["):
            first = self._look.search(text, at)
            if first is None and not self._patterns:
                return None
            made = self._nested(text, allowance, depth, first) if _is_json(text) else self._hidden(text, allowance, at)
        else:
            made = self._hidden(text, allowance, at)
        if made is text:
            return None
        return _escaped(made) if escaped else b'"%b"' % made

    def _cut(self, written: bytes, allowance: _Allowance, hit: int) -> int:
        """Where a long string has more places than may be looked at: what follows need not be decoded. 0: nowhere.

        It is for strings outside of ASCII, which take ten times as long to decode as to search.
        """
        if len(written) < _LONG_STRING or written.isascii():
            return 0
        at = max(0, hit)
        for _ in range(allowance.places + 1):
            found = self._look.search(written, at)
            if found is None:
                return 0
            at = found.start() + 1
        # Not inside of an escape.
        cut = at - 1
        while (escape := written.rfind(b"\\", max(1, cut - _LONGEST_ESCAPE), cut)) >= 0:
            cut = escape
        return cut

    def _nested(self, text: bytes, allowance: _Allowance, depth: int, first: re2._Match | None) -> bytes:
        """JSON inside of a text without secrets; hidden as a whole where it is too deep or has too many places."""
        if depth >= NESTING:
            return HIDDEN.encode()
        try:
            return self._json(text, allowance, depth + 1, first)
        except _TooManyPlaces:
            return HIDDEN.encode()

    def _coarsely(self, data: bytes, allowance: _Allowance, level: int = 0) -> bytes:
        """JSON whose upper levels are kept. Below, every value that may hold a secret is hidden as a whole."""
        head = data[:1]
        if head not in (b"[", b"{", b'"'):
            # A number or a word; at the top perhaps no JSON at all.
            return data if level else _HIDDEN_VALUE
        if level >= _KEPT_LEVELS or head == b'"' or (level > 1 and len(data) > _KEPT_BYTES):
            return _HIDDEN_VALUE
        if not level and data.startswith(b"[{") and data.endswith(b"}]"):
            # A row alone, as most are: no need to read it once for its end, and again for its members.
            with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
                return b"[%b]" % self._coarse_object(_members(data[1:-1]), len(data), allowance, 1)
        try:
            if head == b"{":
                return self._coarse_object(_members(data), len(data), allowance, level)
            values = _elements(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return _HIDDEN_VALUE
        if len(data) < _ELEMENT_BYTES * (len(values) - _KEPT_ELEMENTS):
            return _HIDDEN_VALUE
        return b"[%b]" % self._coarse_values(values, None, allowance, level)

    def _coarse_object(self, members: Mapping[str, msgspec.Raw], size: int, allowance: _Allowance, level: int) -> bytes:
        if size < _MEMBER_BYTES * (len(members) - _KEPT_ELEMENTS):
            return _HIDDEN_VALUE
        written = [b"%b:%b" % (_encode(name), bytes(value)) for name, value in members.items()]
        return b"{%b}" % self._coarse_values(written, list(members), allowance, level)

    def _coarse_values(
        self, values: Sequence[bytes], names: Sequence[str] | None, allowance: _Allowance, level: int
    ) -> bytes:
        """Elements of an array, or members of an object with their `names`, joined. Only those with a hit change."""
        data = b",".join(values)
        ends = list(accumulate(len(value) + 1 for value in values))
        every = not self._matches_no_pattern(data)
        pieces: list[bytes] = []
        kept = at = 0
        while at < len(data):
            found = None if every else self._look.search(data, at)
            if found is None and not every:
                break
            index = bisect_right(ends, at if found is None else found.start())
            start, end = ends[index - 1] if index else 0, ends[index] - 1
            allowance.values -= 1
            if allowance.values < 0:
                # In an object it needs a name.
                pieces += data[kept:start], _HIDDEN_VALUE if names is None else _HIDDEN_MEMBER
                kept = len(data)
                break
            value = data[start:end]
            pieces += (
                data[kept:start],
                self._coarsely(value, allowance, level + 1)
                if names is None
                else self._coarse_member(names[index], value, allowance, level + 1),
            )
            kept, at = end, end + 1
        pieces.append(data[kept:])
        return b"".join(pieces)

    def _coarse_member(self, name: str, member: bytes, allowance: _Allowance, level: int) -> bytes:
        value = member[len(_encode(name)) + 1 :]
        if value[:1] == b'"' and _is_secret_name(name):
            value = _HIDDEN_VALUE
        elif self._look.search(value) is not None or not self._matches_no_pattern(value):
            value = self._coarsely(value, allowance, level)
        shown = self._hidden(name.encode(), allowance)
        return b"%b:%b" % (_encode(shown.decode("utf-8", "replace")), value)


Attribute = str | int | float | bool | list[str]
"""What an attribute of a span or a row may be."""


def _without(text: bytes, spans: list[tuple[int, int]], sign: bytes) -> bytes:
    """The text with one sign in the place of all spans that touch."""
    pieces: list[bytes] = []
    kept = 0
    for start, end in _merged(spans):
        pieces += text[kept:start], sign
        kept = end
    pieces.append(text[kept:])
    return b"".join(pieces)


def _text_without(text: str, data: bytes, spans: list[tuple[int, int]]) -> str:
    """As `_without`, of the text whose UTF-8 is `data`. The longest piece is not decoded again but cut out."""
    ends = [0, *chain.from_iterable(_merged(spans)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(ends)]
    longest = max(range(len(pieces)), key=lambda index: len(pieces[index]))
    if longest % 2:  # every second one is a secret
        return HIDDEN.join(map(_decoded, pieces[::2]))
    texts = [_decoded(piece) for index, piece in enumerate(pieces) if index != longest]
    before, after = sum(map(len, texts[:longest])), sum(map(len, texts[longest:]))
    texts.insert(longest, text[before : len(text) - after])
    return HIDDEN.join(texts[::2])


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # a pattern of the user's has matched a part of a surrogate
        return data.decode("utf-8", "replace")


def _unescaped(written: bytes) -> bytes:
    """The UTF-8 that a string of JSON writes. Raises DecodeError, or ValueError."""
    if written.isascii() or b"\\u" in written:
        return _decode_text(written).encode()
    # As Latin-1 each byte is a character: no time goes to reading UTF-8 and writing it again.
    text: str = _decode_bytes(written.decode("latin-1"))
    return text.encode("latin-1")


def _escaped(text: bytes) -> bytes:
    """A string of JSON that writes this UTF-8."""
    if text.isascii():
        return _encode(text.decode())
    return json.dumps(text.decode("latin-1"), ensure_ascii=False).encode("latin-1")


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans in order, those that touch or overlap as one."""
    first, last = -1, -1
    for start, end in sorted(spans):
        if start > last:
            if first >= 0:
                yield first, last
            first = start
        last = max(last, end)
    if first >= 0:
        yield first, last


def _in_lines(patterns: Sequence[re2._Regexp]) -> re2._Regexp | None:
    """A pattern that finds a match among lines wherever one of these matches a line by itself, or None."""
    anyone = "|".join(f"(?:{pattern.pattern})" for pattern in patterns)
    if not anyone or _OUTER_ANCHOR.search(anyone):
        return None
    try:
        return re2.compile(f"(?m:{anyone})", _text_options())
    except re2.error:  # two groups of one name, or too large together
        return None


def _text_options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options


def _string_around(data: bytes, at: int, look: int) -> tuple[int, int] | None:
    """The string that is open at `look`, or None. `at` is between strings."""
    if data.find(b"\\", at, look) < 0:
        start = data.rfind(b'"', at, look) if data.count(b'"', at, look) % 2 else look
    else:
        for _ in range(_HOPS):
            start = data.find(b'"', at, look)
            if start < 0:
                return None
            end = _string_end(data, start)
            if end > look:
                return start, end
            at = end
        start = _TO_STRING.match(data, at, look).end()
    return (start, _string_end(data, start)) if start < look else None


def _string_end(data: bytes, start: int) -> int:
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
    string = _REST_OF_STRING.match(data, at)
    return len(data) if string is None else string.end()


def _names_secret(written: bytes) -> bool:
    if len(written) > _LONGEST_NAME and len(written.translate(None, b"-_")) > _LONGEST_NAME:
        return False
    try:
        return _is_secret_name(_decode_text(written))
    except (msgspec.DecodeError, UnicodeError):
        return False


def _is_secret_name(name: str) -> bool:
    return name.isascii() and name.lower().replace("_", "").replace("-", "") in SECRET_MEMBERS


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values of variables that are named like keys, and the passwords in URLs of all others."""
    found = []
    for name, value in environ.items():
        if _KEY_VARIABLE.fullmatch(name):
            if not value.isdecimal():  # MAX_TOKEN=100000000 is a number
                found.append(value.strip())
        elif "://" in value:
            found += _URL_PASSWORD.findall(value)
    return found


def patterns_of(text: str) -> list[re2._Regexp]:
    """Regular expressions of RE2's syntax with white space between them. Raises ConfigurationError for a wrong one."""
    patterns = []
    for each in text.split():
        try:
            pattern = re2.compile(each, _text_options())
        except re2.error as error:
            reason = error.args[0] if error.args else error
            if isinstance(reason, bytes):
                reason = reason.decode("utf-8", "replace")
            raise ConfigurationError(
                f"WEFT_REDACT={each!r}: not a regular expression that RE2 takes: {reason}. RE2 has no lookaround and "
                "no backreferences"
            ) from None
        if pattern.search("") is not None:
            raise ConfigurationError(f"WEFT_REDACT={each!r}: matches nothing at all, so everywhere; make it longer")
        patterns.append(pattern)
    return patterns


def redactor() -> Redactor:
    """The one of the app whose code runs here; elsewhere, one that knows this process's environment."""
    return _HERE.get() or _of_process()


def kept(text: str, longest: int, *, end: bool = False) -> str:
    """Text that JSON can hold; of a long one the start, or the `end`. Secrets go before it is cut."""
    if len(text) > longest:
        text = redactor().end(text)[-longest:] if end else redactor().start(text)[:longest]
    return text.encode(errors="replace").decode()


@contextmanager
def use(redactor: Redactor) -> Iterator[None]:
    """Make this the one that `redactor` returns, for this task and those that it starts."""
    token = _HERE.set(redactor)
    try:
        yield
    finally:
        _HERE.reset(token)


_HERE: ContextVar[Redactor | None] = ContextVar("weft_redactor", default=None)


@cache
def _of_process() -> Redactor:
    return Redactor.from_environment(os.environ, os.environ.get("WEFT_REDACT", ""))


def _is_json(data: bytes) -> bool:
    try:
        _check(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


Redact = Callable[[bytes], bytes]
"""As `Redactor.data`."""
