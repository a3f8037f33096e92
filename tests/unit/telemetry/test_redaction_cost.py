"""Redaction of hostile data takes linear time, and its first pass misses nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.telemetry import json_redaction, secret_search
from runtime_core.telemetry.json_redaction import ESCAPES
from runtime_core.telemetry.redaction import Redactor, patterns_of
from runtime_core.telemetry.secret_search import FAR_COST, MAX_CANDIDATES, RULE, candidate_pattern
from runtime_core.trajectory.recorder import record_entries
from runtime_core.wire.contents import SentLists
from runtime_core.wire.step import ENCODER, STEPS, Step, StepFailure
from tests.unit.telemetry.former_rules import secrets_in

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


def test_the_end_of_a_long_secret_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate inside it would search for the same end."""
    searched: list[int] = []
    group = secret_search.RULE.groupindex["private_key"]
    find_end = secret_search.ENDS[group]

    def counted(text: bytes, start: int) -> int:
        searched.append(start)
        return find_end(text, start)

    monkeypatch.setitem(secret_search.ENDS, group, counted)
    begin, end = "-----BEGIN PRIVATE " + "KEY-----", "-----END PRIVATE " + "KEY-----"
    assert Redactor().text(begin * 20 + end + " and more") == "*** and more"
    assert len(searched) == 1


SHORT = '"password":"x1"'


@pytest.mark.parametrize(
    "data",
    [
        "{" + ",".join([SHORT] * 20_000) + "}",
        '{"first":{"n":1},' + ",".join([SHORT] * 20_000) + "}",
        "{" + ",".join(['"n":{},' + SHORT] * 10_000) + "}",
        "[" + ",".join(['"' + KEY + '"'] * 20_000) + "]",
    ],
    ids=["members", "a nested first member", "every second member nested", "elements"],
)
def test_json_of_very_many_parts_is_hidden_without_being_decoded(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_members", "_elements"):
        monkeypatch.delattr(json_redaction, name)
    assert Redactor().data(data.encode()) == b'"***"'


def test_a_text_with_few_escapes_is_not_decoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_redaction, "_decode_text")
    assert json_redaction.unescaped(b'"two\\nlines \\"of\\" \\\\"', 4) == (b'two\nlines "of" \\', [3, 10, 13, 15])


def _seconds(function: Callable[[], object]) -> float:
    """Return this thread's CPU time, the lowest of three: other programs do not count."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return min(times)


def _grows_with_length(function: Callable[[bytes], object], made: Callable[[int], bytes]) -> None:
    floor = 0.005
    long = made(MIB)
    began = time.thread_time()
    function(long)
    if time.thread_time() - began < 40 * floor:
        return  # within the bound, however fast the short one is
    short = made(MIB // 16)
    assert _seconds(lambda: function(long)) < 40 * max(floor, _seconds(lambda: function(short)))


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_takes_linear_time(case: str) -> None:
    known = Redactor([KNOWN], patterns_of(r"(a+)+$ CUSTOMER-\d+"))
    _grows_with_length(lambda data: known.text(data.decode()), lambda length: HOSTILE[case](length).encode())


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_json_takes_linear_time(case: str) -> None:
    known = Redactor([KNOWN])
    for nested in (False, True):

        def made(length: int, nested: bool = nested) -> bytes:
            text = HOSTILE[case](length)
            return json.dumps([{"a": json.dumps({"k": text}) if nested else text}]).encode()

        _grows_with_length(known.data, made)


@pytest.mark.parametrize(
    "element",
    [{"password": "x"}, {"a": {"pw": KEY}}, KEY, "sk-abcdef", 1, "a", "\n", "\nbearer abcdefgh1", [[["://a:b@"]]]],
)
def test_json_with_many_elements_takes_linear_time(element: object) -> None:
    known = Redactor([KNOWN], patterns_of(r"^\d{16}$"))

    def made(length: int) -> bytes:
        return json.dumps([{"input": [element] * (length // len(json.dumps(element)))}, KEY]).encode()

    _grows_with_length(known.data, made)
    assert KEY.encode() not in known.data(made(MIB))


def test_many_known_secrets_cost_no_more_than_one() -> None:
    many = Redactor(f"secret number {each}!" for each in range(1000))
    text = "secret number of mine " * (MIB // 22)
    assert many.text("x secret number 999! y") == "x *** y"  # compiled now
    assert many.text(text) == text
    one = Redactor([KNOWN])
    assert _seconds(lambda: many.text(text)) < 20 * max(0.005, _seconds(lambda: one.text(text)))


def test_the_rest_of_a_text_with_too_many_candidates_is_hidden() -> None:
    words = "sk-abcd words " * MAX_CANDIDATES
    assert Redactor().text(words) == words
    assert Redactor().text(f"{words}and sk-abcd then {KEY} and more") == f"{words}and ***"
    numbers = Redactor.from_environment({}, r"N\d+")
    assert numbers.text("N1 " * MAX_CANDIDATES + "N2 and more") == "*** " * MAX_CANDIDATES + "***"


def test_a_text_with_too_many_escapes_is_hidden_if_it_may_hold_a_secret() -> None:
    known = Redactor()
    harmless = json.dumps(["\\n" * (ESCAPES + 1)]).encode()
    assert known.data(harmless) is harmless
    readable = json.dumps([f"\\n{KEY}", "\\n" * ESCAPES, "password: required"]).encode()
    assert json.loads(known.data(readable)) == ["\\n***", "\\n" * ESCAPES, "password: required"]
    assert json.loads(known.data(json.dumps([KEY, "\\n" * (ESCAPES + 1) + "password: required"]).encode())) == [
        "***",
        "***",
    ]


@pytest.mark.parametrize("member", ['"password":"x"', '"pass\\u0077ord" : "a\\"b"', '"token":null', '"pw":-1.5e3'])
@pytest.mark.parametrize("around", ["{%s}", "[{%s}]", ' [ {%s},{"a":[1]}]'])
def test_an_object_of_very_many_short_members_is_hidden_without_being_decoded(
    member: str, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = f'"password":"sk-abcd",{member},' * 40_000
    data = (around % members.rstrip(",")).encode()

    def decodes(_: bytes) -> object:
        raise AssertionError("each member costs an object")

    monkeypatch.setattr(json_redaction, "_members", decodes)
    monkeypatch.setattr(json_redaction, "_elements", decodes)
    assert json.loads(Redactor().data(data)) == "***"


def test_json_with_too_many_candidates_keeps_its_upper_levels() -> None:
    known = Redactor([KNOWN])
    error = StepFailure("ValueError", f"no {KEY}", at=4.5)
    rows = [
        Step(
            "r",
            "tool",
            "charge",
            "failed",
            1.0,
            2.0,
            input=_raw([KEY, "x"] * 2 * MAX_CANDIDATES),
            error=error,
            errors=[error],
        ),
        Step(
            "r", "tool", "charge", "completed", 1.0, 2.0, input=_raw({"password": "x", "n": 1}), attributes={"a": KEY}
        ),
        Step("r", "tool", "charge", "completed", 1.0, 2.0, input=_raw({"n": ["x", 1.5]})),
    ]
    shown = known.data(b" \n" + ENCODER.encode(rows))
    assert KEY.encode() not in shown
    first, second, third = STEPS.decode(shown)
    assert (first.kind, first.name, first.status, first.started) == ("tool", "charge", "failed", 1.0)
    assert json.loads(bytes(first.input)) == "***"
    assert first.errors[0].message == "***"
    assert first.error is not None
    assert (first.error.message, first.error.at) == ("***", 4.5)
    assert json.loads(bytes(second.input)) == {"password": "***", "n": 1}
    assert second.attributes == {"a": "***"}
    assert third == rows[2]


ROW: dict[str, object] = {"a": "sk-abcdef " + "words " * 30, "n": 1}
NESTED: dict[str, object] = {"a": {**ROW, "pw": "words"}, "b": [ROW]}


@pytest.mark.parametrize(
    "value",
    [
        [ROW] * (MIB // 200),
        [[ROW] * 20] * (MIB // 4000),
        {"rows": [ROW] * (MIB // 200)},
        [{f"sk-abcdef {n}": "words " * 30 for n in range(MIB // 200)}],
        [NESTED] * (MIB // 500),
        [{"a": "日本 sk-abcdef \n" * (MIB // 30)}],
        [{"a": '"日本語" \n' * (MIB // 20) + KEY}],
        ["-----BEGIN PRIVATE " + "KEY-----" + "-----END OTHER-----" * (MIB // 19)],
        {"sk-abcdef " * (MIB // 10): "x"},
        {"sk-abcdef " * 100 + str(n): "x" for n in range(MIB // 1000)},
        {"k" * 100_000 + str(n): "x\n" for n in range(10)},
        [{"a": {"b": "x\n", "pw": "y"}}] * (MIB // 25),
        {
            "password": "x",
            "a": [[{"password": {"a": [1.5, "x"], "pw": "x"}}, {"sk-abcdef": {}, "b": KEY}]] * (MIB // 120),
        },
        {f"{n} sk-abcdef": [{"password": {"pw": ["x", 1]}, "token": "x" * 200}] * 30 for n in range(150)},
    ],
    ids=range(14),
)
def test_hostile_json_costs_a_few_searches(value: object) -> None:
    known = Redactor([KNOWN])
    data = json.dumps(value, ensure_ascii=False).encode()
    once = _seconds(lambda: known.data(b'["%b"]' % (b"some words " * (len(data) // 11))))
    assert _seconds(lambda: known.data(data)) < 12 * once
    assert KEY.encode() not in known.data(data)


@pytest.mark.parametrize("space", [" ", "\n", "\u00a0", "\u3000", " \u2003"])
@pytest.mark.parametrize("name", ["password", "'pw'", "api_key=", "authorization:", "authorization: basic", "bearer"])
def test_white_space_around_secrets_costs_a_few_searches(space: str, name: str) -> None:
    known = Redactor([KNOWN])
    gap = space * (MIB // MAX_CANDIDATES // len(space.encode()))
    text = f"{name}{gap}:'".join([""] * MAX_CANDIDATES)
    once = _seconds(lambda: known.text("some words " * (MIB // 11)))
    # A rule that reads each space costs 12 to 17 searches if it lies outside ASCII.
    assert _seconds(lambda: known.text(text)) < 9 * once
    data = json.dumps([text], ensure_ascii=False).encode()
    assert _seconds(lambda: known.data(data)) < 9 * once


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


@pytest.mark.parametrize(
    "value",
    [
        [{"note": "words " * 15_000, "keys": ["sk-abcd" + "x" * 2000] * 10}] * 20,
        {f"note {n}": ["words " * 2000 + " sk-abcd" * 20] for n in range(20)},
        ["words\n" * 50_000 + KEY],
        [json.dumps(["words\n" * 20_000 + KEY])],
        ["words \u00e9\n" * 50_000 + KEY],
    ],
    ids=["elements", "members", "a late candidate", "a late candidate in nested JSON", "outside ASCII"],
)
def test_no_level_of_json_is_searched_again_up_to_its_first_candidate(value: object) -> None:
    known = Redactor()
    counted = Counted(known)
    data = json.dumps(value).encode()
    assert KEY.encode() not in known.data(data)
    assert counted.searched < 1.9 * len(data)


@pytest.mark.parametrize(
    "text",
    [
        ("\\" * 16_000 + '"password":"xyz1"') * 60,
        ("\\" * 16_000 + '"quoted" known') * 60,
    ],
    ids=["a name", "a known secret"],
)
def test_many_backslashes_are_searched_once(text: str) -> None:
    known = Redactor(['"quoted" known'])
    counted = Counted(known)
    assert known.text(text) != text
    assert counted.searched < 1.3 * len(text)


def test_a_candidate_ends_early_among_many_escapes() -> None:
    assert candidate_pattern(()).search(b"password" + b"\\u0020" * 2500).end() < 200


@pytest.mark.parametrize("text", ["eyJ" + "a" * 4000 + ".eyJ" + "a" * 4000 + ".a ", "bearer a1" + "a" * 8000 + " "])
def test_long_words_are_not_searched(text: str) -> None:
    known = Redactor()
    counted = Counted(known)
    assert "a1" not in known.text(text * 100)
    assert counted.searched < 10 * len(text)


def test_a_secret_at_the_end_of_a_long_word_is_hidden() -> None:
    secret = "a1" * 50 + " is a known secret"
    known = Redactor([secret])
    word = "sk-" + "a1" * 500
    many = "\\" * 300
    for name in ("password :", "password=", f"password{many}:", f"password:{many}", "password: ", "api_key\t=b"):
        assert "ABC" not in known.text(f"{word}{name}'ABCD1234'"), name
    for name in (f"authorization:b{many}basic", f"authorization{many}=b{many}bearer", "authorization:basic"):
        assert "ABC" not in known.text(f"{word}{name} ABCD1234"), name
    for start in (word, "eyJ" + "a" * 600 + ".eyJ" + "a" * 600):
        assert known.text(f"{start}{secret}b") in ("***b", "***")


WORDS = st.sampled_from(
    ("sk-" + "a1" * 400, "a1" * 300, "eyJ" + "a" * 600, ".eyJ" + "b" * 600, "bearer ", "\\" * 70, "\u3000" * 30, "b1'")
)


@settings(max_examples=150)
@given(text=st.lists(WORDS | st.sampled_from(FRAGMENTS), max_size=8).map("".join))
def test_the_end_of_a_long_word_is_searched_as_if_all_of_it_was(text: str) -> None:
    known, thorough = Redactor(SECRETS), Redactor(SECRETS)
    thorough._search._longest = len(text) + 1
    assert known.text(text) == thorough.text(text)


def test_the_end_of_a_long_name_is_not_read() -> None:
    name = b'"%b"' % (b"a" * MIB)
    once = _seconds(lambda: name.translate(None, b"-_"))
    assert _seconds(lambda: json_redaction._names_secret(name)) < once / 4
    assert json_redaction._names_secret(b'"pass%bword"' % (b"-" * 50_000))


def test_a_secret_behind_much_white_space_counts_as_several_candidates() -> None:
    far, most = "password:" + " " * 300 + "'abcd' ", MAX_CANDIDATES // (1 + FAR_COST)
    assert Redactor().text(far * most + "and sk-abcd words").endswith("***")
    assert Redactor().text(far * (most - 1) + "and sk-abcd words").endswith("sk-abcd words")


def test_each_level_of_long_json_inside_texts_counts() -> None:
    def made(length: int) -> bytes:
        inner = {"note": "words " * (length // 6) + "\n", "password": "plain", "n": 1}
        return json.dumps([{"a": json.dumps({"b": json.dumps(inner), "n": 1})}]).encode()

    small, large = made(json_redaction.DECODED_BYTES // 4), made(json_redaction.DECODED_BYTES)
    for data in (small, large):
        assert b"plain" not in Redactor().data(data)
    inner = json.loads(json.loads(json.loads(Redactor().data(small))[0]["a"])["b"])
    assert (inner["password"], inner["n"]) == ("***", 1)
    assert json.loads(json.loads(Redactor().data(large))[0]["a"]) == {"b": "***", "n": 1}
    beside = json.loads(Redactor().data(json.dumps([json.loads(large), f"line\n{KEY} and more"]).encode()))
    assert beside[1] in ("line\n*** and more", "***")


def test_json_with_too_many_strings_is_not_decoded_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_redaction, "unescaped")
    rows = [{"n": n, "text": f"a line\n{KEY}"} for n in range(MAX_CANDIDATES + 1)]
    shown = json.loads(Redactor().data(json.dumps(rows).encode()))
    assert shown[0] == {"n": 0, "text": "***"}


def test_strings_beyond_the_checked_candidates_are_hidden_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"line\n{KEY} and {KEY}"] * 100
    decoded: list[bytes] = []
    decode = json_redaction.unescaped

    def counted(written: bytes, escapes: int) -> tuple[bytes, list[int] | None]:
        decoded.append(written)
        return decode(written, escapes)

    monkeypatch.setattr(json_redaction, "unescaped", counted)
    shown = json.loads(Redactor().data(json.dumps([*texts, {"password": "x\n"}, "words"]).encode()))
    assert shown[0] == "line\n*** and ***"
    assert shown[99:] == ["***", {"password": "***"}, "words"]
    # One candidate finds a string, two are in it.
    assert len(decoded) == (MAX_CANDIDATES - len(texts) - 1) // 2 + 1


def test_an_unclosed_string_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_redaction, "_REST_OF_STRING")
    unclosed = b'"' + b'\\"' * 1000
    assert json_redaction.string_end(unclosed, 0) == len(unclosed)


@pytest.mark.parametrize("after", [b"", b'"', b'"x"', b",", b" x", b"\xff"])
def test_a_long_string_ends_before_the_text_after_it(after: bytes) -> None:
    string = b'"' + b'\\"' * 1000 + b'"'
    assert json_redaction.string_end(string + after, 0) == len(string)


def test_strings_without_escapes_are_skipped_without_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_redaction, "_TO_STRING")
    data = b'["a", "b", "c", "d", "e", "f", "g", "h", "' + b"words\\n" * 1000 + b'"]'
    assert json_redaction.string_around(data, 1, len(data) - 10) == (data.rfind(b'"', 0, -2), len(data) - 1)


def test_a_few_escapes_beside_a_secret_stay_unchanged() -> None:
    data = b'["\\/a\\n%b\\\\ \\"%b\\/", "%b\\n", "\\n%b"]' % ((KEY.encode(),) * 4)
    assert Redactor().data(data) == data.replace(KEY.encode(), b"***")
    nested = json.dumps([data.decode()]).encode()
    assert Redactor().data(nested) == nested.replace(KEY.encode(), b"***")
    hidden = json.dumps(["***"]).encode()
    assert Redactor(["***" * 3]).data(hidden) is hidden


def test_a_long_name_among_too_many_candidates_is_hidden_without_a_search_for_its_secrets() -> None:
    crowded = [KEY] * (MAX_CANDIDATES + 1)
    shown = json.loads(
        Redactor().data(json.dumps({f"{KEY} b": "c", f"{KEY} {'d' * 600}": "e", "f" * 600: "g", "a": crowded}).encode())
    )
    assert KEY not in json.dumps(shown)
    assert {name: shown[name] for name in shown if name != "a"} == {"*** b": "c", "***": "e", "f" * 600: "g"}


def _nested(text: str, times: int) -> bytes:
    value: object = text
    for _ in range(times):
        value = json.dumps({"k": value}, ensure_ascii=False)
    return json.dumps([value], ensure_ascii=False).encode()


@pytest.mark.parametrize("unit", ["日本語のテキスト ", "é words à la carte ", "words and more words "])
def test_json_inside_texts_costs_little_more_than_the_text(unit: str) -> None:
    known = Redactor([KNOWN])
    text = (unit * (MIB // 10 // len(unit.encode())) + f" {KEY} ") * 10
    once = _seconds(lambda: known.text(text))
    for times in (1, 2):
        data = _nested(text, times)
        assert KEY.encode() not in known.data(data)
        # Each level copies and checks the text once more; while other programs use the caches, that costs up to thrice.
        assert _seconds(lambda data=data: known.data(data)) < 8 * max(0.002, once)  # type: ignore[misc]


def test_json_with_too_many_candidates_has_a_bounded_number_of_checked_values() -> None:
    rows = [{"a": "sk-abcdef " + "words " * 30, "n": n} for n in range(1000)]
    shown = json.loads(Redactor().data(json.dumps(rows).encode()))
    assert shown[0] == {"a": "***", "n": 0}
    assert shown[-1] == "***"
    assert len(shown) == json_redaction.VALUES // 2 + 1
    members = {f"a{n}": {"b": "sk-abcdef " + "words " * 200} for n in range(400)}
    shown = json.loads(Redactor().data(json.dumps(members).encode()))
    assert (shown["a0"], shown["***"]) == ({"b": "***"}, "***")
    assert len(shown) == json_redaction.VALUES // 2 + 1
    few = [{"n": n, "text": "words " * 30} for n in range(1000)] + [{"a": ["sk-abcdef"] * 2 * MAX_CANDIDATES}]
    assert json.loads(Redactor().data(json.dumps(few).encode())) == [*few[:-1], {"a": "***"}]


def test_an_object_with_long_names_and_too_many_candidates_is_hidden_as_a_whole() -> None:
    members = {f"sk-abcdef{n} {'a' * 500}": "words " * 200 for n in range(2 * MAX_CANDIDATES)}
    assert Redactor().data(json.dumps(members).encode()) == b'"***"'
    short = {f"a{n}": "sk-abcdef words " + "words " * 200 for n in range(2 * MAX_CANDIDATES)}
    assert json.loads(Redactor().data(json.dumps(short).encode()))["a0"] == "***"


async def test_many_rows_with_many_candidates_stay_rows() -> None:
    rows = [
        Step("r", "tool", "charge", "completed", 1.0, 2.0, input=_raw({"decoded": f"{KEY} {n}", "pw": "plain"}))
        for n in range(500)
    ]
    rows.append(Step("r", "tool", "charge", "completed", 1.0, 2.0, input=_raw({"n": [1]})))
    data = ENCODER.encode(rows)
    shown = await Redactor().rows(data)
    assert KEY.encode() not in shown
    assert b"plain" not in shown
    found = STEPS.decode(shown)
    assert [(row.name, row.status) for row in found] == [("charge", "completed")] * 501
    assert found[-1] == rows[-1]
    assert await Redactor().rows(ENCODER.encode(rows[-1:])) == ENCODER.encode(rows[-1:])
    assert KEY.encode() not in await Redactor().rows(data[:-1])


def test_a_large_value_among_too_many_candidates_is_hidden_without_being_decoded() -> None:
    crowded = [["sk-abcdef words"] * 3] * MAX_CANDIDATES
    small, large = crowded + [["words " * 20]] * 100, crowded + [["words " * 200]] * 200
    shown = json.loads(Redactor().data(json.dumps({"n": 1, "large": large, "small": small}).encode()))
    assert (shown["n"], shown["large"]) == (1, "***")
    assert shown["small"][0] == ["***"] * 3


async def turns_during(work: Awaitable[object]) -> int:
    """Return how often other work of the event loop runs meanwhile."""
    turns = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


def rows_of(input: dict[str, object], count: int) -> bytes:
    return ENCODER.encode([Step("r", "tool", "charge", "completed", 1.0, 2.0, input=_raw(input))] * count)


async def test_many_rows_with_many_candidates_do_not_hold_the_event_loop() -> None:
    known = Redactor()
    for count, text in ((1000, KEY), (200, f"{KEY} {'words ' * 500}")):
        assert await turns_during(known.rows(rows_of({"a": text}, count))) > 8
        assert await turns_during(known.rows(rows_of({"a": text}, 10))) < 4


async def test_many_rows_with_messages_do_not_hold_the_event_loop() -> None:
    known = Redactor()
    for count, text in ((1000, "words"), (100, "words " * 2000)):
        record = rows_of({"messages": [{"text": text}]}, count)
        assert await turns_during(SentLists().shortened(record, known.rows)) > 8
    assert await turns_during(SentLists().shortened(rows_of({"messages": ["words"]}, 10), known.rows)) < 4


async def test_the_rows_of_the_broker_do_not_hold_the_recorders_event_loop() -> None:
    answer = [b"t", b"t-1", b"d", rows_of({"a": "words " * 20_000}, 1)]
    assert await turns_during(record_entries([(b"1-0", answer)] * 100)) > 8
    assert await turns_during(record_entries([(b"1-0", answer)] * 5)) < 4


@given(
    texts=st.lists(st.sampled_from(("a ", "é", "日", "\ud800", "\U0001f600", KEY + " ", "N1", "\n")), max_size=12).map(
        "".join
    )
)
def test_a_text_keeps_all_but_its_secrets(texts: str) -> None:
    known = Redactor.from_environment({}, r"N\d")
    expected = re.sub(r"(?:\*\*\*)+", "***", texts.replace(KEY, "***").replace("N1", "***"))
    assert known.text(texts) == expected


def test_half_of_a_character_in_a_match_of_a_pattern_breaks_nothing() -> None:
    assert "N1" not in Redactor.from_environment({}, r"N1.").text("é" * 100 + "N1\ud800 x " + "é" * 10)


@given(text=st.text(alphabet='aé日"\\/\n\t\r\b\f \x00\x1f', max_size=20), slashes=st.booleans())
def test_strings_outside_ascii_follow_json(text: str, slashes: bool) -> None:
    written = json.dumps(text, ensure_ascii=False).encode()
    if slashes:
        written = written.replace(b"/", b"\\/")
    for escapes in (written.count(b"\\"), json_redaction.FEW_ESCAPES + 1):
        decoded, _ = json_redaction.unescaped(written, escapes)
        assert decoded == text.encode()
    assert json.loads(json_redaction.escaped(text.encode())) == text


@pytest.mark.parametrize("letter", ["日", "a"])
def test_a_key_after_too_many_candidates_needs_no_decoding(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = f"{letter} sk-abcd " * MAX_CANDIDATES + f"\n{letter}" * 10_000 + f" sk-abcd {KEY} and more"
    decoded: list[int] = []
    unescaped = json_redaction.unescaped

    def counted(written: bytes, escapes: int) -> tuple[bytes, list[int] | None]:
        decoded.append(len(written))
        return unescaped(written, escapes)

    monkeypatch.setattr(json_redaction, "unescaped", counted)
    for text in (crowded, json.dumps([crowded], ensure_ascii=False)):
        shown = Redactor().data(json.dumps({"a": text, "b": "words"}, ensure_ascii=False).encode())
        assert KEY.encode() not in shown
        assert json.loads(shown)["a"].endswith("***")
        assert json.loads(shown)["b"] == "words"
    after = json.dumps({"a": crowded, "b": {"c": KEY}}, ensure_ascii=False).encode()
    assert json.loads(Redactor().data(after))["b"] == {"c": "***"}
    assert decoded
    assert max(decoded) < 10_000


def test_a_private_key_ends_at_its_end() -> None:
    key = "-----BEGIN PRIVATE " + "KEY-----\nMIIB\n"
    end = "-----END PRIVATE " + "KEY-----"
    assert Redactor().text(f"a {key}-----END OTHER----- {end} b") == "a *** b"
    assert Redactor().text(f"a {key}{'-----END OTHER----- ' * 100}{end} b") == "a ***"
    assert Redactor().text(f"a {key} b") == "a ***"


def test_only_the_inner_json_with_too_many_candidates_is_hidden() -> None:
    crowded = json.dumps([KEY] * (MAX_CANDIDATES + 1))
    value = {"a": {"before": KEY, "note": "password: required"}, "b": crowded, "c": {"n": "words"}}
    assert json.loads(Redactor().data(json.dumps(value).encode())) == {
        "a": {"before": "***", "note": "password: required"},
        "b": "***",
        "c": {"n": "words"},
    }
    shown = json.loads(Redactor().data(json.dumps({**value, "d": {"after": KEY, "more": ["words"]}}).encode()))
    assert (shown["b"], shown["d"]["after"], shown["d"]["more"]) == ("***", "***", ["words"])


def test_unreadable_json_with_too_many_candidates_is_hidden() -> None:
    many = json.dumps([KEY] * (MAX_CANDIDATES + 1)).encode()
    for data in (many[:-1], b"x" + many, b"[" * 100_000 + many):
        assert KEY.encode() not in Redactor().data(data)


def test_members_of_too_much_json_are_hidden_by_their_names() -> None:
    many = [KEY] * MAX_CANDIDATES
    shown = Redactor().data(json.dumps({"pw": "plain", "n": {"secret": "plain", "b": "x"}, "a": many}).encode())
    found = json.loads(shown)
    assert set(found.pop("a")) == {"***"}
    assert found == {"pw": "***", "n": {"secret": "***", "b": "x"}}


def test_json_too_deep_inside_texts_is_hidden_if_it_may_hold_a_secret() -> None:
    value: object = {"password": "plain", "n": "other words"}
    for _ in range(json_redaction.NESTING + 1):
        value = [json.dumps(value)]
    shown = Redactor().data(json.dumps(value).encode())
    assert b"plain" not in shown
    assert b"other words" not in shown
    harmless: object = {"n": "x"}
    for _ in range(json_redaction.NESTING + 1):
        harmless = [json.dumps(harmless)]
    assert json.loads(Redactor().data(json.dumps([harmless, KEY]).encode())) == [harmless, "***"]


def test_text_outside_strings_does_not_break_json() -> None:
    known = Redactor(["12345678"])
    data = b'{"a":"x","n":12345678,"b":"12345678","c":[12345678,"y"]}'
    assert known.data(data) == b'{"a":"x","n":12345678,"b":"***","c":[12345678,"y"]}'


def test_endless_words_are_hidden_completely() -> None:
    long = "aB1-" * 10_000
    for start in ("sk-", "bearer ", "password=", "authorization: basic "):
        shown = Redactor().text(f"x {start}{long} y")
        assert "aB1" not in shown
        assert shown.endswith("*** y")
    token = "eyJ" + "a" * 600 + ".eyJ" + "b" * 5000 + "." + "c" * 600
    assert Redactor().text(f"t={token};path=/") == "t=***;path=/"


def _written(value: object, style: int) -> str:
    """Return JSON as different encoders write it."""
    text = json.dumps(value, ensure_ascii=style % 2 == 0)
    if style & 2:
        text = text.replace("/", "\\/")
    if style & 4:
        text = text.replace('\\"', "\\u0022").replace("<", "\\u003c").replace("=", "\\u003d").replace("'", "\\u0027")
    if style & 8:
        text = text.replace("ss", "s\\u0073").replace("k", "\\u006b").replace("\\\\u00", "\\u00")
    return text


@settings(max_examples=150)
@given(text=TEXTS)
def test_the_candidate_pattern_finds_each_match_of_a_rule(text: str) -> None:
    data, pattern = text.encode(), candidate_pattern(SECRETS)
    for at in range(len(data)):
        if RULE.match(data, at) is not None:
            assert pattern.match(data, at) is not None, data[at:]
        for secret in SECRETS:
            if data.startswith(secret.encode(), at):
                assert pattern.match(data, at) is not None, data[at:]


@settings(max_examples=150)
@given(text=TEXTS)
def test_secrets_that_an_earlier_release_redacted_stay_redacted(text: str) -> None:
    data = text.encode()
    shown = Redactor().text(text).encode()
    for secret in secrets_in(data):
        if data.count(secret) == 1:
            assert secret not in shown


@settings(max_examples=150)
@given(text=TEXTS, style=st.integers(0, 15), inner=st.integers(0, 7))
def test_json_is_redacted_like_text(text: str, style: int, inner: int) -> None:
    known = Redactor(SECRETS)
    shown = known.text(text)
    data = _written(["x", {"k": text}, _written({"n": [text]}, inner)], style).encode()
    try:
        given_back = json.loads(data)
        inner_back = json.loads(given_back[2])
    except ValueError:
        return  # a style has changed what was a backslash of the text
    if given_back[1]["k"] != text or text.lstrip()[:1] in ("{", "["):
        return
    found = json.loads(known.data(data))
    assert found[0] == "x"
    assert found[1] == {"k": shown}
    if inner_back == {"n": [text]}:
        assert json.loads(found[2]) == {"n": [shown]}


@given(
    texts=st.lists(
        st.lists(st.sampled_from(("a", "x", '"', "\\", '"' * 70, "\\" * 70, "\n", "é", "e" * 40)), max_size=6).map(
            "".join
        ),
        max_size=4,
    )
)
def test_strings_begin_and_end_as_in_json(texts: list[str]) -> None:
    data, at = json.dumps(texts).encode(), 1
    bounds = []
    for text in texts:
        bounds.append((at, at + len(json.dumps(text))))
        at = bounds[-1][1] + 2
    for start, end in bounds:
        assert json_redaction.string_end(data, start) == end
        assert json_redaction.string_end(data[: end - 1], start) == end - 1, "one that is cut off ends with the data"
    for position in range(len(data) + 1):
        expected = next(((start, end) for start, end in bounds if start < position < end), None)
        assert json_redaction.string_around(data, 0, position) == expected


@settings(max_examples=100)
@given(
    texts=st.lists(st.text('aN1 \n"é', max_size=6), max_size=5),
    patterns=st.sampled_from([r"^N1$", r"N\d+", r"\AN1", r"a\z", r"N.1", r"é", r"\bN\s", r"(?i)n1 ^a1$", r'"']),
)
def test_patterns_match_the_same_in_json_as_in_its_texts(texts: list[str], patterns: str) -> None:
    known = Redactor.from_environment({}, patterns)
    shown = [known.text(text) for text in texts]
    assert json.loads(known.data(json.dumps(texts).encode())) == shown


def test_a_pattern_for_the_start_of_a_text_finds_it_in_json() -> None:
    assert Redactor.from_environment({}, r"\AN1").data(b'["N1x","xN1"]') == b'["***x","xN1"]'


def test_the_end_of_a_private_key_is_searched_for_once() -> None:
    text = ("-----BEGIN PRIVATE " + "KEY-----") * (MIB // 27)
    assert _seconds(lambda: Redactor().text(text)) < 0.25


def test_patterns_with_the_same_names_of_groups_work_together() -> None:
    known = Redactor.from_environment({}, r"(?P<a>N1) (?P<a>N2)")
    assert known.data(b'["N1","N2","N3"]') == b'["***","***","N3"]'


def test_more_strings_than_patterns_are_matched_with_are_hidden() -> None:
    known = Redactor.from_environment({}, r"^N\d+$")
    texts = ["x\n"] * (json_redaction.STRINGS + 1)
    shown = known.data(json.dumps({"many": texts, "last": "N1"}).encode())
    assert json.loads(shown) == {"many": "***", "last": "***"}
    few = json.dumps({"many": texts[:100], "last": "N1"}).encode()
    assert json.loads(known.data(few)) == {"many": texts[:100], "last": "***"}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())
