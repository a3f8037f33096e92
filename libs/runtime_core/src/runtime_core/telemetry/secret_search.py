"""Finds the secrets of one text: what is known as one, what looks like one, what the user's own patterns match.

The look of `secret_patterns.py` goes over everything. At most `PLACES` places that it finds in a payload are matched
closely, and from the next one on the rest of the text counts as a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import re2

from runtime_core.telemetry.secret_patterns import LONGEST_WORD, RESTS, RULE, end_of_word, look_for

HIDDEN = "***"
"""What stands in the place of a secret."""

SHORTEST_SECRET = 8
"""Characters. A shorter value of a variable is too likely to be a word of its own, as `test`."""

PLACES = 128
"""How many places of one payload are looked at closely. Beyond them all that may be a secret is hidden."""

_SIGN = HIDDEN.encode()
_LINES = bytes.maketrans(b'"', b"\n")
_OUTER_ANCHOR = re.compile(r"\\[Az]|\(\?[a-zA-Z]*-")


class Allowance:
    """What one payload may still cost."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places = PLACES


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


class SecretSearch:
    """What a process knows of secrets. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re2._Regexp] = ()) -> None:
        self.patterns = tuple(patterns)
        self._secrets: tuple[str, ...] = ()
        self._by_head: dict[bytes, list[bytes]] = {}
        self._lines = _in_lines(self.patterns)
        for secret in secrets:
            self.learn(secret)

    def learn(self, secret: str | None) -> None:
        """Take this value out too from now on, as a key that the code gives; one under 8 characters is left alone."""
        if not secret or len(secret) < SHORTEST_SECRET or secret in self._secrets:
            return
        self._secrets = (*self._secrets, secret)
        known = secret.encode("utf-8", "surrogatepass")
        # The longest first: a shorter one may be a part of it.
        same = self._by_head.get(known[:SHORTEST_SECRET], [])
        self._by_head[known[:SHORTEST_SECRET]] = sorted((*same, known), key=len, reverse=True)
        self.__dict__.pop("look", None)

    @cached_property
    def look(self) -> re2._Regexp:
        """Finds the places to look at closely. Made at its first use, and again when a secret was learned."""
        return look_for(self._secrets)

    def matches_no_pattern(self, data: bytes) -> bool:
        """Whether no pattern of the user's can match a string of this JSON. False also where that is not certain."""
        if not self.patterns:
            return True
        if self._lines is None or b"\\" in data:
            return False
        # Each string without escapes is a line of its own, once its quotes are line breaks.
        return self._lines.search(data.translate(_LINES)) is None

    def hidden(self, text: bytes, allowance: Allowance, at: int = 0) -> bytes:
        """A text without secrets; the same object where it has none. Before `at` the look finds nothing."""
        spans = self.spans(text, allowance, at)
        return _without(text, spans) if spans else text

    def spans(self, text: bytes, allowance: Allowance, at: int) -> list[tuple[int, int]]:
        """Where a text has secrets. Before `at` the look finds nothing."""
        spans: list[tuple[int, int]] = []
        look = self.look
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
        for pattern in self.patterns:
            for found in pattern.finditer(text):
                if allowance.places <= 0:
                    spans.append((found.start(), len(text)))
                    break
                allowance.places -= 1
                if found.end() > found.start():
                    spans.append(found.span())
        return spans


def _without(text: bytes, spans: list[tuple[int, int]]) -> bytes:
    """The text with one `***` in the place of all spans that touch."""
    pieces: list[bytes] = []
    kept = 0
    for start, end in merged(spans):
        pieces += text[kept:start], _SIGN
        kept = end
    pieces.append(text[kept:])
    return b"".join(pieces)


def merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
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
        return re2.compile(f"(?m:{anyone})", text_options())
    except re2.error:  # two groups of one name, or too large together
        return None


def text_options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options
