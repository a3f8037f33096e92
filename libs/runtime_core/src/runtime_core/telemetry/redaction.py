"""Takes secrets out of what is kept or shown: rows of the trajectory, errors, dead letters, log lines, spans.

What is taken out, `***` stands in its place:

- values of the environment's variables that are named like a key (`OPENAI_API_KEY`, `*_TOKEN`, `*_SECRET`, …), and
  passwords of URLs in any variable; what the process has learned since, as a key that an app gives in its code;
- text that looks like a key of a known service, a bearer token, an `Authorization` header, a password in a URL;
- JSON members that are named like one (`api_key`, `password`, `access_token`, …), where their value is text;
- what the user's own patterns match (`WEFT_REDACT`).

Nearly all data has none of this, so a first look of plain searches comes before everything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import msgspec

from runtime_core.errors import ConfigurationError

HIDDEN = "***"
"""What stands in the place of a secret."""

SHORTEST_SECRET = 8
"""Characters. A shorter value of a variable is too likely to be a word of its own, as `test`."""

_KEY_VARIABLE = re.compile(
    r"(?:.*_)?(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"://[^\s:/@\"'<>]*:([^\s/@\"'<>]+)@")

_SECRET_MEMBERS = frozenset(
    (
        *("apikey", "xapikey", "apitoken", "authtoken", "accesstoken", "refreshtoken", "sessiontoken", "bearertoken"),
        *("accesskey", "secretkey", "privatekey", "secretaccesskey", "authorization", "proxyauthorization"),
        *("password", "passwd", "secret", "clientsecret"),
    )
)
"""Names of JSON members without `-` and `_`, in small letters."""

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # A digit is asked for where words with hyphens would look the same.
    (re.compile(r"sk-(?<![A-Za-z0-9_]sk-)(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"gh[pousr]_[A-Za-z0-9]{30,}"), HIDDEN),
    (re.compile(r"github_pat_[A-Za-z0-9_]{22,}"), HIDDEN),
    (re.compile(r"glpat-[A-Za-z0-9_-]{20,}"), HIDDEN),
    (re.compile(r"hf_(?<![A-Za-z0-9_]hf_)[A-Za-z0-9]{30,}"), HIDDEN),
    (re.compile(r"xox[abeoprs]-[A-Za-z0-9-]{10,}"), HIDDEN),
    (re.compile(r"A[KS]IA(?<![A-Za-z0-9]A[KS]IA)[A-Z0-9]{16}(?![A-Za-z0-9])"), HIDDEN),
    (re.compile(r"AIza[A-Za-z0-9_-]{35}"), HIDDEN),
    (re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), HIDDEN),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        HIDDEN,
    ),
    (re.compile(r"(://[^\s:/@\"'<>]*):[^\s/@\"'<>]+@"), rf"\1:{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer\s+)(?=[A-Za-z._~+/=-]*\d)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"(?i)(authorization['\"]?\s*[:=,]\s*b?['\"]?(?:basic|bearer|digest|token|apikey)\s+)[^\s'\",;]{6,}"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(?i)((?:api[-_]?key|access_token|client_secret|secret_access_key|password|passwd)['\"]?\s*[:=,]\s*b?)"
            # In quotes; or bare, as in a query or a header, and then with a digit: `password: required` is none.
            r"(?:'[^']{4,}'|\"[^\"]{4,}\"|(?=[^\s'\"&,;\d]*\d)[^\s'\"&,;]{6,})"
        ),
        rf"\1{HIDDEN}",
    ),
)

_SIGNS: tuple[tuple[bytes, re.Pattern[bytes] | None], ...] = (
    (b"://", re.compile(rb"://[^\s:/@\"'<>]*:[^\s/@\"'<>]+@")),
    (b"sk-", re.compile(rb"sk-[a-z0-9_-]{16}")),
    (b"earer", re.compile(rb"earer[\s\\]+[a-z0-9._~+/=-]{8}")),
    (
        b"key",
        re.compile(
            rb"key(?:(?<=api[-_]key)|(?<=apikey)|(?<=access[-_]key)|(?<=accesskey)|(?<=secret[-_]key)|(?<=secretkey)"
            rb"|(?<=private[-_ ]key)|(?<=privatekey))"
        ),
    ),
    (
        b"token",
        re.compile(
            rb"token(?:(?<=access[-_]token)|(?<=accesstoken)|(?<=auth[-_]token)|(?<=authtoken)|(?<=api[-_]token)"
            rb"|(?<=apitoken)|(?<=refresh[-_]token)|(?<=refreshtoken)|(?<=session[-_]token)|(?<=sessiontoken)"
            rb"|(?<=bearer[-_]token)|(?<=bearertoken))"
        ),
    ),
    (b":\\/", None),  # JSON may write a slash so
    *((sign, None) for sign in (b"uthorization", b"passw", b"secret", b"gho_", b"ghp_", b"ghs_", b"ghu_", b"ghr_")),
    *((sign, None) for sign in (b"github_pat_", b"glpat-", b"hf_", b"xox", b"akia", b"asia", b"aiza", b"eyj")),
)
"""What stands in all that a rule or a member's name would match, in small letters, and what must follow it.

A few searches for plain bytes go through a large text faster than any pattern, and mostly find nothing.
"""

_ANY_SIGN = re.compile(b"|".join(re.escape(sign) for sign, _ in _SIGNS))
"""The same as one pattern: faster where the text is short."""

_SHORT = 1024
"""Bytes."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:\s*)?', re.DOTALL)
"""A string of a JSON text, with the colon where it names a member."""

_PLAIN = re.compile(r"[ !#-.0-\[\]-~]+")
"""What every encoder of JSON writes as it is: no quotes, slashes, controls, nor what is not ASCII."""

_decode_text = msgspec.json.Decoder(str).decode
_check = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode
_HIDDEN_VALUE = _encode(HIDDEN)


class Redactor:
    """What a process knows of secrets, and how it takes them out. `learn` may be called at any time."""

    def __init__(self, secrets: Iterable[str] = (), patterns: Iterable[re.Pattern[str]] = ()) -> None:
        self._patterns = tuple(patterns)
        self._secrets: tuple[str, ...] = ()
        self._secret_bytes: tuple[bytes, ...] = ()
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
        # The longest first: a shorter one may be a part of it.
        self._secrets = tuple(sorted((*self._secrets, secret), key=len, reverse=True))
        self._secret_bytes = tuple({_plain_part(each) for each in self._secrets})

    def text(self, text: str) -> str:
        """The text without secrets; the same object where it has none."""
        if self._patterns or any(secret in text for secret in self._secrets):
            return self._replaced(text)
        return self._replaced(text) if _suspicious(text.encode(errors="replace")) else text

    def data(self, data: bytes) -> bytes:
        """JSON without secrets in its strings, else byte for byte as it was; the same object where it has none.

        JSON inside of a string, as the arguments of a tool call are written, is gone through too.
        """
        if not (self._patterns or any(secret in data for secret in self._secret_bytes) or _suspicious(data)):
            return data
        made = _STRING.sub(_Strings(self), data)
        return data if made == data else made

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

    def _replaced(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        for pattern, shown in _RULES:
            text = pattern.sub(shown, text)
        for pattern in self._patterns:
            text = pattern.sub(HIDDEN, text)
        return text


Attribute = str | int | float | bool | list[str]
"""What an attribute of a span or a row may be."""


class _Strings:
    """Replaces the strings of one JSON text, in their order."""

    __slots__ = ("_redactor", "_secret_from")

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._secret_from = -1
        """Where the value of a member begins that is named like a secret."""

    def __call__(self, found: re.Match[bytes]) -> bytes:
        colon = found[1]
        if colon is None and found.start() == self._secret_from:
            return _HIDDEN_VALUE if found[0] != b'""' else found[0]
        written = found[0] if colon is None else found[0][: -len(colon)]
        try:
            text = _decode_text(written)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Written by another program: half of a surrogate pair, for instance. Its ASCII is looked at.
            return self._redactor.text(found[0].decode("latin-1")).encode("latin-1")
        if colon is not None and text.lower().replace("_", "").replace("-", "") in _SECRET_MEMBERS:
            self._secret_from = found.end()
            return found[0]
        if text[:1] in ("{", "[") and colon is None and _is_json(inner := text.encode()):
            made = self._redactor.data(inner)
            return found[0] if made is inner else _encode(made.decode())
        made_text = self._redactor.text(text)
        return found[0] if made_text is text or made_text == text else _encode(made_text) + (colon or b"")


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


def patterns_of(text: str) -> list[re.Pattern[str]]:
    """Regular expressions with white space between them. Raises ConfigurationError for one that is none."""
    patterns = []
    for each in text.split():
        try:
            pattern = re.compile(each)
        except re.error as error:
            raise ConfigurationError(f"WEFT_REDACT={each!r}: not a regular expression: {error}") from None
        if pattern.search(""):
            raise ConfigurationError(f"WEFT_REDACT={each!r}: matches nothing at all, so everywhere; make it longer")
        patterns.append(pattern)
    return patterns


def redactor() -> Redactor:
    """The one of the app whose code runs here; elsewhere, one that knows this process's environment."""
    return _HERE.get() or _of_process()


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


def _suspicious(data: bytes) -> bool:
    """The first look: False where nothing here can be a secret, but for those that are known by value."""
    low = data.lower()
    if len(low) < _SHORT and _ANY_SIGN.search(low) is None:
        return False
    for sign, further in _SIGNS:  # noqa: SIM110  # a generator costs half as much again
        if sign in low and (further is None or further.search(low) is not None):
            return True
    return False


def _plain_part(secret: str) -> bytes:
    """The longest part of a secret that looks the same however JSON writes it; empty, it is in all data."""
    return max(_PLAIN.findall(secret), key=len, default="").encode()


def _is_json(data: bytes) -> bool:
    try:
        _check(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


Redact = Callable[[bytes], bytes]
"""As `Redactor.data`."""
