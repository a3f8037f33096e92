"""The rules of an earlier release. Later ones may only add to them: what they hide stays hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator

LOOKAHEAD = 256
LONGEST_WORD = 512

_SPACE = rb"(?:[\x00-\x20]++|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
_WHITE = rb" \t\n\r\f\v"
_KEY_WORDS = rb"api[-_]?key|access_token|client_secret|secret_access_key|password|passwd|passphrase"

_DIGIT_AHEAD = (
    # Or a word that is too long to be read to its end.
    rb"(?=[A-Za-z%(more)b]{0,%(most)d}+[A-Za-z0-9%(more)b])"
)


def _digit_ahead(more: bytes) -> bytes:
    return _DIGIT_AHEAD % {b"more": more, b"most": LOOKAHEAD - 1}


RULE = re.compile(
    b"|".join(
        (
            # A digit is required where words with hyphens look the same.
            rb"((?<![A-Za-z0-9_])sk-" + _digit_ahead(rb"_-") + rb"[A-Za-z0-9_-]{16,WORD}+)",
            rb"((?<![A-Za-z0-9_])hf_[A-Za-z0-9]{30,WORD}+)",
            rb"(gh[pousr]_[A-Za-z0-9]{30,WORD}+|github_pat_[A-Za-z0-9_]{22,WORD}+|glpat-[A-Za-z0-9_-]{20,WORD}+)",
            rb"(xox[abeoprs]-[A-Za-z0-9-]{10,WORD}+|AIza[A-Za-z0-9_-]{35})",
            rb"((?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9]))",
            rb"(?P<token>eyJ[A-Za-z0-9_-]{8,4096}+\.eyJ[A-Za-z0-9_-]{8})",
            rb"(?P<private_key>-----BEGIN [A-Z ]*PRIVATE KEY-----)",
            rb"(?<![A-Za-z0-9_])(?i:bearer)%b++(" % _SPACE
            + _digit_ahead(rb"._~+/=-")
            + rb"[A-Za-z0-9._~+/=-]{8,WORD}+)",
            rb"(?i:authorization)['\"]?%b*+[:=,]%b*+b?['\"]?" % (_SPACE, _SPACE)
            + rb"(?i:basic|bearer|digest|token|apikey)%b++([^%b'\",;]{6,WORD}+)" % (_SPACE, _WHITE),
            rb"(?:(?i:%b)['\"]?|(?P<quote>['\"])(?i:pw|pwd)(?P=quote))%b*+[:=,]%b*+b?" % (_KEY_WORDS, _SPACE, _SPACE)
            # In quotes; or bare, as in a query or a header, and then with a digit: `password: required` is none.
            + rb"('[^']{4,}+'|\"[^\"]{4,}+\"|(?=[^%(end)b0-9]{0,%(ahead)d}+[^%(end)b])[^%(end)b]{6,WORD}+)"
            % {b"end": _WHITE + rb"'\"&,;", b"ahead": LOOKAHEAD - 1},
        )
    ).replace(b"WORD", b"%d" % LONGEST_WORD)
)


def secrets_in(text: bytes) -> Iterator[bytes]:
    """Return everything that the rules hid of a text, and the starts of longer secrets."""
    for at in range(len(text)):
        found = RULE.match(text, at)
        if found is not None and found.lastindex:
            yield found[found.lastindex]
