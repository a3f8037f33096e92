"""Takes secrets out of what is kept or shown: rows of the trajectory, errors, dead letters, log lines, spans.

What is taken out, `***` stands in its place:

- values of the environment's variables that are named like a key (`OPENAI_API_KEY`, `*_TOKEN`, `*_SECRET`, …), and
  passwords of URLs in any variable; what the process has learned since, as a key that an app gives in its code;
- text that looks like a key of a known service, a bearer token, an `Authorization` header, a password in a URL;
- JSON members that are named like one (`api_key`, `password`, `access_token`, …), where their value is text;
- what the user's own patterns match (`WEFT_REDACT`).

Text is hostile: whatever it holds, the time is linear in its bytes and about that of a few searches. RE2 takes one look
at everything (`secret_search.py`). Only places that it finds are looked at closely, a bounded number of each payload.
After those, the rest of the text is hidden (`secret_search.py`), and of JSON every value that may hold a secret
(`json_redaction.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain, pairwise

import re2

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.json_redaction import JsonRedaction
from runtime_core.telemetry.secret_search import HIDDEN, Allowance, SecretSearch, merged, text_options

_KEY_VARIABLE = re.compile(
    r"(?:.*_)?(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"://[^\s:/@\"'<>]*:([^\s/@\"'<>]+)@")  # for variables, which are the user's own

READ_CHARACTERS = 65_536
"""How much of a long text is read where only its start or its end is kept."""
CUT_MARGIN = 4_096
"""Characters beside such a cut that are left out: half of a secret there looks like no secret."""


class Redactor:
    """What a process knows of secrets, and how it takes them out. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re2._Regexp] = ()) -> None:
        self._search = SecretSearch(secrets, patterns)
        self._json = JsonRedaction(self._search)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], patterns: str = "") -> Redactor:
        """Knows the variables that are named like keys; `patterns` as `patterns_of` takes them."""
        return cls(secrets_of(environ), patterns_of(patterns))

    def learn(self, secret: str | None) -> None:
        """Take this value out too from now on, as a key that the code gives; one under 8 characters is left alone."""
        self._search.learn(secret)

    def text(self, text: str) -> str:
        """The text without secrets; the same object where it has none."""
        data = text.encode("utf-8", "surrogatepass")
        first = self._search.look.search(data)
        if first is None and not self._search.patterns:
            return text
        spans = self._search.spans(data, Allowance(), len(data) if first is None else first.start())
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
        first = self._search.look.search(data)
        if first is None and (not self._search.patterns or self._search.matches_no_pattern(data)):
            return data
        return self._json.data(data, first)

    def rows(self, data: bytes) -> bytes:
        """Rows of the trajectory, a JSON array, without secrets: however many they are, each stays a row."""
        first = self._search.look.search(data)
        if first is None and (not self._search.patterns or self._search.matches_no_pattern(data)):
            return data
        return self._json.rows(data, first)

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


Attribute = str | int | float | bool | list[str]
"""What an attribute of a span or a row may be."""


def _text_without(text: str, data: bytes, spans: list[tuple[int, int]]) -> str:
    """The text without these spans of `data`, its UTF-8. The longest piece is not decoded again but cut out."""
    ends = [0, *chain.from_iterable(merged(spans)), len(data)]
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
            pattern = re2.compile(each, text_options())
        except re2.error as error:
            reason = error.args[0] if error.args else error
            if isinstance(reason, bytes):
                reason = reason.decode("utf-8", "replace")
            raise ConfigurationError(
                f"WEFT_REDACT={each!r}: not a regular expression that RE2 takes: {reason}. RE2 has no lookaround and "
                "no backreferences"
            ) from None
        if pattern.search("") is not None:
            raise ConfigurationError(
                f"WEFT_REDACT={each!r}: matches the empty text, so it would hide everything; make it longer"
            )
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
