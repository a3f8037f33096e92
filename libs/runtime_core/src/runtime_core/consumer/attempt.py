"""A failed attempt of a turn or a call: its error as a value, another attempt, or a dead letter."""

from __future__ import annotations

import logging
import random
import time
import traceback
from collections.abc import Sequence

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import Delivery
from runtime_core.consumer.decision import GiveUp, Park, RetryAt, decide
from runtime_core.consumer.effects import Failed
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.errors import InvalidInput, LimitExceeded, Reject, Retry, StepError
from runtime_core.record import step as steps
from runtime_core.record.step import ENCODER, Step
from runtime_core.record.usage import Usage
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.redaction import kept
from runtime_core.text import LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_TYPE, text_of_error

logger = logging.getLogger(__name__)

NOTHING_USED = Usage()

LACKING_SECONDS = 1.0
"""How long a delivery waits for a process that can handle it, in a rolling update for example."""


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


async def schedule_retry(
    bus: EventBus,
    metrics: Metrics,
    delivery: Delivery,
    policy: RetryPolicy,
    failed: Failed,
    error: steps.StepError,
    used: Usage = NOTHING_USED,
) -> GiveUp | Park | None:
    """Schedule another attempt and return None, or return the decision against one."""
    decision = decide(delivery.attempt, policy, failed, random.random)
    if not isinstance(decision, RetryAt):
        return decision
    metrics.retries.inc()
    logger.info(
        "%r: attempt %d failed (%s: %s); again in %.2f s",
        delivery, delivery.attempt, error.type, error.message, decision.delay_seconds,
    )  # fmt: skip
    delay_ms = int(decision.delay_seconds * 1000)
    await bus.retry(delivery, delay_ms, ENCODER.encode(error), usage=used.to_json() if used else b"")
    return None


async def hand_back(bus: EventBus, delivery: Delivery, seconds: float = LACKING_SECONDS) -> None:
    """Put the delivery back for some seconds. It does not count as an attempt."""
    await bus.retry(delivery, int(seconds * 1000), b"", counts=False)


async def hand_on(bus: EventBus, metrics: Metrics, delivery: Delivery, known: bool, lacking: str, step: Step) -> None:
    """Put back a delivery whose name this app does not have. If no app has it, give it up, with `step` as its row."""
    if known:
        await hand_back(bus, delivery)
        return
    error = steps.StepError("UnknownName", lacking, at=time.time() * 1000)
    await give_up(bus, metrics, delivery, "unknown_name", error, step)


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
    """Keep the delivery as a dead letter and answer its waiting caller with its last error.

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
