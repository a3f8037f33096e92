"""Redaction of hostile JSON takes linear time, keeps it valid, and misses nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.telemetry import json_redaction
from runtime_core.telemetry.json_redaction import ESCAPES
from runtime_core.telemetry.redaction import Redactor, patterns_of
from runtime_core.telemetry.secret_search import MAX_CANDIDATES
from runtime_core.trajectory.recorder import record_entries
from runtime_core.wire.contents import SentLists
from runtime_core.wire.step import ENCODER, STEPS, Step, StepFailure
from tests.unit.telemetry.hostile import (
    HOSTILE,
    KEY,
    KNOWN,
    MIB,
    SECRETS,
    TEXTS,
    Counted,
    grows_with_length,
    raw,
    seconds,
)

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


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_json_takes_linear_time(case: str) -> None:
    known = Redactor([KNOWN])
    for nested in (False, True):

        def made(length: int, nested: bool = nested) -> bytes:
            text = HOSTILE[case](length)
            return json.dumps([{"a": json.dumps({"k": text}) if nested else text}]).encode()

        grows_with_length(known.data, made)


@pytest.mark.parametrize(
    "element",
    [{"password": "x"}, {"a": {"pw": KEY}}, KEY, "sk-abcdef", 1, "a", "\n", "\nbearer abcdefgh1", [[["://a:b@"]]]],
)
def test_json_with_many_elements_takes_linear_time(element: object) -> None:
    known = Redactor([KNOWN], patterns_of(r"^\d{16}$"))

    def made(length: int) -> bytes:
        return json.dumps([{"input": [element] * (length // len(json.dumps(element)))}, KEY]).encode()

    grows_with_length(known.data, made)
    assert KEY.encode() not in known.data(made(MIB))


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
            input=raw([KEY, "x"] * 2 * MAX_CANDIDATES),
            error=error,
            errors=[error],
        ),
        Step("r", "tool", "charge", "completed", 1.0, 2.0, input=raw({"password": "x", "n": 1}), attributes={"a": KEY}),
        Step("r", "tool", "charge", "completed", 1.0, 2.0, input=raw({"n": ["x", 1.5]})),
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
    once = seconds(lambda: known.data(b'["%b"]' % (b"some words " * (len(data) // 11))))
    assert seconds(lambda: known.data(data)) < 12 * once
    assert KEY.encode() not in known.data(data)


@pytest.mark.parametrize("space", [" ", "\n", "\u00a0", "\u3000", " \u2003"])
@pytest.mark.parametrize("name", ["password", "'pw'", "api_key=", "authorization:", "authorization: basic", "bearer"])
def test_white_space_around_secrets_costs_a_few_searches(space: str, name: str) -> None:
    known = Redactor([KNOWN])
    gap = space * (MIB // MAX_CANDIDATES // len(space.encode()))
    text = f"{name}{gap}:'".join([""] * MAX_CANDIDATES)
    once = seconds(lambda: known.text("some words " * (MIB // 11)))
    # A rule that reads each space costs 12 to 17 searches if it lies outside ASCII.
    assert seconds(lambda: known.text(text)) < 9 * once
    data = json.dumps([text], ensure_ascii=False).encode()
    assert seconds(lambda: known.data(data)) < 9 * once


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


def test_the_end_of_a_long_name_is_not_read() -> None:
    name = b'"%b"' % (b"a" * MIB)
    once = seconds(lambda: name.translate(None, b"-_"))
    assert seconds(lambda: json_redaction._names_secret(name)) < once / 4
    assert json_redaction._names_secret(b'"pass%bword"' % (b"-" * 50_000))


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
    once = seconds(lambda: known.text(text))
    for times in (1, 2):
        data = _nested(text, times)
        assert KEY.encode() not in known.data(data)
        # Each level copies and checks the text once more; while other programs use the caches, that costs up to thrice.
        assert seconds(lambda data=data: known.data(data)) < 8 * max(0.002, once)  # type: ignore[misc]


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
        Step("r", "tool", "charge", "completed", 1.0, 2.0, input=raw({"decoded": f"{KEY} {n}", "pw": "plain"}))
        for n in range(500)
    ]
    rows.append(Step("r", "tool", "charge", "completed", 1.0, 2.0, input=raw({"n": [1]})))
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
    return ENCODER.encode([Step("r", "tool", "charge", "completed", 1.0, 2.0, input=raw(input))] * count)


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
