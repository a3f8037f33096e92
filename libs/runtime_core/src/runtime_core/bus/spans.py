"""Spans for sending an event, handling it, and the end of its task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.keys import Keys, group_of
from runtime_core.telemetry import trace_context
from runtime_core.telemetry.redaction import Attribute, redactor
from runtime_core.telemetry.spans import (
    AGENT_NAME,
    ATTEMPT,
    BATCH_MESSAGES,
    CLIENT_ID,
    CONSUMER_GROUP,
    DELIVERIES,
    DESTINATION,
    DESTINATION_PARTITION,
    MESSAGE_CONVERSATION,
    MESSAGE_ID,
    MESSAGING_OPERATION,
    MESSAGING_OPERATION_TYPE,
    MESSAGING_SYSTEM,
    RUN,
    STATUS,
    STEPS,
    Span,
    Unsampled,
    current_traceparent,
    ended_span,
    span,
    task_ids,
    task_traceparent,
    tracing,
)
from runtime_core.telemetry.trace_context import Ids

SYSTEM = "redis"
SEND = "send"
PROCESS = "process"
TASKS = "tasks"
TOPICS = "topics"
RECORD = "record"
LINKS_MAX = 128
"""The default number of links that an OpenTelemetry SDK keeps for one span."""


@contextmanager
def send_span(destination: str, *, message: str, task: str = "", traceparent: str = "") -> Iterator[Span]:
    """Trace a submit or a message as `send <destination>`; `traceparent`, if given, is the parent."""
    attributes = {**_operation(SEND, SEND, destination), MESSAGE_ID: message}
    if task:
        attributes[MESSAGE_CONVERSATION] = task
    name = f"{SEND} {destination}"
    with span(name, "PRODUCER", attributes, parent=traceparent, inner=not traceparent, make=Span) as made:
        yield made


@contextmanager
def sending(destination: str, *, message: str, task: str = "") -> Iterator[str]:
    """Trace a message, and yield the traceparent that it carries; empty if nothing is traced.

    It is that of a `send_span`. If this process traces only through a library's own SDK, it is that of the library's
    span.
    """
    if not tracing():
        yield current_traceparent()
        return
    with send_span(destination, message=message, task=task) as made:
        yield made.traceparent or current_traceparent()


@contextmanager
def command_span(group: str, *, entry: str, task: str, traceparent: str, tracestate: str) -> Iterator[Span]:
    """Trace the handling of a command from an ingress stream as `process tasks`."""
    attributes = {
        **_operation(PROCESS, PROCESS, TASKS),
        CONSUMER_GROUP: group,
        MESSAGE_ID: entry,
        MESSAGE_CONVERSATION: task,
    }
    name = f"{PROCESS} {TASKS}"
    with span(name, "CONSUMER", attributes, parent=traceparent, state=tracestate, inner=False, make=Span) as made:
        yield made


@contextmanager
def delivery_span(
    delivery: Delivery, keys: Keys, owner: str, *, traceparent: str, tracestate: str = "", links: Sequence[str] = ()
) -> Iterator[Span]:
    """Trace the handling of a delivery, including its commit, as `process <stream>`."""
    attributes: dict[str, Attribute] = {
        **_operation(PROCESS, PROCESS, delivery.stream),
        DESTINATION_PARTITION: str(keys.partition),
        CONSUMER_GROUP: group_of(delivery.stream),
        CLIENT_ID: owner,
        MESSAGE_ID: delivery.entry.decode(),
        MESSAGE_CONVERSATION: delivery.task,
        RUN: delivery.run,
        ATTEMPT: delivery.attempt,
        DELIVERIES: delivery.deliveries,
    }
    with span(
        f"{PROCESS} {delivery.stream}",
        "CONSUMER",
        attributes,
        parent=traceparent,
        state=tracestate,
        inner=False,
        links=links[:LINKS_MAX],
        make=Span,
    ) as made:
        yield made


def unsampled_ids(delivery: Delivery, namespace: str) -> Ids | None:
    """Return the ids of a delivery's trace if it is not sampled, else None. Only for a process that traces."""
    ids = task_ids(namespace, delivery.task, trace_context.stated(delivery.context)[0] if delivery.context else "")
    return None if ids.flags & trace_context.SAMPLED else ids


def call_span(delivery: Delivery, keys: Keys, owner: str) -> AbstractContextManager[object]:
    """Trace a call as a `delivery_span` whose parent is in the delivery's context; events it causes are below it."""
    ids = unsampled_ids(delivery, keys.namespace)
    if ids is not None:
        return Unsampled(ids)
    traceparent, tracestate = trace_context.stated(delivery.context)
    traceparent = traceparent or task_traceparent(keys.namespace, delivery.task, "")
    return _call_span(delivery, keys, owner, traceparent, tracestate)


@contextmanager
def _call_span(delivery: Delivery, keys: Keys, owner: str, traceparent: str, tracestate: str) -> Iterator[Span]:
    with delivery_span(delivery, keys, owner, traceparent=traceparent, tracestate=tracestate) as made:
        delivery.span = made
        yield made


def task_span(
    namespace: str,
    task: str,
    *,
    traceparent: str,
    agent: str,
    status: str,
    steps: int,
    created_ms: float,
    ended_ms: float,
    error: str = "",
    again: bool = False,
) -> None:
    """Record the span of an ended task, `task <agent>`: a sibling of its turns, or root if its submit named no trace.

    `again`: the task had ended before, and the earlier span is the root; this one is below it.
    """
    found = task_ids(namespace, task, traceparent)
    if not found.flags & trace_context.SAMPLED:
        return
    name = redactor().text(agent)
    attributes: dict[str, Attribute] = {MESSAGE_CONVERSATION: task, AGENT_NAME: name, STATUS: status, STEPS: steps}
    parent = task_traceparent(namespace, task, traceparent)
    own = trace_context.of_task(namespace, task)
    is_root = found.trace == own.trace and not again
    ended_span(
        f"task {name}",
        "INTERNAL",
        attributes,
        began_ns=int(created_ms * 1_000_000),
        ended_ns=int(ended_ms * 1_000_000),
        parent="" if is_root else parent,
        ids=own if is_root else None,
        error=error,
    )


def record_spans(
    namespace: str, group: str, ended: Sequence[tuple[str, str, str]], *, entries: int, seconds: float
) -> None:
    """Record one span for a stored batch of the record, and one in the trace of each task that ended in it.

    `ended` has (task, entry, traceparent or empty) tuples. The spans of both kinds link to each other.
    """
    ended_ns = time.time_ns()
    began_ns = ended_ns - int(seconds * 1e9)
    kept = [each for each in ended if task_ids(namespace, each[0], each[2]).flags & trace_context.SAMPLED]
    if not kept:
        return
    parents = {task: task_traceparent(namespace, task, traceparent) for task, _, traceparent in kept}
    common = {**_operation(PROCESS, PROCESS, RECORD), CONSUMER_GROUP: group}
    batch = ended_span(
        f"{PROCESS} {RECORD}",
        "CONSUMER",
        {**common, BATCH_MESSAGES: entries},
        began_ns=began_ns,
        ended_ns=ended_ns,
        links=[parents[task] for task, _, _ in kept[:LINKS_MAX]],
    )
    for task, entry, _ in kept:
        ended_span(
            f"{PROCESS} {RECORD}",
            "CONSUMER",
            {**common, MESSAGE_ID: entry, MESSAGE_CONVERSATION: task},
            began_ns=began_ns,
            ended_ns=ended_ns,
            parent=parents[task],
            links=[batch.traceparent],
        )


def _operation(name: str, type: str, destination: str) -> dict[str, Attribute]:
    return {
        MESSAGING_SYSTEM: SYSTEM,
        MESSAGING_OPERATION: name,
        MESSAGING_OPERATION_TYPE: type,
        DESTINATION: destination,
    }
