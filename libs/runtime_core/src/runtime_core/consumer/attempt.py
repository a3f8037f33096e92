"""What both kinds of handlers share: from an exception to a value, and the end of a delivery that is given up."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence

from runtime_core.bus.delivery import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.effects import Failed
from runtime_core.errors import InvalidInput, LimitExceeded, Reject, Retry, StepError
from runtime_core.record import step as steps
from runtime_core.record.step import ENCODER, Step
from runtime_core.record.usage import Usage
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import kept
from runtime_core.text import LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_TYPE, text_of_error

logger = logging.getLogger(__name__)

NOTHING_USED = Usage()


def failed_from(error: Exception, *, repeatable: bool = True) -> Failed:
    """Say how an attempt ended that raised `error`. What may not be repeated is not tried again."""
    kind, message = kept(type(error).__name__, LONGEST_TYPE), kept(text_of_error(error), LONGEST_MESSAGE)
    if isinstance(error, Retry):
        reason = kept(error.reason, LONGEST_MESSAGE)
        return Failed("Retry", reason, retryable=repeatable, retry_after_seconds=error.after_seconds)
    if isinstance(error, Reject):
        name, reason = kept(error.type, LONGEST_TYPE), kept(error.reason, LONGEST_MESSAGE)
        return Failed(name, reason, retryable=False, rejected=True)
    if isinstance(error, InvalidInput | LimitExceeded):
        return Failed(kind, message, retryable=False)
    if isinstance(error, StepError):
        name = kept(error.type, LONGEST_TYPE) or kind
        return Failed(name, kept(error.message, LONGEST_MESSAGE), retryable=False)
    # The end, where the error itself is named.
    trace = kept("".join(traceback.format_exception(error)), LONGEST_TRACEBACK, end=True)
    return Failed(kind, message, trace, retryable=repeatable)


async def give_up(
    bus: EventBus,
    metrics: Metrics,
    delivery: Delivery,
    reason: str,
    error: steps.StepError,
    step: Step,
    used: Usage = NOTHING_USED,
    inner: Sequence[Step] = (),
) -> None:
    """Keep the delivery as a dead letter and answer who waits for it with its last error.

    `inner` are the rows of steps inside a run that no commit has written.
    """
    step.error = error
    await bus.dead_letter(
        delivery.stream,
        delivery.entry,
        reason,
        ENCODER.encode([error]),
        int(time.time() * 1000),
        ENCODER.encode({"type": error.type, "message": error.message}),
        ENCODER.encode([step, *inner]),
        1 + len(inner),
        used.to_json() if used else b"",
    )
    metrics.dead_letters[reason].inc()
    logger.error("%r is given up (%s): %s: %s", delivery, reason, error.type, error.message)


def log_retry(delivery: Delivery, error: steps.StepError, delay_seconds: float) -> None:
    """One line for a failed attempt that is tried again."""
    logger.info(
        "%r: attempt %d failed (%s: %s); again in %.2f s",
        delivery,
        delivery.attempt,
        error.type,
        error.message,
        delay_seconds,
    )
