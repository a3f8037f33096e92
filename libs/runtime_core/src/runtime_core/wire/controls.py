"""The other commands of clients as typed values: cancel a task, answer its question, publish a message."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runtime_core import codec
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.ids import checked_topic, fingerprint
from runtime_core.wire.commands import body_of, checked_task_id, optional_name, required_name
from runtime_core.wire.envelope import ANONYMOUS, Envelope

CANCEL = "weft.task.cancel"
SIGNAL = "weft.task.signal"
PUBLISH = "weft.topic.publish"


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.cancel`."""

    task_id: str
    reason: str = ""
    source: str = ANONYMOUS
    event_id: str
    replyto: str = ""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.task.signal`: the answer to a question."""

    task_id: str
    request_id: str
    value_json: bytes
    source: str = ANONYMOUS
    event_id: str
    replyto: str = ""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A valid `weft.topic.publish`: a message to all subscribers of a topic."""

    topic: str
    topic_source: str
    """The instance key for each agent that gets it; empty: a new instance."""
    data_json: bytes
    message_id: str
    """Derived from source and id."""
    traceparent: str = ""
    tenant: str = ""


def parse_cancel(envelope: Envelope) -> Cancellation:
    """Return the cancellation in a `weft.task.cancel`. Raises InvalidInput."""
    data = body_of(envelope, CANCEL, ("task_id", "reason"))
    reason = data.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise InvalidInput("data.reason", f"{quoted(reason)} is not text")
    return Cancellation(
        task_id=_required_task_id(data),
        reason=reason or "",
        source=envelope.source,
        event_id=envelope.id,
        replyto=envelope.replyto,
    )


def parse_signal(envelope: Envelope) -> Signal:
    """Return the answer in a `weft.task.signal`. Raises InvalidInput."""
    data = body_of(envelope, SIGNAL, ("task_id", "request_id", "value"))
    task_id = _required_task_id(data)
    request_id = required_name(data, "request_id")
    if "value" not in data:
        raise InvalidInput("data.value", "is missing; send `null` for an empty answer")
    return Signal(
        task_id=task_id,
        request_id=request_id,
        value_json=codec.encode(data["value"]),
        source=envelope.source,
        event_id=envelope.id,
        replyto=envelope.replyto,
    )


def parse_publish(envelope: Envelope) -> Publication:
    """Return the message in a `weft.topic.publish`. Raises InvalidInput."""
    data = body_of(envelope, PUBLISH, ("topic", "source", "data"))
    topic = required_name(data, "topic")
    try:
        checked_topic(topic)
    except InvalidInput as error:
        raise InvalidInput("data.topic", error.message) from None
    if "data" not in data:
        raise InvalidInput("data.data", "is missing; send `null` for an empty message")
    return Publication(
        topic=topic,
        topic_source=optional_name(data, "source"),
        data_json=codec.encode(data["data"]),
        message_id=fingerprint(envelope.source, envelope.id, digits=32),
        traceparent=envelope.traceparent,
        tenant=envelope.tenant,
    )


def _required_task_id(data: Mapping[str, object]) -> str:
    if data.get("task_id") is None:
        raise InvalidInput("data.task_id", "is missing; name the task")
    return checked_task_id(data["task_id"])
