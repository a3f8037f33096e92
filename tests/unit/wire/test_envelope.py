"""Events on stream entries: both content modes, defaults, and refusals by name."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput
from runtime_core.wire.codec import MAX_DATA_BYTES, MAX_DEPTH, decode
from runtime_core.wire.envelope import (
    ATTRIBUTES,
    MAX_ATTRIBUTE_BYTES,
    MAX_ATTRIBUTES,
    Envelope,
    epoch_ms,
    parse,
    reply_address,
    rfc3339,
    to_fields,
)

ENTRY = "1763690400000-0"

attribute_names = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=20)
plain_text = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=50)
some_text = plain_text.filter(bool)
unknown = attribute_names.filter(lambda name: name not in {*ATTRIBUTES, "data", "database64"})
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def envelopes(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[Envelope]:
    return st.builds(
        Envelope,
        id=some_text,
        source=some_text,
        type=some_text,
        specversion=st.just("1.0"),
        subject=plain_text,
        time=plain_text,
        datacontenttype=st.sampled_from(["application/json", "application/msgpack"]),
        partitionkey=plain_text,
        traceparent=plain_text,
        tracestate=plain_text,
        taskid=plain_text,
        runid=plain_text,
        causationid=plain_text,
        replyto=plain_text.filter(lambda text: not text.startswith("weft:")),
        deadline=plain_text,
        tenant=plain_text,
        data=data,
        extensions=st.dictionaries(unknown, plain_text, max_size=4),
    )


@given(envelopes(st.binary(max_size=50)))
def test_binary_mode_round_trip(envelope: Envelope) -> None:
    assert parse(ENTRY, to_fields(envelope)) == envelope


@given(envelopes(json_values.map(msgspec.json.encode)), st.booleans())
def test_structured_mode_round_trip(envelope: Envelope, as_base64: bool) -> None:
    document: dict[str, object] = {name: getattr(envelope, name) for name in ATTRIBUTES}
    document |= envelope.extensions
    if as_base64 or envelope.datacontenttype != "application/json":
        document["data_base64"] = base64.b64encode(envelope.data).decode()
    else:
        document["data"] = json.loads(envelope.data)
    seen = parse(ENTRY, [b"data", json.dumps(document).encode()])
    assert msgspec.structs.replace(seen, data=envelope.data) == envelope
    assert decode(seen.data) == decode(envelope.data)


def field_lists() -> st.SearchStrategy[list[bytes]]:
    """Return entries that are close enough to events to reach every branch, and wrong enough to break each."""
    known = st.sampled_from([name.encode() for name in (*ATTRIBUTES, "data", "data", "metadata")])
    structured = st.dictionaries(
        st.sampled_from([*ATTRIBUTES, "data", "data_base64", "x", ""]), json_values, max_size=8
    ).map(lambda document: msgspec.json.encode({"type": "t", "specversion": "1.0"} | document))
    cut = st.tuples(structured, st.integers(0, 80)).map(lambda pair: pair[0][: pair[1]])
    value = st.binary(max_size=40) | st.just(b"1.0") | structured | cut
    whole = st.lists(st.tuples(known | st.binary(max_size=10), value).map(list), max_size=8).map(
        lambda pairs: [part for pair in pairs for part in pair]
    )
    return whole | (structured | cut).map(lambda text: [b"data", text]) | st.lists(st.binary(max_size=9))


@settings(max_examples=200)
@given(field_lists())
def test_parse_raises_only_invalid_input(fields: list[bytes]) -> None:
    address = reply_address(fields)
    refusal = None
    try:
        envelope = parse(ENTRY, fields)
    except InvalidInput as error:
        refusal = error
    if refusal:
        assert refusal.field
        assert len(str(refusal)) < 1000
        assert "\n" not in str(refusal)
    else:
        assert parse(ENTRY, to_fields(envelope)) == envelope
        assert address == envelope.replyto


def test_only_type_and_data_are_required() -> None:
    envelope = parse(ENTRY, [b"type", b"weft.task.submit", b"data", b"{}"])
    assert envelope == Envelope(
        id=ENTRY,
        source="anonymous",
        type="weft.task.submit",
        specversion="1.0",
        datacontenttype="application/json",
        data=b"{}",
    )


def test_a_mapping_is_read_like_a_list() -> None:
    fields = [b"type", b"t", b"id", b"7", b"data", b"1", b"custom", b"kept"]
    mapping = dict(zip(fields[::2], fields[1::2], strict=True))
    assert parse(ENTRY, mapping) == parse(ENTRY, fields)
    assert parse(ENTRY, mapping).extensions == {"custom": "kept"}


def test_the_last_of_equal_names_wins() -> None:
    assert parse(ENTRY, [b"type", b"a", b"data", b"1", b"type", b"b", b"data", b"2"]).type == "b"


def test_empty_attributes_are_absent() -> None:
    envelope = parse(ENTRY, [b"type", b"t", b"id", b"", b"source", b"", b"specversion", b"", b"data", b"1"])
    assert (envelope.id, envelope.source, envelope.specversion) == (ENTRY, "anonymous", "1.0")


REFUSED = {
    "no fields": ([], "type"),
    "odd": ([b"type"], "entry"),
    "no type": ([b"id", b"1", b"data", b"{}"], "type"),
    "empty type": ([b"type", b"", b"data", b"{}"], "type"),
    "no data": ([b"type", b"t"], "data"),
    "large data": ([b"type", b"t", b"data", b"x" * (MAX_DATA_BYTES + 1)], "data"),
    "other version": ([b"type", b"t", b"data", b"1", b"specversion", b"0.3"], "specversion"),
    "attribute not UTF-8": ([b"type", b"t", b"data", b"1", b"subject", b"\xff"], "subject"),
    "unknown attribute not UTF-8": ([b"type", b"t", b"data", b"1", b"mine", b"\xff"], "mine"),
    "type not UTF-8": ([b"type", b"\xff", b"data", b"1"], "type"),
    "name not UTF-8": ([b"type", b"t", b"data", b"1", b"\xff", b"x"], "entry"),
    "name with a line break": ([b"type", b"t", b"data", b"1", b"a\nb", b"x"], "entry"),
    "empty name": ([b"type", b"t", b"data", b"1", b"", b"x"], "entry"),
    "long name": ([b"type", b"t", b"data", b"1", b"n" * 257, b"x"], "entry"),
    "long attribute": ([b"type", b"t", b"data", b"1", b"tracestate", b"x" * 4097], "tracestate"),
    "NUL in the id": ([b"type", b"t", b"data", b"1", b"id", b"a\0b"], "id"),
    "line break in the source": ([b"type", b"t", b"data", b"1", b"source", b"a\nb"], "source"),
    "control in the task id": ([b"type", b"t", b"data", b"1", b"taskid", b"a\x7f"], "taskid"),
    "control in replyto": ([b"type", b"t", b"data", b"1", b"replyto", b"a\rb"], "replyto"),
    "replyto in the namespace": ([b"type", b"t", b"data", b"1", b"replyto", b"weft:tasks"], "replyto"),
    "replyto in this namespace": ([b"type", b"t", b"data", b"1", b"replyto", b"mine:tasks"], "replyto"),
    "many attributes": (
        [
            b"type",
            b"t",
            b"data",
            b"1",
            *(part for n in range(MAX_ATTRIBUTES) for part in (str(n).encode(), b"x")),
        ],
        "entry",
    ),
    "data alone": ([b"data", b'"text"'], "type"),
    "data alone, not JSON": ([b"data", b"\xff\xfe"], "type"),
    "data alone, an object": ([b"data", b'{"agent":"a"}'], "type"),
    "structured, broken": ([b"data", b'{"type":"t","specversion":"1.0",'], "data"),
    "structured, no version": ([b"data", b'{"type":"t","data":1}'], "specversion"),
    "structured, other version": ([b"data", b'{"type":"t","specversion":"0.3","data":1}'], "specversion"),
    "structured, type null": ([b"data", b'{"type":null,"specversion":"1.0","data":1}'], "type"),
    "structured, no data": ([b"data", b'{"type":"t","specversion":"1.0"}'], "data"),
    "structured, both data": ([b"data", b'{"type":"t","specversion":"1.0","data":1,"data_base64":""}'], "data"),
    "structured, bad base64": ([b"data", b'{"type":"t","specversion":"1.0","data_base64":"*"}'], "data"),
    "structured, base64 no text": ([b"data", b'{"type":"t","specversion":"1.0","data_base64":1}'], "data"),
    "structured, attribute is a list": ([b"data", b'{"type":"t","specversion":"1.0","id":[],"data":1}'], "id"),
    "structured, attribute broken": (
        [b"data", b'{"type":"t","specversion":"1.0","id":99999999999999999999,"data":1}'],
        "id",
    ),
    "structured, long attribute": (
        [b"data", b'{"type":"t","specversion":"1.0","data":1,"id":"' + b"x" * 4097 + b'"}'],
        "id",
    ),
    "structured, msgpack as JSON": (
        [b"data", b'{"type":"t","specversion":"1.0","data":1,"datacontenttype":"application/msgpack"}'],
        "data",
    ),
    "structured, a bomb": (
        [b"data", b'{"type":"t","specversion":"1.0","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
        "data",
    ),
}


@pytest.mark.parametrize(("fields", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_entries_are_refused_by_field(fields: list[bytes], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(ENTRY, fields, namespace="mine")
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def test_limits_are_inclusive() -> None:
    long = "x" * MAX_ATTRIBUTE_BYTES
    envelope = parse(ENTRY, [b"type", long.encode(), b"data", b"1" * MAX_DATA_BYTES])
    assert envelope.type == long
    document = {"type": "t", "specversion": "1.0", "data_base64": base64.b64encode(b"x" * MAX_DATA_BYTES).decode()}
    assert len(parse(ENTRY, [b"data", json.dumps(document).encode()]).data) == MAX_DATA_BYTES


def test_structured_data_may_be_as_deep_as_binary_data() -> None:
    for levels, readable in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        data = b"[" * levels + b"]" * levels
        entry = [b"data", b'{"type":"t","specversion":"1.0","data":' + data + b"}"]
        if readable:
            assert parse(ENTRY, entry).data == data
        else:
            with pytest.raises(InvalidInput, match="deeper"):
                parse(ENTRY, entry)


def test_an_event_written_by_dapr_is_read() -> None:
    document = {
        "data": {"agent": "researcher", "input": "Redis Streams"},
        "datacontenttype": "application/json",
        "id": "5929aaac-a5e2-4ca1-859c-edfe73f11565",
        "pubsubname": "weft",
        "source": "shop",
        "specversion": "1.0",
        "time": "2026-11-21T02:00:00Z",
        "topic": "weft:tasks",
        "traceid": "00-80e1afed08e019fc1110464cfa66635c-7a085853722dc6d2-01",
        "traceparent": "00-80e1afed08e019fc1110464cfa66635c-7a085853722dc6d2-01",
        "tracestate": "",
        "type": "weft.task.submit",
    }
    entry = {b"data": json.dumps(document).encode(), b"metadata": b'{"ttlInSeconds":"60"}'}
    envelope = parse(ENTRY, entry)
    assert (envelope.id, envelope.source, envelope.type) == (document["id"], "shop", "weft.task.submit")
    assert envelope.extensions == {
        "pubsubname": "weft",
        "topic": "weft:tasks",
        "traceid": document["traceid"],
    }
    assert decode(envelope.data) == document["data"]


def test_structured_attributes_must_be_text() -> None:
    envelope = parse(
        ENTRY, [b"data", b'{"type":"t","specversion":"1.0","data":1,"n":7,"yes":true,"none":null,"id":null}']
    )
    assert envelope.extensions == {"n": "7", "yes": "true"}
    assert envelope.id == ENTRY


def test_data_in_an_event_with_a_type_is_never_unwrapped() -> None:
    inner = b'{"type":"evil","specversion":"1.0","data":1,"replyto":"other"}'
    envelope = parse(ENTRY, [b"type", b"t", b"data", inner])
    assert (envelope.type, envelope.data) == ("t", inner)
    assert reply_address([b"type", b"t", b"data", inner]) == ""


REPLY_ADDRESSES = {
    "binary": ([b"type", b"t", b"data", b"\xff", b"replyto", b"my:answers"], "my:answers"),
    "no type": ([b"replyto", b"my:answers"], "my:answers"),
    "other attributes unreadable": ([b"\xff", b"\xff", b"id", b"\0", b"replyto", b"a"], "a"),
    "odd": ([b"replyto", b"a", b"type"], "a"),
    "absent": ([b"type", b"t", b"data", b"{}"], ""),
    "not UTF-8": ([b"replyto", b"\xff"], ""),
    "control": ([b"replyto", b"a\nb"], ""),
    "long": ([b"replyto", b"a" * 4097], ""),
    "in the namespace": ([b"replyto", b"weft:tasks"], ""),
    "in this namespace": ([b"replyto", b"mine:{0}:agent"], ""),
    "structured": ([b"data", b'{"type":"t","specversion":"1.0","replyto":"my:answers","data":1}'], "my:answers"),
    "structured, escaped": ([b"data", b'{"replyto":"a\\u0062"}'], "ab"),
    "structured, data cut": ([b"data", b'{"replyto":"a","data":{"x":['], "a"),
    "structured, data broken before it": ([b"data", b'{"data":{"x":nope},"replyto":"a"}'], "a"),
    "structured, a bomb in the data": (
        [b"data", b'{"data":' + b"[" * 1000 + b"]" * 1000 + b',"replyto":"a"}'],
        "a",
    ),
    "structured, inside the data only": ([b"data", b'{"data":{"replyto":"a"},"x":'], ""),
    "structured, as text": ([b"data", b'{"data":"\\"replyto\\":\\"a\\"","x":'], ""),
    "structured, cut in the address": ([b"data", b'{"replyto":"my:ans'], ""),
    "structured, a number": ([b"data", b'{"replyto":7}'], ""),
    "structured, in the namespace": ([b"data", b'{"replyto":"weft:tasks","x":'], ""),
    "structured, from Dapr": ([b"data", b'{"replyto":"a","x":', b"metadata", b"{}"], "a"),
}


@pytest.mark.parametrize(("fields", "address"), REPLY_ADDRESSES.values(), ids=REPLY_ADDRESSES.keys())
def test_the_reply_address_survives_an_unreadable_command(fields: list[bytes], address: str) -> None:
    assert reply_address(fields, namespace="mine") == address


@pytest.mark.parametrize("filler", [b'"\\"' * 500_000, b'"\\' * 700_000, b'{"a":"' * 200_000, b'"' + b"\\" * 10**6])
def test_looking_for_a_reply_address_takes_linear_time(filler: bytes) -> None:
    # A quadratic look would run into the limit of the whole test.
    assert reply_address([b"data", b'{"replyto":"a","x":' + filler]) == "a"


TIMES = {
    "1970-01-01T00:00:00Z": 0,
    "2026-11-21T02:00:00Z": 1795226400000,
    "2026-11-21T04:00:00.5+02:00": 1795226400500,
    "2026-11-21t02:00:00.123456789z": 1795226400123,
}


@pytest.mark.parametrize(("text", "expected"), TIMES.items())
def test_timestamps_are_read(text: str, expected: int) -> None:
    assert epoch_ms("deadline", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "1795226400000",
        "2026-11-21",
        "2026-11-21T02:00:00",
        "2026-13-21T02:00:00Z",
        "2026-11-21T25:00:00Z",
        "2026-11-21T02:00:00+99:00",
        "\N{ARABIC-INDIC DIGIT TWO}026-11-21T02:00:00Z",
        "9999-12-31T23:59:59-23:59x",
    ],
)
def test_other_times_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="RFC 3339") as caught:
        epoch_ms("deadline", text)
    assert caught.value.field == "deadline"


@given(st.integers(0, 4_000_000_000_000))
def test_timestamps_round_trip(at: int) -> None:
    assert epoch_ms("time", rfc3339(at)) == at
