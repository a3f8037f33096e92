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

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

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
_ELEMENT_BYTES = 64
"""An array with many elements that are on average shorter than this is hidden as a whole; rows are longer."""

_COLON = re.compile(rb"\s*+:\s*+")

_REST_OF_STRING = re2.compile(rb'(?s:(?:[^"\\]|\\.)*")', bytes_options())
_HOPS = 64
"""How many escaped quotes, and backslashes before one, are looked at one by one before RE2 goes over the rest."""
_BACKSLASH = ord("\\")

_TO_STRING = re2.compile(rb'(?s:[^"]|"(?:[^"\\]|\\.)*")*', bytes_options())
"""Goes over whole strings and what is between them: up to the start of a string that is still open."""

_LINES = bytes.maketrans(b'"', b"\n")
_OUTER_ANCHOR = re.compile(r"\\[Az]|\(\?[a-zA-Z]*-")

_decode_text = msgspec.json.Decoder(str).decode
_check = msgspec.json.Decoder(msgspec.Raw).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_HIDDEN_VALUE = _encode(HIDDEN)


class _Allowance:
    """What one payload may still cost."""

    __slots__ = ("escapes", "places", "strings")

    def __init__(self) -> None:
        self.escapes = ESCAPES
        self.places = PLACES
        self.strings = STRINGS


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
        self._compiled: re2._Regexp | None = None
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
        self._compiled = None

    def text(self, text: str) -> str:
        """The text without secrets; the same object where it has none."""
        data = text.encode("utf-8", "surrogatepass")
        first = self._look.search(data)
        if first is None and not self._patterns:
            return text
        made = self._hidden(data, _Allowance(), len(data) if first is None else first.start())
        return text if made is data else made.decode("utf-8", "surrogatepass")

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
        if first is None and self._matches_no_pattern(data):
            return data
        try:
            return self._json(data, _Allowance(), 0, first)
        except _TooManyPlaces:
            return self._coarsely(data.strip())

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

    @property
    def _look(self) -> re2._Regexp:
        if self._compiled is None:
            self._compiled = look_for(self._secrets)
        return self._compiled

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
        for pattern in self._patterns:
            for found in pattern.finditer(text):
                if allowance.places <= 0:
                    spans.append((found.start(), len(text)))
                    break
                allowance.places -= 1
                if found.end() > found.start():
                    spans.append(found.span())
        return _without(text, spans) if spans else text

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
        # With escapes the look may find a letter that is written as a number, in the middle of a secret.
        at = 0 if escaped else max(0, hit)
        text = written[1:-1] if written.endswith(b'"', 1) else written[1:]
        if escaped:
            allowance.escapes -= written.count(b"\\")
            if allowance.escapes < 0:
                return _HIDDEN_VALUE
            try:
                text = _decode_text(written).encode()
            except (msgspec.DecodeError, UnicodeError):
                # Another program wrote half of a surrogate pair, or the data is cut off.
                return _HIDDEN_VALUE
        if text[:1] in (b"{", b"[") and not named and _is_json(text):
            if depth < NESTING:
                made = self._json(text, allowance, depth + 1, self._look.search(text, at))
            else:
                made = text if self._look.search(text) is None and not self._patterns else HIDDEN.encode()
        else:
            made = self._hidden(text, allowance, at)
        if made is text:
            return None
        return _encode(made.decode("utf-8", "replace")) if escaped else b'"%b"' % made

    def _coarsely(self, data: bytes, level: int = 0) -> bytes:
        """JSON whose upper levels are kept. Below, every value that may hold a secret is hidden as a whole."""
        head = data[:1]
        if head not in (b"[", b"{", b'"'):
            # A number or a word; at the top perhaps no JSON at all.
            return data if level else _HIDDEN_VALUE
        # Two looks at each byte, however deep it is.
        if level in (1, 2) and self._look.search(data) is None and self._matches_no_pattern(data):
            return data
        if level >= _KEPT_LEVELS or head == b'"' or (level > 1 and len(data) > _KEPT_BYTES):
            return _HIDDEN_VALUE
        try:
            names, values = _parts(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return _HIDDEN_VALUE
        if len(data) < _ELEMENT_BYTES * (len(values) - _KEPT_ELEMENTS):
            return _HIDDEN_VALUE
        shown = [
            _HIDDEN_VALUE
            if name is not None and value[:1] == b'"' and _is_secret_name(name)
            else self._coarsely(value, level + 1)
            for name, value in zip(names, map(bytes, values), strict=True)
        ]
        if head == b"[":
            return b"[%b]" % b",".join(shown)
        named = zip(names, shown, strict=True)
        return b"{%b}" % b",".join([_encode(self.text(name or "")) + b":" + value for name, value in named])


Attribute = str | int | float | bool | list[str]
"""What an attribute of a span or a row may be."""


def _without(text: bytes, spans: list[tuple[int, int]]) -> bytes:
    """The text with one sign in the place of all spans that touch."""
    pieces: list[bytes] = []
    kept = 0
    hidden = -1
    for start, end in sorted(spans):
        if start > hidden:
            pieces += text[kept:start], HIDDEN.encode()
        hidden = kept = max(kept, end)
    pieces.append(text[kept:])
    return b"".join(pieces)


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


def _parts(data: bytes) -> tuple[Sequence[str | None], Sequence[msgspec.Raw]]:
    """Names (of an object) and values of a JSON array or object."""
    if data[:1] == b"[":
        values = _elements(data)
        return [None] * len(values), values
    members = _members(data)
    return list(members), list(members.values())


def _names_secret(written: bytes) -> bool:
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
