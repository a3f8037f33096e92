"""Redacts secrets in everything that Weft stores or shows: trajectory rows, errors, dead letters, log lines, spans.

`***` replaces:

- values of environment variables with names like `OPENAI_API_KEY`, `*_TOKEN` or `*_SECRET`; passwords of URLs in any
  variable; and secrets that the process learns later, such as a key in an app's code;
- text that looks like a key of a known service, a bearer token, an `Authorization` header or a password in a URL;
- text values of JSON members with names like `api_key`, `password` or `access_token`;
- matches of the user's own patterns (`WEFT_REDACT`).

Text may be hostile, so the time is linear in its size, whatever it contains. First RE2 scans everything for candidates
(`secret_search.py`). Then slower rules check a bounded number of them. If there are more, the rest of the text is
hidden (`secret_search.py`), and in JSON every value that may hold a secret (`json_redaction.py`).
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
"""How much of a long text is read if only its start or its end is kept."""
CUT_MARGIN = 4_096
"""Characters dropped next to such a cut: no rule recognizes half of a secret."""


class Redactor:
    """Redacts the secrets that a process knows, and text that looks like one. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re2._Regexp] = ()) -> None:
        self._search = SecretSearch(secrets, patterns)
        self._json = JsonRedaction(self._search)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], patterns: str = "") -> Redactor:
        """Return a redactor for the variables with names like keys. `patterns` is a text for `patterns_of`."""
        return cls(secrets_of(environ), patterns_of(patterns))

    def learn(self, secret: str | None) -> None:
        """Redact this value too from now on, such as a key in the app's code. Values under 8 characters are ignored."""
        self._search.learn(secret)

    def text(self, text: str) -> str:
        """Return the text without secrets; the same object if it has none."""
        data = text.encode("utf-8", "surrogatepass")
        first = self._search.candidate.search(data)
        if first is None and not self._search.patterns:
            return text
        spans = self._search.spans(data, Allowance(), len(data) if first is None else first.start())
        return _text_without(text, data, spans) if spans else text

    def start(self, text: str) -> str:
        """Return the text without secrets; of a long text only the start. Redact before you shorten a text yourself."""
        shown = self.text(text[:READ_CHARACTERS])
        cut = len(text) > READ_CHARACTERS and not shown.endswith(HIDDEN)
        return shown[:-CUT_MARGIN] if cut else shown

    def end(self, text: str) -> str:
        """Return the text without secrets, like `start`; of a long text only the end."""
        shown = self.text(text[-READ_CHARACTERS:])
        return shown[CUT_MARGIN:] if len(text) > READ_CHARACTERS else shown

    def data(self, data: bytes) -> bytes:
        """Return JSON without secrets in its strings, otherwise unchanged; the same object if it has none.

        This includes JSON inside a string, such as the arguments of a tool call.
        """
        first = self._search.candidate.search(data)
        if first is None and (not self._search.patterns or self._search.matches_no_pattern(data)):
            return data
        return self._json.data(data, first)

    async def rows(self, data: bytes) -> bytes:
        """Return trajectory rows (a JSON array) without secrets. However many secrets there are, each row stays a row,
        and other work of the event loop runs between them."""
        first = self._search.candidate.search(data)
        if first is None and (not self._search.patterns or self._search.matches_no_pattern(data)):
            return data
        return await self._json.rows(data, first)

    def attributes(self, attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
        """Return the attributes of a span or a row without secrets."""
        return {
            name: self.text(value)
            if isinstance(value, str)
            else [self.text(each) for each in value]
            if isinstance(value, list)
            else value
            for name, value in attributes.items()
        }


Attribute = str | int | float | bool | list[str]
"""The value of an attribute of a span or a row."""


def _text_without(text: str, data: bytes, spans: list[tuple[int, int]]) -> str:
    """Return the text without these spans of `data`, its UTF-8. The longest piece is copied from the text, not decoded
    again."""
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
    except UnicodeDecodeError:  # a user's pattern has matched a part of a surrogate
        return data.decode("utf-8", "replace")


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables with names like keys, and the passwords in URLs of all others."""
    found = []
    for name, value in environ.items():
        if _KEY_VARIABLE.fullmatch(name):
            if not value.isdecimal():  # MAX_TOKEN=100000000 is a number
                found.append(value.strip())
        elif "://" in value:
            found += _URL_PASSWORD.findall(value)
    return found


def patterns_of(text: str) -> list[re2._Regexp]:
    """Parse regular expressions in RE2's syntax, separated by white space. Raises ConfigurationError for an invalid
    one."""
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
    """Return the redactor of the app whose code runs here; elsewhere one that knows this process's environment."""
    return _HERE.get() or _of_process()


def kept(text: str, longest: int, *, end: bool = False) -> str:
    """Return text that JSON can hold; of a long text the start, or the `end`. A text is redacted before it is cut."""
    if len(text) > longest:
        text = redactor().end(text)[-longest:] if end else redactor().start(text)[:longest]
    return text.encode(errors="replace").decode()


@contextmanager
def use(redactor: Redactor) -> Iterator[None]:
    """Make `redactor` return this one in this asyncio task and in tasks that it starts."""
    token = _HERE.set(redactor)
    try:
        yield
    finally:
        _HERE.reset(token)


_HERE: ContextVar[Redactor | None] = ContextVar("weft_redactor", default=None)


@cache
def _of_process() -> Redactor:
    return Redactor.from_environment(os.environ, os.environ.get("WEFT_REDACT", ""))
