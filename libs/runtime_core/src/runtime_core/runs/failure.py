"""How an attempt that raised has ended, as a value."""

from __future__ import annotations

import traceback

from runtime_core.consumer.effects import Failed
from runtime_core.errors import (
    AgentError,
    ConfigurationError,
    Denied,
    Divergence,
    InvalidInput,
    JobCancelled,
    LimitExceeded,
    NotReady,
    Reject,
    Retry,
    StepError,
    TaskCancelled,
    ToolError,
    WeftError,
)
from runtime_core.telemetry.redaction import redactor
from runtime_core.text import LONGEST_TYPE, text_of_error

MAX_TEXT = 16_000
"""The most characters of a message or a traceback that are kept; of a traceback the end."""


def failure_of(error: BaseException) -> Failed:
    """The value of an exception that left the agent's function.

    Not worth another attempt (`retryable=False`): what deterministic code would raise again.
    """
    match error:
        case Retry():
            return Failed("Retry", clean(error.reason), retry_after_seconds=error.after_seconds)
        case NotReady():
            return Failed("NotReady", clean(text_of_error(error)), counts=False)
        case Reject():
            return Failed(clean(error.type[:LONGEST_TYPE]), clean(error.reason), retryable=False, rejected=True)
        case TaskCancelled():
            return Failed(
                clean(error.type[:LONGEST_TYPE]), clean(error.message), retryable=False, rejected=True, cancelled=True
            )
        case StepError():
            kind = clean(error.type[:LONGEST_TYPE]) or type_of(error)
            # The step's own delivery is the dead letter: a second one of the run that waited says no more.
            # And what was denied is an answer, not a defect.
            kept = isinstance(error, ToolError | AgentError | Denied)
            return Failed(kind, clean(error.message), text_of(error), retryable=False, rejected=kept)
        case Divergence():
            return Failed("Divergence", clean(text_of_error(error)), retryable=False, parked=True)
        case InvalidInput() | LimitExceeded() | ConfigurationError() | JobCancelled():
            return Failed(type_of(error), clean(text_of_error(error)), text_of(error), retryable=False)
    # WeftError itself is raised for wrong use of the context: the same code would do the same again.
    return Failed(type_of(error), clean(text_of_error(error)), text_of(error), retryable=type(error) is not WeftError)


def type_of(error: BaseException) -> str:
    """The name of the error's class: code may make a class of any name."""
    return clean(type(error).__name__[:LONGEST_TYPE])


def text_of(error: BaseException) -> str:
    """The traceback as text, its end where it is long."""
    return clean("".join(traceback.format_exception(error)), keep_end=True)


def clean(text: str, *, keep_end: bool = False) -> str:
    """Text that JSON can hold, and no more of it than anyone reads."""
    if len(text) > MAX_TEXT:
        secrets = redactor()
        text = "…" + secrets.end(text)[-MAX_TEXT:] if keep_end else secrets.start(text)[:MAX_TEXT] + "…"
    return text.encode(errors="replace").decode()
