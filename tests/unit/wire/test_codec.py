"""Encoding and decoding: errors name what is refused, and hostile data costs little time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput
from runtime_core.wire import codec
from runtime_core.wire.codec import (
    JSON,
    MAX_DATA_BYTES,
    MAX_DEPTH,
    MSGPACK,
    canonical,
    decode,
    decode_object,
    encode,
    quoted,
    typed,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@given(values)
def test_json_and_msgpack_round_trip(value: object) -> None:
    assert decode(encode(value)) == value
    assert decode(msgspec.msgpack.encode(value), MSGPACK) == value


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from([JSON, MSGPACK, ""]))
def test_any_bytes_are_a_value_or_invalid_input(data: bytes, content_type: str) -> None:
    refusal = None
    try:
        value = decode(data, content_type)
    except InvalidInput as error:
        refusal = error
    if refusal:
        assert refusal.field == "data"
    else:
        assert decode(encode(value)) == value


REFUSED_JSON = {
    "empty": (b"", "empty"),
    "only space": (b"  ", "not JSON"),
    "not UTF-8": (b'"\xff"', "not UTF-8"),
    "key not UTF-8": (b'{"\xff":1}', "not UTF-8"),
    "wrong": (b'{"a":}', "not JSON"),
    "single quotes": (b"{'a':1}", "not JSON"),
    "cut": (b'{"a":[1,', "not JSON"),
    "trailing bytes": (b"1 2", "not JSON"),
    "trailing bracket": (b"[]]", "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf1", "not JSON"),
    "raw NUL": (b'"\x00"', "not JSON"),
    "NaN": (b"[NaN]", "not JSON"),
    "Infinity": (b"-Infinity", "not JSON"),
    "float too large": (b"1e400", "not JSON"),
    "lone surrogate": (b'"\\ud800"', "not JSON: a text holds half of a surrogate pair"),
    "lone surrogate in a key": (b'{"a\\udc00":1}', "not JSON: a text holds half of a surrogate pair"),
    "cut after half of a pair": (b'"\\ud800', "not JSON: Input data was truncated"),
    "integer over 64 bits": (b'{"a":[18446744073709551616]}', "outside 64 bits"),
    "integer under 64 bits": (b"-9223372036854775809", "outside 64 bits"),
    "huge integer": (b"1" * 5000, "not JSON"),
    "too large": (b'"' + b"a" * MAX_DATA_BYTES + b'"', "over the limit of 1048576"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED_JSON.values(), ids=REFUSED_JSON.keys())
def test_bad_json_is_refused_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        decode(data)
    assert caught.value.field == "data"
    assert "\n" not in str(caught.value)


REFUSED_MSGPACK = {
    "empty": (b"", "empty"),
    "reserved byte": (b"\xc1", "not msgpack"),
    "trailing bytes": (b"\x01\x02", "not msgpack"),
    "cut text": (b"\xa5ab", "not msgpack"),
    "array longer than the bytes": (b"\xdd\xff\xff\xff\xff", "not msgpack"),
    "map longer than the bytes": (b"\xdf\x7f\xff\xff\xff\xa1a\x01", "not msgpack"),
    "text not UTF-8": (b"\xa1\xff", "not UTF-8"),
    "bytes": (b"\x91\xc4\x01a", "bytes"),
    "extension": (b"\xd4\x05a", "extension"),
    "timestamp": (b"\xd6\xff\x00\x00\x00\x00", "extension"),
    "number as key": (b"\x81\x01\x02", "key 1"),
    "bytes as key": (b"\x81\xc4\x01a\x01", "key"),
    "array as key": (b"\x81\x91\x01\x01", "key"),
    "map as key": (b"\x81\x81\xa1a\x01\x01", "not msgpack"),
    "NaN": (b"\xcb\x7f\xf8" + b"\0" * 6, "nan"),
    "infinity": (b"\xca\xff\x80\x00\x00", "-inf"),
}


@pytest.mark.parametrize(("data", "message"), REFUSED_MSGPACK.values(), ids=REFUSED_MSGPACK.keys())
def test_bad_msgpack_is_refused_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        decode(data, MSGPACK)
    assert caught.value.field == "data"


def nested_json(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def nested_objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def nested_msgpack(levels: int) -> bytes:
    return b"\x91" * (levels - 1) + b"\x90"


def nested_maps(levels: int) -> bytes:
    return b"\x81\xa1a" * levels + b"\x01"


@pytest.mark.parametrize(
    ("nested", "content_type"),
    [(nested_json, JSON), (nested_objects, JSON), (nested_msgpack, MSGPACK), (nested_maps, MSGPACK)],
)
def test_depth_64_is_read_and_65_is_not(nested: Callable[[int], bytes], content_type: str) -> None:
    decode(nested(MAX_DEPTH), content_type)
    with pytest.raises(InvalidInput, match="deeper than 64 levels"):
        decode(nested(MAX_DEPTH + 1), content_type)


BOMBS = {
    "closed arrays": (nested_json(100_000), JSON),
    "open arrays": (b"[" * 100_000, JSON),
    "open objects": (b'{"a":' * 100_000, JSON),
    "behind siblings": (b"[[]," * 100_000, JSON),
    "behind a backslash": (b'["\\"",' * 100_000, JSON),
    "msgpack arrays": (b"\x91" * 100_000, MSGPACK),
    "msgpack maps": (b"\x81\xa1a" * 100_000, MSGPACK),
    "msgpack arrays in wide arrays": (b"\xdd\x00\x00\x00\x02\x01" * 100_000, MSGPACK),
}


@pytest.mark.parametrize(("data", "content_type"), BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_of_brackets_is_refused_at_once(data: bytes, content_type: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidInput, match="deeper than 64 levels"):
        decode(data, content_type)
    # Some milliseconds in truth; the bound leaves room for a busy machine and still fails a quadratic look.
    assert time.process_time() - began < 5


@given(values)
def test_brackets_in_text_are_not_depth(value: object) -> None:
    text = '[{"\\' * 100
    document = [text, {text: value}, "\\", '"', '\\"[', value]
    assert decode(encode(document)) == document
    assert decode(json.dumps(document).encode()) == document
    assert decode(msgspec.msgpack.encode(document), MSGPACK) == document


@given(st.integers(1, 100), st.lists(st.sampled_from(["list", "dict", "wide", "text"]), min_size=4, max_size=4))
def test_depth_is_measured_exactly(levels: int, shapes: list[str]) -> None:
    value: object = 0
    for level in range(levels):
        match shapes[level % 4]:
            case "list":
                value = [value]
            case "dict":
                value = {'"]}': value}
            case "wide":
                value = [[], {}, "x" * 40, 2**40, value, 1.5, [1]] if level else [value]
            case "text":
                value = ['[["\\', value, "é\x80" * 20]
    for data, content_type in ((json.dumps(value).encode(), JSON), (msgspec.msgpack.encode(value), MSGPACK)):
        if levels <= MAX_DEPTH:
            assert decode(data, content_type) == value
        else:
            with pytest.raises(InvalidInput, match="deeper"):
                decode(data, content_type)


def test_many_containers_side_by_side_are_not_deep() -> None:
    value = [{"a": [n, "é" * 40], "b": {}} for n in range(2000)]
    assert decode(encode(value)) == value
    assert decode(msgspec.msgpack.encode(value), MSGPACK) == value


def test_the_last_of_equal_keys_wins() -> None:
    assert decode(b'{"a":1,"a":2}') == {"a": 2}
    assert decode(b"\x82\xa1a\x01\xa1a\x02", MSGPACK) == {"a": 2}


def test_the_edges_of_64_bits_are_kept() -> None:
    edges = [-(2**63), 2**63 - 1, 2**64 - 1]
    assert decode(encode(edges)) == edges
    assert decode(msgspec.msgpack.encode(edges), MSGPACK) == edges


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "Application/JSON; charset=utf-8", "application/vnd.acme.order+json"],
)
def test_content_types_of_json_are_recognized(content_type: str) -> None:
    assert decode(b"1", content_type) == 1


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack; v=1"])
def test_content_types_of_msgpack_are_recognized(content_type: str) -> None:
    assert decode(b"\xa1a", content_type) == "a"


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "json", "a" * 5000])
def test_other_content_types_are_refused_by_name(content_type: str) -> None:
    with pytest.raises(InvalidInput, match="not supported") as caught:
        decode(b"1", content_type)
    assert caught.value.field == "datacontenttype"
    assert len(str(caught.value)) < 200


itself: list[object] = []
itself.append(itself)


@pytest.mark.parametrize(
    "value",
    [float("nan"), {"a": [1.0, float("inf")]}, 2**64, [-(2**63) - 1], "\ud800", object(), {(1, 2): 3}, itself],
)
def test_encode_refuses_values_that_json_cannot_represent(value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode(value)
    assert caught.value.field == "data"


def test_encode_refuses_values_too_deep_to_decode() -> None:
    value: object = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(InvalidInput, match="deeper"):
        encode(value)


def test_encode_is_compact_and_keeps_none() -> None:
    assert encode({"b": [1, None], "a": "é"}) == '{"b":[1,null],"a":"é"}'.encode()


def test_canonical_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical({"b": {"d": 1, "c": 2}, "a": 3}) == canonical({"a": 3, "b": {"c": 2, "d": 1}})
    assert canonical([1, 2]) != canonical([2, 1])


def test_members_of_an_object_stay_text() -> None:
    assert {name: bytes(raw) for name, raw in decode_object(b'{"a": [1, 2], "b":1e2}').items()} == {
        "a": b"[1, 2]",
        "b": b"1e2",
    }
    for bad in (b"[]", b"1", b"{", b"", b'{"a":' * 100_000):
        with pytest.raises(InvalidInput):
            decode_object(bad)


def test_quoted_is_one_short_line() -> None:
    assert quoted({"a": 1}) == '{"a":1}'
    for value in ("x" * 1000, "a\nb\x1b[31m\u2028", "\ud800", object(), itself, b"\xff" * 100):
        shown = quoted(value)
        assert len(shown) <= 60
        assert shown.isprintable()


SLOW = ["9e300", "1.7E-308", "9e+0300", "-7e-310", "9" * 300 + ".1", "0." + "0" * 300 + "1", "-" + "1" * 64 + ".5"]


@pytest.mark.parametrize("number", SLOW)
def test_slow_to_decode_json_is_refused(number: str) -> None:
    """1 MiB of them held an event loop for 5 s, longer than a lease."""
    most = codec.MAX_SLOW_NUMBERS // max(1, max(map(len, re.findall(r"\d+", number))) // 64)
    wrapped = f'{{"input":[{",".join([number] * (most + 1))}]}}'.encode()
    for read in (codec.decode, codec.decode_object):
        with pytest.raises(InvalidInput, match="exponents of three digits"):
            read(wrapped)
    allowed = codec.decode(f"[{','.join([number] * most)}]".encode())
    assert allowed == [float(number)] * most
    text = ["\\", '"', number * (most + 1)]
    assert codec.decode(codec.encode(text)) == text


def test_large_values_are_checked_without_a_walk_over_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a walk held an event loop for 100 ms per MiB."""
    large = [{"a": None, "n": 2**64 - 1, "f": 1.5}] * 10_000
    monkeypatch.delattr(codec, "_refuse_foreign")
    assert codec.decode(codec.encode(large)) == large


@pytest.mark.parametrize("like_nan", [0xCB7FF00000000000, 0xCBFFF80000000000])
def test_numbers_that_look_like_nan_are_encoded(like_nan: int) -> None:
    value = [like_nan, None]
    assert codec.decode(codec.encode(value)) == value
    assert codec.encode({5: like_nan, 6: None}) == b'{"5":%d,"6":null}' % like_nan


@pytest.mark.parametrize("number", SLOW[:4])
def test_a_value_with_too_many_slow_numbers_is_not_encoded(number: str) -> None:
    with pytest.raises(InvalidInput, match="exponents of three digits"):
        codec.encode([float(number)] * (codec.MAX_SLOW_NUMBERS + 1))


def test_a_value_that_cannot_be_shown_is_quoted_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    nested: object = 1
    for _ in range(100_000):
        nested = [nested]
    assert [codec.quoted(value) for value in (Broken(), 10**5000, nested)] == [
        "a value of type Broken", "a value of type int", "a value of type list",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": tru}', "column 7 (Expecting value)"),
        ("[1, 2", "column 6 (Expecting ',' delimiter)"),
        ('{"a": 1,\n b: 2}', "line 2, column 2 (Expecting property name"),
    ],
)
def test_typed_json_that_is_wrong_names_the_place(text: str, where: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"input: is not JSON at {where}")):
        typed(text, field="input")
    assert typed(text) == text


def test_typed_text_stays_text() -> None:
    for text in ("tea", "-", "3 apples", "a {b}"):
        assert typed(text, field="input") == text
    assert typed('{"a": 1}', field="input") == {"a": 1}
    assert typed('"{a}"', field="input") == "{a}"
