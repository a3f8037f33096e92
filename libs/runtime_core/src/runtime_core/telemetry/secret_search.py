"""Finds the secrets in a text: known secrets, text that looks like one, and matches of the user's patterns.

One pattern (`candidate_pattern`) scans everything for the starts of possible secrets. Slower rules then check at most
`MAX_CANDIDATES` of them per payload. If there are more, the rest of the text counts as a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import re2

LOOKAHEAD = 256
"""Bytes that a rule reads to decide whether a word is a key. A longer word always counts as one."""

_LONGEST_NAME = 64
"""More bytes than the longest word that `RULE` matches before a secret."""

LONGEST_WORD = 512
"""Bytes of a word that a rule matches. A longer word is hidden up to the next space or quote."""

SECRET_MEMBERS = frozenset(
    (
        *("apikey", "xapikey", "apitoken", "authtoken", "accesstoken", "refreshtoken", "sessiontoken", "bearertoken"),
        *("accesskey", "secretkey", "privatekey", "secretaccesskey", "authorization", "proxyauthorization"),
        *("password", "passwd", "passphrase", "passcode", "pwd", "pw", "secret", "clientsecret", "idtoken"),
        *("userpassword", "dbpassword", "newpassword", "oldpassword", "apisecret"),
    )
)
"""Names of JSON members whose text is a secret, in lower case and without `-` and `_`."""

_SPACE = rb"(?:[\x00-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
# A limited number of spaces: `re` takes 30 ns for one outside ASCII. `_end_of_far_value` skips more.
_SPACES = _SPACE.replace(b"]|", b"]{1,16}+|", 1) + rb"{0,16}+"
# All forms of a space in JSON, even in JSON inside a text. A byte outside ASCII may be part of one.
_GAP = rb"(?:[\x00-\x20\x80-\xff]|\\+[nrtfb]|\\+u[0-9a-fA-F]{4})"
# Not `\s` and `\d`: inside a class they make `re` three times slower, since it looks up plain classes in a table.
_WHITE = rb" \t\n\r\f\v"
_QUOTE = rb"(?:\\*\"|\\+u0022)"
# No letter may precede a key, except the last one of an escape in code, JSON, a URL or a terminal sequence.
_ESCAPES = (rb"\\[nrtfb]", rb"\\x[0-9a-fA-F]{2}", rb"\\u[0-9a-fA-F]{4}", rb"%[0-9a-fA-F]{2}", rb"[0-9;\[]m")
_NO_LETTER_BEFORE = rb"(?:\b|" + b"|".join(_ESCAPES) + rb")"
_AFTER_ESCAPE = b"|".join(rb"(?<=%b)" % escape for escape in _ESCAPES)
# RE2 reads each match of a candidate three times, so a long gap counts as a separate match, and `*?` ends it early.
_VALUE_FOLLOWS = rb"(?:['\"\\]|\\+u00[0-9a-fA-F]{2})*?(?:" + _GAP + rb"{0,15}(?:[:=,]|\\+u00)|" + _GAP + rb"{16})"
_COLON_FOLLOWS = rb"(?:" + _GAP + rb"{0,15}:|" + _GAP + rb"{16})"
_KEY_WORDS = rb"api[-_]?key|access_token|client_secret|secret_access_key|password|passwd|passphrase"

# Each alternative is short, or cannot begin again inside itself, so text between two hits is read once.
_CANDIDATE = b"|".join(
    (
        rb":\\*/\\*/[^\s:/@\"'<>]*:[^\s/@\"'<>]+@",
        # A few bytes of each key suffice: longer counters make RE2's automaton large.
        _NO_LETTER_BEFORE + rb"(?:sk-[A-Za-z0-9_-]{4}|hf_[A-Za-z0-9]{4})",
        rb"gh[pousr]_[A-Za-z0-9]{4}|github_pat_[A-Za-z0-9_]{4}|glpat-[A-Za-z0-9_-]{4}|xox[abeoprs]-[A-Za-z0-9-]{4}",
        rb"A[KS]IA[A-Z0-9]{4}|AIza[A-Za-z0-9_-]{4}|eyJ[A-Za-z0-9_-]{4}",
        rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
        rb"(?i:bearer)(?:" + _GAP + rb"{1,15}[A-Za-z0-9._~+/=\\-]{8}|" + _GAP + rb"{16})",
        rb"(?i:authorization)" + _VALUE_FOLLOWS,
        rb"(?i:" + _KEY_WORDS + rb")" + _VALUE_FOLLOWS,
        rb"(?:['\"]|u00(?:22|27))(?i:pw|pwd)" + _VALUE_FOLLOWS,
        # Without the backslashes before the quote: otherwise each of them would begin a match of all that follow.
        rb"(?:\"|u0022)[-_]*(?i:"
        + b"|".join(rb"[-_]*".join(bytes([byte]) for byte in name.encode()) for name in sorted(SECRET_MEMBERS))
        + rb")[-_]*"
        + _QUOTE
        + _COLON_FOLLOWS,
        # A letter or digit written as a number: no encoder does that, and it would hide all of the above.
        rb"\\u00(?:2[0-13-589acdefACDEF]|3[0-9abAB]|4|5[0-9abdefABDEF]|6[1-9a-fA-F]|7[0-9a-eA-E])",
    )
)

_DIGIT_AHEAD = (
    # The second class also accepts a word that is too long to be read to its end.
    rb"(?=[A-Za-z%(more)b]{0,%(most)d}+[A-Za-z0-9%(more)b])"
)


def _digit_ahead(more: bytes) -> bytes:
    return _DIGIT_AHEAD % {b"more": more, b"most": LOOKAHEAD - 1}


RULE = re.compile(
    b"|".join(
        (
            # A digit is required if words with hyphens look the same.
            rb"(?:(?<![A-Za-z0-9_])|ESCAPE)(sk-" + _digit_ahead(rb"_-") + rb"[A-Za-z0-9_-]{16,WORD}+)",
            rb"(?:(?<![A-Za-z0-9_])|ESCAPE)(hf_[A-Za-z0-9]{30,WORD}+)",
            rb"(gh[pousr]_[A-Za-z0-9]{30,WORD}+|github_pat_[A-Za-z0-9_]{22,WORD}+|glpat-[A-Za-z0-9_-]{20,WORD}+)",
            rb"(xox[abeoprs]-[A-Za-z0-9-]{10,WORD}+|AIza[A-Za-z0-9_-]{35})",
            rb"((?:(?<![A-Za-z0-9])|AFTER)A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9]))",
            rb"(?P<token>eyJ[A-Za-z0-9_-]{8,4096}+\.eyJ[A-Za-z0-9_-]{8})",
            rb"(?P<private_key>-----BEGIN [A-Z ]*PRIVATE KEY-----)",
            # More spaces than `SPACES`, before or after the separator.
            rb"(?:BEARER|AUTHORIZATION|(?:NAME)SPACES[:=,])(?P<far_value>SPACES(?=SPACE))",
            rb"(?:NAME)(?P<far_separator>SPACES(?=SPACE))",
            rb"BEARER(?=SPACE)SPACES(" + _digit_ahead(rb"._~+/=-") + rb"[A-Za-z0-9._~+/=-]{8,WORD}+)",
            rb"AUTHORIZATION(?=SPACE)SPACES([^%b'\",;]{6,WORD}+)" % _WHITE,
            rb"(?:(?i:%b)\\*+['\"]?|(?P<quote>['\"])(?i:pw|pwd)\\*+(?P=quote))SPACES[:=,]SPACESb?" % _KEY_WORDS
            # In quotes, which may be escaped; or bare, as in a query or a header, but then with a digit: `password:
            # required` is not a secret.
            + rb"('[^']{4,}+'|\"[^\"]{4,}+\"|\\++['\"][^'\"\\]{4,WORD}+"
            + rb"|(?=[^%(end)b0-9]{0,%(ahead)d}+[^%(end)b])[^%(end)b]{6,WORD}+)"
            % {b"end": _WHITE + rb"'\"&,;", b"ahead": LOOKAHEAD - 1},
        )
    )
    .replace(b"NAME", rb"(?i:authorization|%b)\\*+['\"]?|['\"](?i:pwd?)\\*+['\"]" % _KEY_WORDS)
    .replace(b"BEARER", rb"(?:(?<![A-Za-z0-9_])|AFTER)(?i:bearer)")
    .replace(
        b"AUTHORIZATION",
        rb"(?i:authorization)\\*+['\"]?SPACES[:=,]SPACESb?\\*+['\"]?(?i:basic|bearer|digest|token|apikey)",
    )
    .replace(b"SPACES", _SPACES)
    .replace(b"SPACE", _SPACE)
    .replace(b"WORD", b"%d" % LONGEST_WORD)
    .replace(b"ESCAPE", b"|".join(_ESCAPES))
    .replace(b"AFTER", _AFTER_ESCAPE)
)
"""Matches a secret at a candidate. The last matching group is the part to hide."""

_CHARACTERS = {"\n": b"n", "\r": b"r", "\t": b"t", "\f": b"f", "\b": b"b"}
_AS_IT_IS = re.compile(r"[A-Za-z0-9 _.~-]")
_SIGN_LENGTH = 64
"""Characters of a known secret that the candidate pattern contains."""


def bytes_options() -> re2.Options:
    """Return the options of a pattern for bytes, without groups."""
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.never_capture = True
    options.log_errors = False
    options.max_mem = 64 << 20
    return options


def candidate_pattern(secrets: Iterable[str]) -> re2._Regexp:
    """Return the pattern that finds every position where a secret may begin, in text and in JSON."""
    return re2.compile(b"|".join((_CANDIDATE, *map(_as_json_writes, secrets))), bytes_options())


_PRIVATE_KEY_END = re.compile(rb"-----END [A-Z ]{0,64}PRIVATE KEY-----")
_MAX_ENDS = 64
"""How many ends of another kind are skipped before the rest of the text counts as the key."""


def end_of_word(text: bytes, start: int) -> int:
    """Return the end of the word that begins at `start`: the next white space or quote."""
    return _end_of(_IN_WORD, text, start)


def _end_of_token(text: bytes, start: int) -> int:
    end = _end_of(_IN_TOKEN, text, start)
    return _end_of(_IN_TOKEN, text, end + 1) if text[end : end + 1] == b"." else end


def _end_of_private_key(text: bytes, start: int) -> int:
    for _ in range(_MAX_ENDS):
        start = text.find(b"-----END ", start)
        if start < 0:
            break
        if (end := _PRIVATE_KEY_END.match(text, start)) is not None:
            return end.end()
        start += 1
    return len(text)


def _end_of_far_value(text: bytes, start: int) -> int:
    """Return the end of two words, or texts in quotes: a secret may follow the word `Basic`, or the `b` of bytes."""
    end = start
    for _ in range(2):
        at = _end_of(_IN_GAP, text, end)
        quote = text[at : at + 1]
        closed = text.find(quote, at + 1) if quote in (b"'", b'"') else -1
        end = closed + 1 if closed > 0 else end_of_word(text, at)
    return end


def _end_of_far_separator(text: bytes, start: int) -> int:
    at = _end_of(_IN_SPACE, text, start)
    return _end_of_far_value(text, at) if text[at : at + 1] in (b":", b"=", b",") else NO_SECRET


NO_SECRET = 0

ENDS: dict[int, Callable[[bytes, int], int]] = {
    RULE.groupindex["token"]: _end_of_token,
    RULE.groupindex["private_key"]: _end_of_private_key,
    RULE.groupindex["far_value"]: _end_of_far_value,
    RULE.groupindex["far_separator"]: _end_of_far_separator,
}
"""Groups of `RULE` that match only the start of a secret, and the functions that find its end, or `NO_SECRET`."""

_ENDS_OF_WORDS = (end_of_word, _end_of_token)
_UNPLAIN = re.compile(rb"[\\\x00-\x20\x80-\xff]")
"""Matches the bytes of which `RULE` allows any number between a name and its secret."""
_FAR = frozenset((RULE.groupindex["far_value"], RULE.groupindex["far_separator"]))
FAR_COST = 3
"""How many more candidates a secret behind much white space costs: its end takes four reads."""


def _table(pattern: bytes) -> bytes:
    """Return a table for `bytes.translate`: 0 for each byte that the pattern matches, 1 for every other one."""
    return bytes(0 if re.fullmatch(pattern, bytes([byte])) else 1 for byte in range(256))


_IN_WORD = _table(rb"[^\s'\"]")
_IN_TOKEN = _table(rb"[A-Za-z0-9_-]")
_IN_SPACE = _table(rb"[\x00-\x20\x80-\xff]")
_IN_GAP = _table(rb"[\x00-\x20\x80-\xff:=,\\]")
_FIRST_CHUNK = 512
_LARGER_CHUNK = 8192


def _end_of(table: bytes, text: bytes, start: int) -> int:
    """Return the position of the first byte that is not in the table. Three times as fast as a search by RE2."""
    size = _FIRST_CHUNK
    while start < len(text):
        found = text[start : start + size].translate(table).find(1)
        if found >= 0:
            return start + found
        start += size
        size = _LARGER_CHUNK
    return len(text)


def _as_json_writes(secret: str) -> bytes:
    """Return a pattern for the beginning of a secret in all spellings of JSON, at any depth of JSON inside texts."""
    return b"".join(
        character.encode()
        if _AS_IT_IS.match(character) and character != "."
        else _escaped(character, first=position == 0)
        for position, character in enumerate(secret[:_SIGN_LENGTH])
    )


def _escaped_forms(secret: str) -> list[bytes]:
    """Return the secret as JSON writes it, once and twice, from where the candidate pattern finds it."""
    forms, latest = set[str](), {secret}
    for _ in range(2):
        latest = {json.dumps(form, ensure_ascii=ascii)[1:-1] for form in latest for ascii in (False, True)}
        forms |= latest
    if not (forms := forms - {secret}):
        return []
    written = [form.encode("utf-8", "surrogatepass") for form in sorted(forms)]
    pattern = re2.compile(_as_json_writes(secret), bytes_options())
    return [form[found.start() :] for form in written if (found := pattern.search(form)) is not None]


def _escaped(character: str, *, first: bool) -> bytes:
    # If the first character took all backslashes before it, each of them would begin a match of all that follow.
    any_number, some = (b"", rb"\\") if first else (rb"\\*", rb"\\+")
    written = re2.escape(character.encode("utf-8", "surrogatepass"))
    units = character.encode("utf-16-be", "surrogatepass").hex()
    numbers = rb"\\+".join(b"u%b" % units[at : at + 4].encode() for at in range(0, len(units), 4))
    short = rb"|%b%b" % (some, _CHARACTERS[character]) if character in _CHARACTERS else b""
    if character == "\\":
        written = rb"\\"
    return rb"(?:%b%b|(?i:%b%b)%b)" % (any_number, written, some, numbers, short)


HIDDEN = "***"
"""The replacement of a secret."""

SHORTEST_SECRET = 8
"""In characters. A shorter value of a variable is probably an ordinary word, such as `test`."""

MAX_CANDIDATES = 128
"""How many candidates of one payload are checked. Beyond them, everything that may be a secret is hidden."""

_SIGN = HIDDEN.encode()
_LINES = bytes.maketrans(b'"', b"\n")
_OUTER_ANCHOR = re.compile(r"\\[Az]|\(\?[a-zA-Z]*-")


class Allowance:
    """The remaining work for one payload."""

    __slots__ = ("candidates",)

    def __init__(self) -> None:
        self.candidates = MAX_CANDIDATES


class _HiddenParts:
    """Finds the part of a candidate that a rule hides.

    Reads to the end of a secret once, and not again from each candidate inside it.
    """

    __slots__ = ("_allowance", "_ends", "word_end")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._ends: dict[int, int] = {}
        self.word_end = 0
        """The end of the last long word. A secret that ends behind it begins near it: with a name, or a known one."""

    def by(self, text: bytes, found: re2._Match) -> tuple[int, int] | None:
        here, end = found.span()
        if text.startswith(b":", here):
            # A URL: the candidate pattern has matched it up to its `@`.
            colon = text.find(b":", here + 1, end)
            return (colon + 1, end - 1) if colon > 0 else None
        match = RULE.match(text, here)
        if match is None:
            return None
        group = match.lastindex or 0
        start, end = match.span(group)
        end_of_rest = ENDS.get(group)
        if end_of_rest is None and end - start >= LONGEST_WORD and text[start] not in b"'\"":
            end_of_rest = end_of_word
        if end_of_rest is not None:
            if end > self._ends.get(group, 0):
                self._ends[group] = end_of_rest(text, end)
                if group in _FAR:
                    self._allowance.candidates -= FAR_COST
            end = self._ends[group]
            if end == NO_SECRET:
                return None
            if end_of_rest in _ENDS_OF_WORDS and not _UNPLAIN.search(text, max(0, end - _LONGEST_NAME), end):
                self.word_end = end
        return start, end


class SecretSearch:
    """The secrets that a process knows. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re2._Regexp] = ()) -> None:
        self.patterns = tuple(patterns)
        self._secrets: tuple[str, ...] = ()
        self._by_head: dict[bytes, list[bytes]] = {}
        self._lines = _in_lines(self.patterns)
        self._longest = _LONGEST_NAME
        for secret in secrets:
            self.learn(secret)

    def learn(self, secret: str | None) -> None:
        """Redact this value, too, from now on, such as a key in an app's code. Ignores values under 8 characters."""
        if not secret or len(secret) < SHORTEST_SECRET or secret in self._secrets:
            return
        self._secrets = (*self._secrets, secret)
        for known in (secret.encode("utf-8", "surrogatepass"), *_escaped_forms(secret)):
            self._keep(known)
        self.__dict__.pop("candidate", None)

    def _keep(self, known: bytes) -> None:
        self._longest = max(self._longest, len(known))
        # Longest first: a shorter one may be a part of it.
        same = self._by_head.get(known[:SHORTEST_SECRET], [])
        self._by_head[known[:SHORTEST_SECRET]] = sorted((*same, known), key=len, reverse=True)

    @cached_property
    def candidate(self) -> re2._Regexp:
        """The pattern that finds candidates; compiled at its first use, and again after a secret was learned."""
        return candidate_pattern(self._secrets)

    def matches_no_pattern(self, data: bytes) -> bool:
        """Return whether no pattern of the user can match a string in this JSON; False if that is uncertain."""
        if not self.patterns:
            return True
        if self._lines is None or b"\\" in data:
            return False
        # With line breaks for quotes, each string without escapes becomes a line.
        return self._lines.search(data.translate(_LINES)) is None

    def hidden(self, text: bytes, allowance: Allowance, at: int = 0) -> bytes:
        """Return the text without secrets; the same object if it has none. There is no candidate before `at`."""
        spans = self.spans(text, allowance, at)
        return _without(text, spans) if spans else text

    def spans(self, text: bytes, allowance: Allowance, at: int) -> list[tuple[int, int]]:
        """Return the spans of the secrets in a text. There is no candidate before `at`."""
        spans: list[tuple[int, int]] = []
        candidate = self.candidate
        parts = _HiddenParts(allowance)
        while (found := candidate.search(text, at)) is not None:
            here = found.start()
            if allowance.candidates <= 0:
                spans.append((here, len(text)))
                break
            allowance.candidates -= 1
            at = here + 1
            for secret in self._by_head.get(text[here : here + SHORTEST_SECRET], ()):
                if text.startswith(secret, here):
                    spans.append((here, here + len(secret)))
                    break
            if (span := parts.by(text, found)) is not None:
                spans.append(span)
                if span[1] == len(text):
                    break
                at = max(at, parts.word_end - self._longest)
        for pattern in self.patterns:
            for found in pattern.finditer(text):
                if allowance.candidates <= 0:
                    spans.append((found.start(), len(text)))
                    break
                allowance.candidates -= 1
                if found.end() > found.start():
                    spans.append(found.span())
        return spans


def _without(text: bytes, spans: list[tuple[int, int]]) -> bytes:
    """Return the text with `***` in place of the spans, once for spans that touch."""
    pieces: list[bytes] = []
    kept = 0
    for start, end in merged(spans):
        pieces += text[kept:start], _SIGN
        kept = end
    pieces.append(text[kept:])
    return b"".join(pieces)


def merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the spans in order, merging those that touch or overlap."""
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
    """Return one pattern that finds a match in a text wherever one of these matches a whole line; None if
    impossible."""
    anyone = "|".join(f"(?:{pattern.pattern})" for pattern in patterns)
    if not anyone or _OUTER_ANCHOR.search(anyone):
        return None
    try:
        return re2.compile(f"(?m:{anyone})", text_options())
    except re2.error:  # two groups with the same name, or too large together
        return None


def text_options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    return options
