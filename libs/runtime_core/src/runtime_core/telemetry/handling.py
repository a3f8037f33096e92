"""Which delivery is being handled: what log lines say of themselves, and of those of other people's code.

A context variable, so that it reaches what a handler awaits, starts as a task, or calls in a thread.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from runtime_core.telemetry import trace_context
from runtime_core.telemetry.spans import current_ids


class Handled(Protocol):
    """A delivery, as far as a log line is concerned."""

    task: str
    run: str
    context: bytes


HANDLED: ContextVar[Handled | None] = ContextVar("weft_handled", default=None)


def log_ids() -> dict[str, str]:
    """`task_id` and `run_id` of what is being handled here; `trace_id` and, of a span under way, `span_id`."""
    handled = HANDLED.get()
    found = {} if handled is None else {"task_id": handled.task, "run_id": handled.run}
    trace, span = current_ids()
    if trace:
        return {**found, "trace_id": trace, "span_id": span}
    if handled is not None and (ids := trace_context.read(trace_context.stated(handled.context)[0])) is not None:
        found["trace_id"] = f"{ids.trace:032x}"
    return found
