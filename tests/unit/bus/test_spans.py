"""The spans of commands, deliveries, ended tasks and stored batches: their names, parents and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from runtime_core.bus import spans
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.keys import Keys
from runtime_core.telemetry import trace_context
from runtime_core.telemetry.spans import CONSUMER_GROUP, DESTINATION, MESSAGE_ID, NO_SPAN, Span, Unsampled

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED.removesuffix("01") + "00"


class Made(dict[str, Any]):
    """A span, as it was requested."""

    traceparent = SAMPLED


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """The spans that are requested, without an SDK."""
    found: list[Made] = []

    @contextmanager
    def span(name: str, kind: str, attributes: Mapping[str, object], **more: object) -> Iterator[Span]:
        found.append(Made(name=name, kind=kind, attributes=dict(attributes), **more))
        yield NO_SPAN

    def ended_span(name: str, kind: str, attributes: Mapping[str, object], **more: object) -> Made:
        found.append(Made(name=name, kind=kind, attributes=dict(attributes), **more))
        return found[-1]

    monkeypatch.setattr(spans, "span", span)
    monkeypatch.setattr(spans, "ended_span", ended_span)
    return found


def taken(stream: str, context: bytes = b"") -> Delivery:
    delivery = Delivery(0, stream, b"1-1")
    delivery.task, delivery.run, delivery.context = "t", "r", context
    return delivery


def test_a_command_is_a_child_of_its_publisher(made: list[Made]) -> None:
    with spans.command_span("state-manager", entry="1-1", task="t", traceparent=SAMPLED, tracestate="a=b"):
        pass
    [one] = made
    assert (one["name"], one["kind"], one["parent"], one["state"]) == ("process tasks", "CONSUMER", SAMPLED, "a=b")
    assert (one["attributes"][CONSUMER_GROUP], one["attributes"][MESSAGE_ID]) == ("state-manager", "1-1")


def test_a_delivery_has_as_many_links_as_an_sdk_keeps(made: list[Made]) -> None:
    links = [SAMPLED] * (spans.LINKS_MAX + 5)
    with spans.delivery_span(taken("tool:gpu"), Keys("weft", 2), "me", traceparent=SAMPLED, links=links):
        pass
    [one] = made
    assert (one["name"], len(one["links"])) == ("process tool:gpu", spans.LINKS_MAX)
    assert (one["attributes"][DESTINATION], one["attributes"][CONSUMER_GROUP]) == ("tool:gpu", "tool-handler")


def test_a_call_is_below_the_span_in_its_context(made: list[Made]) -> None:
    delivery = taken("tool", f'{{"traceparent":"{SAMPLED}","tracestate":"a=b"}}'.encode())
    with spans.call_span(delivery, Keys("weft", 0), "me"):
        assert delivery.span is NO_SPAN
    assert (made[0]["parent"], made[0]["state"]) == (SAMPLED, "a=b")


def test_a_call_of_an_unsampled_trace_makes_no_span(made: list[Made]) -> None:
    delivery = taken("tool", f'{{"traceparent":"{UNSAMPLED}"}}'.encode())
    assert isinstance(spans.call_span(delivery, Keys("weft", 0), "me"), Unsampled)
    assert made == []


def ended(traceparent: str, *, again: bool = False) -> None:
    spans.task_span(
        "weft", "t", traceparent=traceparent, agent="writer", status="completed", steps=3, created_ms=1, ended_ms=2,
        again=again,
    )  # fmt: skip


def test_a_task_without_a_publishers_trace_is_a_root(made: list[Made]) -> None:
    own = trace_context.of_task("weft", "t")
    root = trace_context.written(own.trace, own.span, own.flags)
    ended(root)
    ended(root, again=True)
    ended(SAMPLED)
    assert [(one["parent"], one["ids"]) for one in made] == [("", own), (root, None), (SAMPLED, None)]
    assert (made[0]["name"], made[0]["began_ns"], made[0]["ended_ns"]) == ("task writer", 1_000_000, 2_000_000)


def batch(made: list[Made], ends: Sequence[tuple[str, str, str]]) -> list[Made]:
    made.clear()
    spans.record_spans("weft", "recorder", ends, entries=7, seconds=0.5)
    return made


def test_a_stored_batch_and_its_tasks_link_to_each_other(made: list[Made]) -> None:
    whole, *parts = batch(made, [("t", "1-1", SAMPLED), ("u", "2-1", UNSAMPLED)])
    assert (whole["links"], "parent" in whole) == ([SAMPLED], False)
    assert whole["ended_ns"] - whole["began_ns"] == 500_000_000
    assert [(part["parent"], part["links"], part["attributes"][MESSAGE_ID]) for part in parts] == [
        (SAMPLED, [whole.traceparent], "1-1")
    ]
    assert batch(made, [("u", "2-1", UNSAMPLED)]) == []
