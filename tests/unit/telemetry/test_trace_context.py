"""Trace context as text."""

from __future__ import annotations

import msgspec
import pytest

from runtime_core.telemetry import trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_and_written() -> None:
    ids = trace_context.read(VALID)
    assert ids == trace_context.Ids(int(TRACE, 16), int(SPAN, 16), 1)
    assert trace_context.written(ids.trace, ids.span, ids.flags) == VALID


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"{VALID}-more",
        f"{VALID}\n",
    ],
)
def test_a_malformed_traceparent_counts_as_none(wrong: str) -> None:
    assert trace_context.read(wrong) is None
    assert trace_context.stated(msgspec.json.encode({"traceparent": wrong, "tracestate": "a=1"})) == ("", "")


def test_a_later_version_may_have_more_fields() -> None:
    assert trace_context.read(f"01-{TRACE}-{SPAN}-01-more") == trace_context.read(VALID)


def test_a_restated_context_keeps_its_trace_and_everything_else() -> None:
    context = msgspec.json.encode({"session_id": "s", "traceparent": VALID, "tracestate": "a=1"})
    assert trace_context.stated(context) == (VALID, "a=1")
    other = VALID.replace(SPAN, "00f067aa0ba902b7")
    again = trace_context.restated(context, other)
    assert msgspec.json.decode(again) == {"session_id": "s", "traceparent": other, "tracestate": "a=1"}
    assert trace_context.restated(b"", other) == b'{"traceparent":"%b"}' % other.encode()
    assert trace_context.restated(context, "") is context
    # Text of the user's is no trace of the task's.
    assert trace_context.stated(b'{"metadata":{"traceparent":"%b"}}' % VALID.encode()) == ("", "")
    assert trace_context.stated(b'{"traceparent":1}') == ("", "")


def test_each_task_and_each_entry_has_its_own_ids() -> None:
    made = [trace_context.of_task(*each) for each in (("weft", "t-1"), ("weft", "t-2"), ("other", "t-1"))]
    assert len({ids.trace for ids in made}) == len({ids.span for ids in made}) == 3
    assert all(0 < ids.trace < 2**128 and 0 < ids.span < 2**64 for ids in made)
    assert trace_context.span_of_entry("a", "1-0") != trace_context.span_of_entry("a", "1-1")
