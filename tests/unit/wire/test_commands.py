"""Parsed commands are valid, errors name the path of a mistake, facts match the wire's documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.errors import InvalidInput, Rejected
from runtime_core.state_manager import schedules
from runtime_core.wire.codec import MSGPACK, decode
from runtime_core.wire.commands import (
    CANCEL,
    PUBLISH,
    SIGNAL,
    SUBMIT,
    Cancellation,
    Signal,
    Submission,
    data_of,
    parse_cancel,
    parse_publish,
    parse_signal,
    parse_submit,
)
from runtime_core.wire.envelope import Envelope, parse, to_fields
from runtime_core.wire.events import accepted, rejected
from runtime_core.wire.ids import task_id_of

AT = 1795226400000.0
WIRE = Path(__file__).parents[3] / "docs" / "wire.md"


def command(type: str, data: object, **attributes: str) -> Envelope:
    raw = data if isinstance(data, bytes) else msgspec.json.encode(data)
    return msgspec.structs.replace(Envelope(id="e-1", type=type, data=raw), **attributes)


def submit(data: object, **attributes: str) -> Submission:
    return parse_submit(command(SUBMIT, data, **attributes))


MINIMAL = {"agent": "researcher", "input": "Redis Streams"}


def test_a_submit_needs_only_an_agent_and_an_input() -> None:
    seen = submit(MINIMAL)
    assert seen == Submission(
        task_id="e-1",
        source="anonymous",
        event_id="e-1",
        digest=seen.digest,
        agent="researcher",
        input_json=b'"Redis Streams"',
        in_turn=True,
    )
    assert seen.carried() == b""
    assert re.fullmatch("[0-9a-f]{16}", seen.digest)


def test_a_submit_is_parsed_with_all_its_fields() -> None:
    seen = submit(
        MINIMAL
        | {
            "key": "k",
            "task_id": "t-1",
            "session_id": "s",
            "conf": {"max_steps": 5, "timeout_seconds": 1.5, "max_cost": 2, "streaming_mode": "core"},
            "hooks": {"pre_model": ["redact", "log"]},
            "metadata": {"order": [1, {"a": None}]},
        },
        source="shop",
        partitionkey="customer-7",
        replyto="my:answers",
        traceparent="00-1",
        tracestate="a=1",
        tenant="acme",
        deadline="2026-11-21T02:00:00Z",
    )
    assert seen == Submission(
        task_id="t-1",
        agent="researcher",
        input_json=b'"Redis Streams"',
        key="k",
        session_id="s",
        max_steps=5,
        timeout_ms=1500,
        limits=b'{"cost":2.0}',
        streamed=2,
        hooks={"pre_model": ["redact", "log"]},
        metadata=b'{"order":[1,{"a":null}]}',
        source="shop",
        event_id="e-1",
        digest=seen.digest,
        replyto="my:answers",
        traceparent="00-1",
        tracestate="a=1",
        tenant="acme",
        deadline=1795226400000,
        partition_key="customer-7",
        in_turn=True,
    )
    assert decode(seen.carried()) == {
        "traceparent": "00-1",
        "tracestate": "a=1",
        "session_id": "s",
        "metadata": {"order": [1, {"a": None}]},
        "tenant": "acme",
        "deadline": 1795226400.0,
        "hooks": {"pre_model": ["redact", "log"]},
    }


def test_null_counts_as_absent_for_what_is_optional() -> None:
    names = ("key", "task_id", "session_id", "conf", "hooks", "metadata")
    conf = dict.fromkeys(("max_steps", "timeout_seconds", "max_cost", "streaming_mode", "engine"))
    plain = submit(MINIMAL)
    for data in (MINIMAL | dict.fromkeys(names), MINIMAL | {"conf": conf}):
        assert submit(data) == plain


def test_a_priority_is_kept() -> None:
    assert submit(MINIMAL | {"conf": {"priority": 9}}).priority == 9
    assert submit(MINIMAL).priority == 5


@pytest.mark.parametrize("tenant", ["a\nb", "x" * 257])
def test_a_tenant_is_a_short_plain_text(tenant: str) -> None:
    """It becomes a line of the task's header."""
    with pytest.raises(InvalidInput) as error:
        submit(MINIMAL, tenant=tenant)
    assert error.value.field == "tenant"


def test_input_may_be_null_but_not_absent() -> None:
    assert submit({"agent": "a", "input": None}).input_json == b"null"
    with pytest.raises(InvalidInput, match=r"data\.input: is missing"):
        submit({"agent": "a"})


BAD_SUBMITS: dict[str, tuple[object, str, str]] = {
    "not an object": ([1], "data", "[1]"),
    "null": (None, "data", "null"),
    "empty": (b"", "data", "empty"),
    "not JSON": (b"{", "data", "JSON"),
    "no agent": ({"input": 1}, "data.agent", "missing"),
    "agent is a number": ({"agent": 7, "input": 1}, "data.agent", "7"),
    "agent is empty": ({"agent": "", "input": 1}, "data.agent", '""'),
    "agent is long": ({"agent": "a" * 257, "input": 1}, "data.agent", "…"),
    "agent holds a control": ({"agent": "a\n", "input": 1}, "data.agent", "control"),
    "unknown field": (MINIMAL | {"agnet": "a"}, "data.agnet", "unknown; choose from agent, input"),
    "unknown field of many lines": (MINIMAL | {"a\nb": 1}, r"data.a\nb", "unknown"),
    "key is a number": (MINIMAL | {"key": 1}, "data.key", "1"),
    "key is empty": (MINIMAL | {"key": ""}, "data.key", '""'),
    "key is reserved": (MINIMAL | {"key": "~r"}, "data.key", "~r"),
    "task id with a space": (MINIMAL | {"task_id": "a b"}, "data.task_id", '"a b" is not a task id'),
    "task id with a slash": (MINIMAL | {"task_id": "a/b"}, "data.task_id", "a/b"),
    "task id with braces": (MINIMAL | {"task_id": "{0}"}, "data.task_id", "{0}"),
    "task id is empty": (MINIMAL | {"task_id": ""}, "data.task_id", '""'),
    "task id is a number": (MINIMAL | {"task_id": 7}, "data.task_id", "7"),
    "task id ends in a line break": (MINIMAL | {"task_id": "a\n"}, "data.task_id", "task id"),
    "session id with NUL": (MINIMAL | {"session_id": "a\0"}, "data.session_id", "control"),
    "conf is a list": (MINIMAL | {"conf": []}, "data.conf", "[]"),
    "unknown conf": (
        MINIMAL | {"conf": {"max_step": 1}},
        "data.conf.max_step",
        "unknown; choose from max_steps, timeout_seconds, max_cost, max_tokens, engine, engine_wait_seconds, "
        "streaming_mode",
    ),
    "max_steps 0": (MINIMAL | {"conf": {"max_steps": 0}}, "data.conf.max_steps", "0 is not"),
    "priority 0": (MINIMAL | {"conf": {"priority": 0}}, "data.conf.priority", "0 is not a whole number from 1 to 9"),
    "priority 10": (MINIMAL | {"conf": {"priority": 10}}, "data.conf.priority", "10 is not"),
    "max_steps text": (MINIMAL | {"conf": {"max_steps": "5"}}, "data.conf.max_steps", '"5" is not'),
    "max_steps true": (MINIMAL | {"conf": {"max_steps": True}}, "data.conf.max_steps", "true is not"),
    "max_steps 1.5": (MINIMAL | {"conf": {"max_steps": 1.5}}, "data.conf.max_steps", "1.5 is not"),
    "max_steps huge": (MINIMAL | {"conf": {"max_steps": 2**63}}, "data.conf.max_steps", "9223372036854775808"),
    "timeout 0": (MINIMAL | {"conf": {"timeout_seconds": 0}}, "data.conf.timeout_seconds", "0 is not"),
    "timeout below": (MINIMAL | {"conf": {"timeout_seconds": -1.5}}, "data.conf.timeout_seconds", "-1.5 is not"),
    "timeout huge": (MINIMAL | {"conf": {"timeout_seconds": 1e300}}, "data.conf.timeout_seconds", "at most"),
    "timeout text": (MINIMAL | {"conf": {"timeout_seconds": "1s"}}, "data.conf.timeout_seconds", '"1s" is not'),
    "cost true": (MINIMAL | {"conf": {"max_cost": True}}, "data.conf.max_cost", "true is not"),
    "engine wait below": (
        MINIMAL | {"conf": {"engine_wait_seconds": -1}},
        "data.conf.engine_wait_seconds",
        "-1 is not a number from 0 up and at most 1000000000",
    ),
    "engine wait text": (
        MINIMAL | {"conf": {"engine_wait_seconds": "1"}},
        "data.conf.engine_wait_seconds",
        '"1" is not',
    ),
    "no engine": (
        MINIMAL | {"conf": {"engine": "mars"}},
        "data.conf.engine",
        '"mars" is not an engine; choose from local, ray, spark',
    ),
    "engine is a list": (MINIMAL | {"conf": {"engine": ["ray"]}}, "data.conf.engine", '["ray"] is not an engine'),
    "run mode is gone": (MINIMAL | {"conf": {"run_mode": "tree"}}, "data.conf.run_mode", "unknown"),
    "streaming mode is a flag": (
        MINIMAL | {"conf": {"streaming_mode": True}},
        "data.conf.streaming_mode",
        "true is no",
    ),
    "hooks is a list": (MINIMAL | {"hooks": []}, "data.hooks", "[]"),
    "hook is text": (MINIMAL | {"hooks": {"pre": "a"}}, "data.hooks.pre", '"a" is not a list'),
    "hook name is a number": (MINIMAL | {"hooks": {"pre": ["a", 7]}}, "data.hooks.pre.1", "7 is not"),
    "hook point is empty": (MINIMAL | {"hooks": {"": ["a"]}}, "data.hooks.", '""'),
    "metadata is text": (MINIMAL | {"metadata": "a"}, "data.metadata", '"a" is not an object'),
}


@pytest.mark.parametrize(("data", "field", "message"), BAD_SUBMITS.values(), ids=BAD_SUBMITS.keys())
def test_bad_submits_are_refused_by_path_and_value(data: object, field: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        submit(data)
    assert caught.value.field == field
    assert message in caught.value.message
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_bad_deadline_is_refused() -> None:
    with pytest.raises(InvalidInput, match='deadline: "tomorrow" is not'):
        submit(MINIMAL, deadline="tomorrow")


def test_a_command_of_another_type_is_refused() -> None:
    for read in (parse_submit, parse_cancel, parse_signal, parse_publish):
        with pytest.raises(InvalidInput, match="type"):
            read(command("weft.task.other", MINIMAL))


def test_the_task_id_is_the_event_id_only_where_no_source_is_named() -> None:
    assert submit(MINIMAL, id="t-1").task_id == "t-1"
    assert submit(MINIMAL, id="t-1", source="shop").task_id == task_id_of("shop", "t-1")
    assert submit(MINIMAL, id="t-1", source="shop") != submit(MINIMAL, id="t-1", source="other")


@pytest.mark.parametrize("id", ["a/b", "order 7", "a:b", "~x", "é", "x" * 300])
def test_an_event_id_that_is_not_a_task_id_is_hashed(id: str) -> None:
    assert submit(MINIMAL, id=id).task_id == task_id_of("anonymous", id)


def test_equal_submits_have_one_digest_however_they_are_written() -> None:
    data = {"agent": "a", "input": {"x": 1, "y": [1.5, "é"]}}
    base = submit(data).digest
    assert submit(b'{ "input": {"y": [1.5, "\\u00e9"], "x": 1},\n "agent": "a" }').digest == base
    packed = command(SUBMIT, msgspec.msgpack.encode(data), datacontenttype=MSGPACK)
    assert parse_submit(packed).digest == base
    again = {"time": "2026-11-21T02:00:00Z", "replyto": "r", "traceparent": "00-1", "id": "other"}
    assert submit(data, **again).digest == base
    assert submit(data | {"input": {"x": 2, "y": [1.5, "é"]}}).digest != base
    assert submit(data | {"task_id": "t"}).digest != base


@given(
    st.dictionaries(
        st.sampled_from([*MINIMAL, "conf", "hooks", "key", "task_id", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
            max_leaves=5,
        ),
    )
)
def test_any_object_is_a_submission_or_invalid_input(data: dict[str, object]) -> None:
    refusal = None
    try:
        seen = submit(data)
    except InvalidInput as error:
        refusal = error
    if refusal:
        assert refusal.field.startswith("data")
    else:
        assert decode(seen.input_json) == data["input"]


def test_a_cancel_is_parsed() -> None:
    seen = parse_cancel(command(CANCEL, {"task_id": "t-1", "reason": "changed my mind"}, replyto="r"))
    assert seen == Cancellation(task_id="t-1", reason="changed my mind", event_id="e-1", replyto="r")
    assert parse_cancel(command(CANCEL, {"task_id": "t-1"})).reason == ""


def test_a_signal_is_parsed() -> None:
    seen = parse_signal(command(SIGNAL, {"task_id": "t-1", "request_id": "r/2", "value": {"ok": True}}))
    assert seen == Signal(task_id="t-1", request_id="r/2", value_json=b'{"ok":true}', event_id="e-1")


@pytest.mark.parametrize(
    ("read", "type", "data", "field"),
    [
        (parse_cancel, CANCEL, {}, "data.task_id"),
        (parse_cancel, CANCEL, {"task_id": "a b"}, "data.task_id"),
        (parse_cancel, CANCEL, {"task_id": "t", "reason": 1}, "data.reason"),
        (parse_cancel, CANCEL, {"task_id": "t", "why": "x"}, "data.why"),
        (parse_cancel, CANCEL, "t", "data"),
        (parse_signal, SIGNAL, {"request_id": "q", "value": 1}, "data.task_id"),
        (parse_signal, SIGNAL, {"task_id": "t", "value": 1}, "data.request_id"),
        (parse_signal, SIGNAL, {"task_id": "t", "request_id": 1, "value": 1}, "data.request_id"),
        (parse_signal, SIGNAL, {"task_id": "t", "request_id": "q"}, "data.value"),
        (parse_publish, PUBLISH, {"data": 1}, "data.topic"),
        (parse_publish, PUBLISH, {"topic": "a b", "data": 1}, "data.topic"),
        (parse_publish, PUBLISH, {"topic": "news"}, "data.data"),
        (parse_publish, PUBLISH, {"topic": "news", "data": 1, "source": 1}, "data.source"),
        (parse_publish, PUBLISH, {"topic": "news", "data": 1, "to": "x"}, "data.to"),
    ],
)
def test_wrong_fields_of_cancels_and_signals_are_named(
    read: Callable[[Envelope], object], type: str, data: object, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(command(type, data))
    assert caught.value.field == field


def test_a_repeated_publish_has_the_same_message_id() -> None:
    seen = parse_publish(command(PUBLISH, {"topic": "news", "source": "k", "data": [1]}, source="shop"))
    assert (seen.topic, seen.topic_source, seen.data_json) == ("news", "k", b"[1]")
    again = parse_publish(command(PUBLISH, {"topic": "news", "source": "k", "data": [1]}, source="shop"))
    other = parse_publish(command(PUBLISH, {"topic": "news", "source": "k", "data": [1]}, source="yard"))
    assert seen.message_id == again.message_id != other.message_id


REFUSAL = InvalidInput("data.agent", 'unknown agent "resercher"')
FACTS: dict[str, tuple[Envelope, str, object]] = {
    "accepted": (accepted("t-1", at_ms=AT, cause="e-1"), "weft.task.accepted", {"task_id": "t-1"}),
    "rejected": (
        rejected("7-0", REFUSAL, at_ms=AT),
        "weft.task.rejected",
        {"field": "data.agent", "message": 'unknown agent "resercher"'},
    ),
    "overloaded": (
        rejected("7-0", Rejected("overloaded", "x", 1.5, "t-1"), at_ms=AT),
        "weft.task.rejected",
        {"task_id": "t-1", "field": "overloaded", "message": "x", "retry_after_seconds": 1.5},
    ),
}


@pytest.mark.parametrize(("fact", "type", "data"), FACTS.values(), ids=FACTS.keys())
def test_a_fact_survives_encoding_and_parsing(fact: Envelope, type: str, data: Mapping[str, object]) -> None:
    assert (fact.type, fact.source, fact.time) == (type, "weft", "2026-11-21T02:00:00.000Z")
    assert decode(fact.data) == data
    assert fact.taskid == data.get("task_id", "")
    assert parse("0-1", to_fields(fact)) == fact


def test_the_same_happening_has_the_same_event_id() -> None:
    assert accepted("t-1", at_ms=AT).id == accepted("t-1", at_ms=AT + 1).id
    assert rejected("7-0", REFUSAL, at_ms=AT).id == rejected("7-0", REFUSAL, at_ms=AT + 1).id
    assert rejected("7-0", REFUSAL, at_ms=AT).id != rejected("8-0", REFUSAL, at_ms=AT).id
    assert len({fact.id for fact, _, _ in FACTS.values()}) == len(FACTS)


def wire_commands() -> list[str]:
    """Return the redis-cli lines in the wire's documentation that write an event, each as one line."""
    text = WIRE.read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith("redis-cli XADD weft:tasks")]


def test_the_commands_in_the_documentation_are_valid() -> None:
    readers: dict[str, Callable[[Envelope], object]] = {
        SUBMIT: parse_submit,
        CANCEL: parse_cancel,
        SIGNAL: parse_signal,
        PUBLISH: parse_publish,
        schedules.SET: lambda envelope: schedules.parse_set(data_of(envelope), int(AT)),
    }
    types = set()
    for line in wire_commands():
        words = shlex.split(line)
        envelope = parse("7-0", [word.encode() for word in words[4:]])
        readers[envelope.type](envelope)
        types.add(envelope.type)
    assert types == set(readers)
