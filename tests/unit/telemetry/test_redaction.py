"""Secrets: what is removed, what stays, and that JSON stays valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.base.text import LONGEST_MESSAGE, LONGEST_TRACEBACK
from runtime_core.calls.mcp import connection as mcp_connection
from runtime_core.calls.mcp import transport as mcp_transport
from runtime_core.consumer.settle import MAX_ERROR_CHARACTERS, failed_from, failure_of
from runtime_core.declare.declaration import one_line
from runtime_core.declare.manifest import short_line
from runtime_core.engines.remote import error_of
from runtime_core.engines.spark import backend as spark_backend
from runtime_core.engines.spark import calls as spark_calls
from runtime_core.errors import ConfigurationError, Reject
from runtime_core.telemetry.redaction import (
    CUT_MARGIN,
    READ_CHARACTERS,
    Redactor,
    patterns_of,
    redactor,
    secrets_of,
    use,
)

# Put together here: a scanner of repositories must not take them for real ones.
OPENAI = "sk-" + "proj-Ab12Cd34Ef56Gh78Ij90"
GITHUB = "ghp" + "_0123456789abcdefghijABCDEFGHIJ012345"
GOOGLE = "AIza" + "SyA0123456789abcdefghijABCDEFGHIJ01"
AMAZON = "AKIA" + "IOSFODNN7EXAMPLE"
SLACK = "xoxb" + "-0123456789-abcdef"
WEB_TOKEN = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0In0.c2lnbmF0dXJl"
PRIVATE = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIB\n-----END RSA " + "PRIVATE KEY-----"

SECRETS = {
    "a key of OpenAI": (OPENAI, OPENAI),
    "a token of GitHub": (f"use {GITHUB} now", GITHUB),
    "a key of Google": (f"key={GOOGLE}", GOOGLE),
    "a key of Amazon": (f"id {AMAZON}", AMAZON),
    "a token of Slack": (SLACK, SLACK),
    "a signed web token": (f"got {WEB_TOKEN}", WEB_TOKEN),
    "a private key": (f"my key:\n{PRIVATE}\n", "MIIB"),
    "a bearer token": ("curl -H 'X: Bearer abc123def456'", "abc123def456"),
    "a bearer token in the next line": ("Bearer\nabc123def456", "abc123def456"),
    "a header of basic authorization": ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    "a password in a URL": ("postgresql://me:hunter2@db:5432/x", "hunter2"),
    "a key in a query": ("GET https://x.example/?api_key=abc123xyz&q=1", "abc123xyz"),
    "a password in a shown dict": ("{'password': 'open sesame', 'user': 'me'}", "open sesame"),
    "a short name in a shown dict": ("{'pw': 'open sesame'}", "open sesame"),
    "a passphrase": ("passphrase: correct1horse2battery", "horse"),
    "headers as a list of pairs": ("[('x-api-key', 'abcdefgh')]", "abcdefgh"),
}

HARMLESS = (
    "task-like and disk-based, as sk-learn-is-a-library-for-it says",
    "https://example.org:8080/a@b?x=1 and http://localhost:6379",
    "the bearer of certificates; Bearer authentication is described below",
    "password: required, api_key: optional",
    "a secret of the trade, a key insight, asia, the token budget: max_tokens=4096",
    '{"input_tokens": 3, "token": "word", "keys": ["a"], "password_policy": "long", "secrets": 3, "password": null}',
    "eyJhbGciOiJIUzI1NiJ9 alone is no token",
)


@pytest.mark.parametrize("case", SECRETS)
def test_text_that_looks_like_a_secret_is_redacted(case: str) -> None:
    text, secret = SECRETS[case]
    shown = Redactor().text(text)
    assert secret not in shown
    assert "***" in shown


@pytest.mark.parametrize("case", SECRETS)
def test_text_that_looks_like_a_secret_is_redacted_in_json_at_any_depth(case: str) -> None:
    text, secret = SECRETS[case]
    inner = json.dumps({"said": text, "n": 1})
    data = msgspec.json.encode({"a": [{"b": text}], "arguments": inner, "deeper": json.dumps([inner])})
    shown = Redactor().data(data)
    assert secret.encode() not in shown
    found = json.loads(shown)
    assert "***" in found["a"][0]["b"]
    assert "***" in json.loads(found["arguments"])["said"]
    assert "***" in json.loads(json.loads(found["deeper"])[0])["said"]


@pytest.mark.parametrize(
    "before", ["\\n", "\\\\r\\n", "\\t", "\\x1b", "\\u2028", "%20", "q%3D", "\x1b[1;31m", "\\x1b[m"]
)
@pytest.mark.parametrize("secret", [OPENAI, "hf_" + "a1" * 16, AMAZON, "Bearer abc123def456"])
def test_an_escape_before_a_key_is_not_part_of_the_word(before: str, secret: str) -> None:
    text = f"a{before}{secret} b"
    shown = Redactor().text(text)
    assert secret.removeprefix("Bearer ") not in shown
    assert shown == f"a{before}{'Bearer ' if ' ' in secret else ''}*** b"
    assert json.loads(Redactor().data(json.dumps([text]).encode())) == [shown]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"args": json.dumps({"password": "hunter two", "n": 1})}),
        repr({"args": json.dumps({"password": "hunter two", "it's": 1})}),
        repr("it's {'pw': 'hunter two', \"n\": 1}"),
        json.dumps(json.dumps({"args": json.dumps({"api_key": "hunter two"})})),
    ],
)
def test_a_password_in_escaped_quotes_is_hidden_in_text(text: str) -> None:
    shown = Redactor().text(text)
    assert "hunter" not in shown
    assert "***" in shown


@pytest.mark.parametrize("gap", [" " * 1000, "\n" * 300, "\u3000" * 40, "\u00a0 " * 30, "\u2003" * 200 + " "])
@pytest.mark.parametrize(
    ("before", "secret"),
    [
        ("password{gap}: ", "hunter2x"),
        ("password:{gap}", "hunter2x"),
        ("password{gap}={gap}", "'open sesame'"),
        ("'pw'{gap}:{gap}b", '"open sesame"'),
        ("api_key,{gap}", '\\\\"open sesame\\\\"'),
        ("authorization{gap}: Basic ", "dXNlcjpwYXNz"),
        ("authorization:{gap}Basic ", "dXNlcjpwYXNz"),
        ("authorization: Basic{gap}", "dXNlcjpwYXNz"),
        ("Authorization: Bearer{gap}", "abcdefgh"),
        ("bearer{gap}", "abc123def456"),
    ],
)
def test_a_secret_behind_much_white_space_is_redacted(gap: str, before: str, secret: str) -> None:
    text = f"a {before.format(gap=gap)}{secret} and more words"
    shown = Redactor().text(text)
    assert shown.startswith("a ")
    assert secret.strip("'\"\\") not in shown
    assert shown.endswith("***") or shown.endswith(" words")
    assert json.loads(Redactor().data(json.dumps([text]).encode())) == [shown]


def test_text_after_much_white_space_without_a_separator_is_not_a_secret() -> None:
    words = f"Enter your password{' ' * 1000}Forgot it? password{chr(0x3000) * 100}"
    assert Redactor().text(words) == words


def test_json_inside_a_text_may_begin_with_white_space() -> None:
    inner = '\n  {"secret": "plain"}'
    assert json.loads(Redactor().data(json.dumps([inner]).encode())) == ['\n  {"secret": "***"}']
    assert json.loads(Redactor().data(json.dumps([inner, '\t["x"'], ensure_ascii=False).encode()))[1] == '\t["x"'


@pytest.mark.parametrize("text", HARMLESS)
def test_text_that_only_resembles_a_secret_stays(text: str) -> None:
    assert Redactor().text(text) is text or Redactor().text(text) == text
    data = msgspec.json.encode({"text": text})
    assert Redactor().data(data) is data
    if text.startswith("{"):
        assert Redactor().data(text.encode()) == text.encode()


def test_only_the_text_of_members_with_secret_names_is_redacted() -> None:
    names = ("api_key", "apiKey", "X-Api-Key", "Authorization", "password", "client_secret", "access_token", "secret")
    for name in (*names, "pw", "PW", "pwd", "passphrase", "passcode", "db_password", "-p-w-", "p_a_s_s_w_d"):
        data = b'{ "n": 1.50,\n "%b" : "any words", "\\u00e4": [1e3, "any words"] }' % name.encode()
        hidden = b'{ "n": 1.50,\n "%b" : "***", "\\u00e4": [1e3, "any words"] }' % name.encode()
        assert Redactor().data(data) == hidden, name
    assert (
        Redactor().data(b'{"password":"","secret":{"type":"string"}}') == b'{"password":"","secret":{"type":"string"}}'
    )
    nested = json.dumps({"arguments": json.dumps({"password": 'a"b\\', "x": 1})}).encode()
    assert json.loads(json.loads(Redactor().data(nested))["arguments"]) == {"password": "***", "x": 1}


def test_values_of_variables_with_names_like_keys_are_redacted() -> None:
    environ = {
        "OPENAI_API_KEY": "local words only",
        "MY_TOKEN": 'quo"te and ümlaut',
        "SERVICE_SECRET": "short",
        "DATABASE_URL": "postgresql://me:opensesame@db/x",
        "MAX_TOKEN": "100000000",
        "TOKENIZERS": "parallel words",
        "HOME": "/home/words",
    }
    assert secrets_of(environ) == ["local words only", 'quo"te and ümlaut', "short", "opensesame"]
    known = Redactor.from_environment(environ)
    for value in ("local words only", 'quo"te and ümlaut', "opensesame"):
        assert known.text(f"it is {value}.") == "it is ***."
        for data in (
            msgspec.json.encode({"a": value}),
            json.dumps({"a": value}).encode(),
            json.dumps({"a": json.dumps([value])}).encode(),
        ):
            shown = json.dumps(json.loads(known.data(data)), ensure_ascii=False)
            assert value not in shown
            assert json.dumps(value, ensure_ascii=False)[1:-1] not in shown
            assert "***" in shown
    for value in ("short", "100000000", "parallel words", "/home/words"):
        assert known.text(f"it is {value}") == f"it is {value}"


@pytest.mark.parametrize(
    "secret",
    [
        'pass"word\\of mine',
        '"quoted secret"',
        "\\back\\slashes",
        "\\\\host\\share",
        "ein Schlüssel",
        "überall geheim",
        "\nline\nbreaks\t",
    ],
)
def test_a_known_secret_is_hidden_where_json_has_escaped_it(secret: str) -> None:
    known = Redactor([secret])
    for ascii in (True, False):
        once = json.dumps(secret, ensure_ascii=ascii)[1:-1]
        twice = json.dumps(once, ensure_ascii=ascii)[1:-1]
        for form in (secret, once, twice):
            text = f"it is {form}, and more"
            # The first character's own escape may stay.
            expected = re.compile(r"it is \\{0,7}\*\*\*, and more")
            assert expected.fullmatch(known.text(text)), form
            for data in (json.dumps([text]), json.dumps({"a": json.dumps(["x", text])})):
                shown = known.data(data.encode())
                assert form.strip('"\\n ') not in shown.decode()
                assert json.dumps(form)[1:-1].strip('"\\n ') not in shown.decode()
                assert "***" in json.loads(shown)[0 if data[0] == "[" else "a"]


def test_a_secret_that_is_learned_later_is_redacted_afterwards() -> None:
    known = Redactor()
    assert known.text("plain words here") == "plain words here"
    known.learn("plain words")
    known.learn("plain words here")
    known.learn(None)
    known.learn("here")
    assert known.text("plain words here, plain words, here") == "***, ***, here"


def test_user_patterns_apply_to_whole_strings() -> None:
    known = Redactor.from_environment({}, "IBAN[0-9]+\n  ^\\d{16}$")
    assert known.text("IBAN4711 of 1234") == "*** of 1234"
    data = b'{"card":"4000123412341234","other":"x4000123412341234","iban":["IBAN1"]}'
    assert json.loads(known.data(data)) == {"card": "***", "other": "x4000123412341234", "iban": ["***"]}


@pytest.mark.parametrize("pattern", ["(", "x*", "[a-", "|", "(?=a)b", "(?<!a)b", r"(a)\1b"])
def test_an_invalid_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"WEFT_REDACT={pattern!r}")):
        patterns_of(f"good {pattern}")


def test_malformed_text_is_redacted_as_far_as_it_is_readable() -> None:
    data = b'{"half":"\\ud800 Bearer abc123def456","bytes":"\xff Bearer abc123def456","cut":"Bearer abc123def456'
    shown = Redactor().data(data)
    assert b"abc123def456" not in shown
    # A known secret that ends with the data is known to its last character.
    assert Redactor(["a plain word"]).data(b'["x", "a plain word') == b'["x", "***"'


def test_the_innermost_redactor_is_in_use() -> None:
    first, second = Redactor(["first secret"]), Redactor(["second secret"])
    with use(first):
        with use(second):
            assert redactor() is second
        assert redactor() is first
    assert redactor() is redactor()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=JSON, secret=st.text('abcxyz"\\\n ä日', min_size=8, max_size=12))
def test_json_stays_valid_and_only_secrets_change(value: object, secret: str) -> None:
    known = Redactor([secret])
    for written in (json.dumps([value, secret]), json.dumps([value, secret], ensure_ascii=False)):
        data = written.encode(errors="surrogatepass")
        found = json.loads(known.data(data).decode(errors="surrogatepass"))
        assert found[1] == "***"
        if secret not in json.dumps(value, ensure_ascii=False) and "***" not in json.dumps(found[0]):
            assert found[0] == value


def test_a_secret_at_a_cut_is_not_shown_in_half() -> None:
    """Rules do not match half of a secret, so texts are shortened after redaction."""
    half = GITHUB[: len(GITHUB) // 2]
    for limit, failed in ((LONGEST_MESSAGE, failed_from), (MAX_ERROR_CHARACTERS, failure_of)):
        said = "x" * (limit - len(half) - 1) + " " + GITHUB
        for error in (ValueError(said), Reject(said)):
            message = failed(error).message
            assert half not in message
            assert message.startswith("xxx")
            assert "***" in message


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (LONGEST_MESSAGE, lambda error: error_of(error).message),
        (LONGEST_MESSAGE, lambda error: error_of(Reject(str(error))).message),
        (LONGEST_MESSAGE, spark_calls.first_lines),
        (300, spark_backend._one_line),
        (1000, lambda error: str(mcp_connection.failure_of(error))),
        (200, lambda error: short_line(str(error))),
        (300, lambda error: one_line(error).removeprefix("RuntimeError: ")),
    ],
)
def test_engines_and_mcp_servers_redact_before_they_shorten(limit: int, shown: Callable[[Exception], str]) -> None:
    half = GITHUB[: len(GITHUB) // 2]
    text = shown(RuntimeError("x" * (limit - len(half) - 1) + " " + GITHUB))
    assert half not in text
    assert text.startswith("xxx")
    assert "***" in text


def test_a_line_of_an_mcp_server_is_redacted_before_it_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    half = GITHUB[: len(GITHUB) // 2]
    lines = mcp_transport._Lines("the server")
    lines.data_received(b"short\n" + b"x" * (mcp_transport.LONGEST_LINE - len(half) - 1))
    lines.data_received(b" " + GITHUB[:12].encode())
    lines.data_received(GITHUB[12:].encode() + b"\n" + b"y" * 10 * READ_CHARACTERS)
    lines.eof_received()
    short, long, last = (record.getMessage().removeprefix("the server: ") for record in caplog.records)
    assert short == "short"
    assert GITHUB[:12] not in long
    assert long.startswith("xxx")
    assert "***" in long
    assert last == "y" * mcp_transport.LONGEST_LINE


@pytest.mark.parametrize(
    ("limit", "failed"),
    [(LONGEST_TRACEBACK, failed_from), (MAX_ERROR_CHARACTERS, failure_of), (LONGEST_TRACEBACK, error_of)],
)
def test_a_secret_at_the_start_of_a_shortened_traceback_is_not_shown_in_half(limit: int, failed: Any) -> None:
    end = GITHUB[len(GITHUB) // 2 :]
    error = ValueError(GITHUB + " " + "x" * (limit - len(end) - 2))
    kept = failed(error).traceback
    assert end not in kept
    assert kept.rstrip().endswith("xxx")


def test_only_a_part_of_a_long_text_is_read() -> None:
    known = Redactor()
    words = "word " * READ_CHARACTERS
    assert known.start(words) == words[: READ_CHARACTERS - CUT_MARGIN]
    assert known.end(words) == words[-(READ_CHARACTERS - CUT_MARGIN) :]
    cut = "x" * (READ_CHARACTERS - 10) + " " + GITHUB + " " + "x" * READ_CHARACTERS
    assert GITHUB[:9] not in known.start(cut)
    assert GITHUB[-9:] not in known.end(cut[: -READ_CHARACTERS - 1] + " " + "x" * (READ_CHARACTERS - 10))
    # What is hidden up to the cut needs no margin.
    assert known.start("wrong key: " + WEB_TOKEN + "A" * READ_CHARACTERS * 2) == "wrong key: ***"
