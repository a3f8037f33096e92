"""The search for secrets in hostile texts takes linear time, and its first pass misses nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.telemetry import secret_search
from runtime_core.telemetry.redaction import Redactor, patterns_of
from runtime_core.telemetry.secret_search import FAR_COST, MAX_CANDIDATES, RULE, candidate_pattern
from tests.unit.telemetry.former_rules import secrets_in
from tests.unit.telemetry.hostile import (
    FRAGMENTS,
    HOSTILE,
    KEY,
    KNOWN,
    MIB,
    SECRETS,
    TEXTS,
    Counted,
    grows_with_length,
    seconds,
)


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


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_takes_linear_time(case: str) -> None:
    known = Redactor([KNOWN], patterns_of(r"(a+)+$ CUSTOMER-\d+"))
    grows_with_length(lambda data: known.text(data.decode()), lambda length: HOSTILE[case](length).encode())


def test_many_known_secrets_cost_no_more_than_one() -> None:
    many = Redactor(f"secret number {each}!" for each in range(1000))
    text = "secret number of mine " * (MIB // 22)
    assert many.text("x secret number 999! y") == "x *** y"  # compiled now
    assert many.text(text) == text
    one = Redactor([KNOWN])
    assert seconds(lambda: many.text(text)) < 20 * max(0.005, seconds(lambda: one.text(text)))


def test_the_rest_of_a_text_with_too_many_candidates_is_hidden() -> None:
    words = "sk-abcd words " * MAX_CANDIDATES
    assert Redactor().text(words) == words
    assert Redactor().text(f"{words}and sk-abcd then {KEY} and more") == f"{words}and ***"
    numbers = Redactor.from_environment({}, r"N\d+")
    assert numbers.text("N1 " * MAX_CANDIDATES + "N2 and more") == "*** " * MAX_CANDIDATES + "***"


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


def test_a_secret_behind_much_white_space_counts_as_several_candidates() -> None:
    far, most = "password:" + " " * 300 + "'abcd' ", MAX_CANDIDATES // (1 + FAR_COST)
    assert Redactor().text(far * most + "and sk-abcd words").endswith("***")
    assert Redactor().text(far * (most - 1) + "and sk-abcd words").endswith("sk-abcd words")


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


def test_a_private_key_ends_at_its_end() -> None:
    key = "-----BEGIN PRIVATE " + "KEY-----\nMIIB\n"
    end = "-----END PRIVATE " + "KEY-----"
    assert Redactor().text(f"a {key}-----END OTHER----- {end} b") == "a *** b"
    assert Redactor().text(f"a {key}{'-----END OTHER----- ' * 100}{end} b") == "a ***"
    assert Redactor().text(f"a {key} b") == "a ***"


def test_endless_words_are_hidden_completely() -> None:
    long = "aB1-" * 10_000
    for start in ("sk-", "bearer ", "password=", "authorization: basic "):
        shown = Redactor().text(f"x {start}{long} y")
        assert "aB1" not in shown
        assert shown.endswith("*** y")
    token = "eyJ" + "a" * 600 + ".eyJ" + "b" * 5000 + "." + "c" * 600
    assert Redactor().text(f"t={token};path=/") == "t=***;path=/"


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


def test_the_end_of_a_private_key_is_searched_for_once() -> None:
    text = ("-----BEGIN PRIVATE " + "KEY-----") * (MIB // 27)
    assert seconds(lambda: Redactor().text(text)) < 0.25
