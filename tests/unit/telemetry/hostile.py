"""Texts and JSON that would take an unbounded redaction long, and measures of how long it takes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import msgspec
import re2
from hypothesis import strategies as st

from runtime_core.telemetry.redaction import Redactor

KNOWN = "a word that is known"
KEY = "ghp" + "_0123456789abcdefghijABCDEFGHIJ012345"
MIB = 1024 * 1024

REPEATED = (
    *("sk-", "sk-abcd ", "\nsk-abcd", "task-", "sk-abcdefghijklmno1 ", "ghp_", "ghp_abcd ", "github_pat_", "glpat-"),
    *("glpat-abcd ", "hf_", "hf_abcd ", "xoxb-", "xoxb-abcd ", "AKIA", "AKIAABCD ", "AIza", "AIzaabcd "),
    *("eyJ", "eyJabcdefgh.", "eyJabcdefgh.eyJabcdefgh ", "-----BEGIN ", "-----BEGIN PRIVATE " + "KEY-----"),
    *("-----BEGIN PRIVATE " + "KEY----------END ", "://", "://a:", "://a:b", "://a:b@", "bearer ", "bearer abcdefgh"),
    *("bearer abcdefg1 ", "authorization:", "authorization: basic ", "authorization: basic abcdef ", "api_key="),
    *("api_key='", "api_key=abcdef", "api_key=abcde1 ", "password:", "password:'abcd", 'password:"abcd', "password: "),
    *("passphrase", "'pw':", "'pw':'abcd' ", '"password":', '"password":"x",', "\\u0041", '"', "'", "\\", "{", "["),
    *("a", "@", ":", "\u3000", "é", KNOWN, KNOWN[:-1]),
    *(
        "\u200bsk-abcd ",
        "e\u0301sk-abcde1",
        "\u202esk-abcdefgh1 ",
        "\U0001f600password:",
        "\\ud83d\\ude00sk-abcd",
        "\x00sk-abcd",
    ),
    *(
        "\x1b[31msk-abcdefg",
        "https://user:pa55@host/ ",
        "https%3A%2F%2Fu:p%40h ",
        "://" + "u" * 300 + ":" + "p" * 300 + " ",
    ),
    *(
        "-----BEGIN RSA PRIVATE KEY",
        "-----BEGIN A B C D E F G ",
        "-----END " + "A " * 30,
        "Cookie: a=b; password=abc1d2; ",
    ),
    *(
        "eyJ" + "a" * 4000 + ".",
        "eyJ.eyJ.eyJ.",
        "sk-" + "a" * 255 + "1 ",
        "sk-ant-api03-",
        "AKIAAKIAAKIA",
        "bearer\\u0020abcdefgh1",
    ),
    *(
        "bearer" + "\\t" * 250 + "x",
        "authorization" + "\\" * 50 + ":",
        "'authorization': 'Basic ",
        "password" + '\\"' * 30,
    ),
    *("password='" + "a" * 300 + "'", "password\\u003d\\u0022abc", '"passwords":"x","pass":"y",', '"a-p-i-k-e-y":"x",'),
    *(
        '"api' + "-_" * 200 + "key",
        "<password>hunter2</password>",
        "GET /v1/x?token=abc HTTP/1.1 200\n",
        "pw pwd 'pw' ",
    ),
)


ONCE = tuple(
    start + filler
    for start in ("bearer", "password", "password:'", "authorization:", "://", "-----BEGIN ", "sk-", "eyJ")
    for filler in " a1-A\\'\""
)
"""One start of a secret, and then its last character without end."""


def _mixed(parts: tuple[str, ...], length: int) -> str:
    chosen = random.Random(7)
    return "".join(chosen.choices(parts, k=length // 2))[:length]


def _repeated(unit: str, length: int) -> str:
    return (unit * (length // len(unit) + 1))[:length]


HOSTILE: dict[str, Callable[[int], str]] = {
    **{unit: lambda length, unit=unit: _repeated(unit, length) for unit in REPEATED},  # type: ignore[misc]
    **{text: lambda length, text=text: text + text[-1] * length for text in ONCE},  # type: ignore[misc]
    "a mixture": lambda length: _mixed(REPEATED, length),
    "a mixture of keys": lambda length: _mixed(("sk-", "AIza", "eyJ", "glpat-", "xoxb-", "AKIA", "hf_", "-"), length),
    "a mixture with a digit at its end": lambda length: _mixed(("sk-", "bearer ", "password:", "x"), length) + "1",
}


FRAGMENTS = (
    *(unit.strip() for unit in REPEATED[:60]),
    *(" ", "\n", "\t", "=", ":", ",", "'", '"', "/", "@", "-", "_", ".", "abc123", "abcdefgh", "0123456789", "b1" * 20),
    *("A" * 16, "a" * 35, "é", "\u3000", "\u2028", "b'", "Basic ", "Bearer", "API-KEY", "PassWord", "<", "\U0001f600"),
    *(KEY, KNOWN, "known\n", '"quoted" \\é日/\U0001f600'),
)


TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


SECRETS = (KNOWN, '"quoted" \\é日/\U0001f600', "known\nsecret", "12345678")


def seconds(function: Callable[[], object]) -> float:
    """Return this thread's CPU time, the lowest of three: other programs do not count."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return min(times)


def grows_with_length(function: Callable[[bytes], object], made: Callable[[int], bytes]) -> None:
    floor = 0.005
    long = made(MIB)
    began = time.thread_time()
    function(long)
    if time.thread_time() - began < 40 * floor:
        return  # within the bound, however fast the short one is
    short = made(MIB // 16)
    assert seconds(lambda: function(long)) < 40 * max(floor, seconds(lambda: function(short)))


class Counted:
    """A candidate pattern that counts the bytes that it searches."""

    def __init__(self, known: Redactor) -> None:
        self._pattern = known._search.candidate
        self.searched = 0
        known._search.__dict__["candidate"] = self

    def search(self, data: bytes, at: int = 0) -> re2._Match | None:
        found = self._pattern.search(data, at)
        self.searched += (len(data) if found is None else found.end()) - at
        return found


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())
