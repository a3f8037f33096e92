"""Settles calls, and failed attempts of turns and calls: a result, a retry, an answer or a dead letter."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from runtime_core.base.text import LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_TYPE, text_of_error
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.effects import Failed
from runtime_core.declare.declaration import MAX_DELAY_SECONDS, Limit, RetryPolicy
from runtime_core.errors import (
    AgentError,
    BlockedEventLoop,
    ConfigurationError,
    Denied,
    Divergence,
    HookFailed,
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
from runtime_core.telemetry.redaction import kept
from runtime_core.telemetry.spans import DUPLICATE
from runtime_core.wire import step as steps
from runtime_core.wire.step import ENCODER, NOTHING_USED, RESULT_ERROR, RESULT_OK, Status, Step, Usage

if TYPE_CHECKING:  # a program that only declares an app needs no client of Prometheus, which takes 40 ms
    from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)
LACKING_SECONDS = 1.0
"""How long a delivery waits for a process that can handle it, for example during a rolling update."""
MAX_ERROR_CHARACTERS = 16_000
"""The limit of an agent's error message, and of its traceback."""
REJECTED = "rejected"
NOT_RETRYABLE = "not retryable"
USED_UP = "attempts used up"
DEFECTS = (TypeError, NameError, AttributeError, ImportError)
"""Errors that a mistake in the code raises, whatever the attempt."""
_TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'  File "([^"]+)", line ')
_RUNTIME = str(Path(__file__).parent.parent)
_PYTHON = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_LIBRARIES = (_RUNTIME, *_PYTHON, *_PACKAGES)
"""The folders of code that users did not write."""


def failed_from(error: Exception, *, repeatable: bool = True) -> Failed:
    """Return the outcome of a call's attempt that raised `error`. It is retried only if it is `repeatable`."""
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
    repeatable = repeatable and not (isinstance(error, BlockedEventLoop) and not error.repeatable)
    # The end of a traceback names the error.
    trace = kept("".join(traceback.format_exception(error)), LONGEST_TRACEBACK, end=True)
    return Failed(kind, message, trace, retryable=repeatable, defect=isinstance(error, DEFECTS))


def failure_of(error: BaseException) -> Failed:
    """Return the outcome of a turn whose agent raised `error`.

    An error that deterministic code would raise again is not retryable.
    """
    match error:
        case Retry():
            return Failed("Retry", error_text(error.reason), retry_after_seconds=error.after_seconds)
        case NotReady():
            return Failed("NotReady", error_text(text_of_error(error)), counts=False)
        case Reject():
            return Failed(
                error_text(error.type[:LONGEST_TYPE]), error_text(error.reason), retryable=False, rejected=True
            )
        case TaskCancelled():
            return Failed(
                error_text(error.type[:LONGEST_TYPE]),
                error_text(error.message),
                retryable=False,
                rejected=True,
                cancelled=True,
                output=_output_of(error),
            )
        case StepError():
            kind = error_text(error.type[:LONGEST_TYPE]) or class_name(error)
            # The failed step is a dead letter already; another one for the waiting run would add nothing.
            # A denial is an answer, not a defect.
            rejected = isinstance(error, ToolError | AgentError | Denied)
            return Failed(
                kind, error_text(error.message), "" if error.chosen else traceback_of(error), retryable=False,
                rejected=rejected, output=_output_of(error),
            )  # fmt: skip
        case HookFailed():
            # The traceback of the hook, if it ran in this process: that of the agent leads only to Weft.
            trace = traceback_of(error.__cause__ or error)
            return Failed(error_text(error.type[:LONGEST_TYPE]), error_text(str(error)), trace, retryable=False)
        case Divergence():
            return Failed(
                "Divergence", error_text(text_of_error(error)), error_text(error.trace, keep_end=True),
                retryable=False, parked=True, divergence=error,
            )  # fmt: skip
        case (
            InvalidInput()
            | LimitExceeded()
            | ConfigurationError()
            | JobCancelled()
            | BlockedEventLoop(repeatable=False)
        ):
            return Failed(class_name(error), error_text(text_of_error(error)), traceback_of(error), retryable=False)
    # WeftError itself means wrong use of the context, which the same code would repeat.
    return Failed(
        class_name(error), error_text(text_of_error(error)), traceback_of(error),
        retryable=type(error) is not WeftError, defect=isinstance(error, DEFECTS),
    )  # fmt: skip


def _output_of(error: StepError) -> bytes:
    if error.output is None:
        return b""
    from runtime_core.declare.schema import encode  # here: it imports pydantic, which most services never need

    return encode(error.output, "output")


def class_name(error: BaseException) -> str:
    """Return the name of the error's class. It may be of any length."""
    return error_text(type(error).__name__[:LONGEST_TYPE])


def traceback_of(error: BaseException) -> str:
    """Return the traceback; the end of it if it is too long."""
    return error_text("".join(traceback.format_exception(error)), keep_end=True)


def frames_of_user(trace: str) -> str:
    """Return the frames of the user's own code in the last error of a traceback; empty if it has none."""
    frames, own = [], False
    for line in trace.rpartition(_TRACEBACK)[2].splitlines():
        if frame := _FRAME.match(line):
            own = not frame[1].startswith((*_LIBRARIES, "<frozen "))
        elif not line.startswith("    "):  # the error itself
            own = False
        if own:
            frames.append(line)
    return "\n".join(frames)


def place_in_code(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost line of the user's code from a frame outwards, as `app.py:12 in report`, and its traceback.

    An installed app's code is among other libraries, so their frames count only if there are no others.
    """
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    frames = [each for each in stack if not _is_weft_or_python(each.filename)]
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames
    if not own:
        return "", ""
    shown = f"{Path(own[0].filename).name}:{own[0].lineno} in {own[0].name}"
    return shown, _TRACEBACK + "".join(traceback.format_list(own[::-1]))


def is_of_weft(coroutine: object) -> bool:
    """Whether this is a coroutine of Weft's own code."""
    code = getattr(coroutine, "cr_code", None)
    return code is not None and str(code.co_filename).startswith(_RUNTIME)


def _is_weft_or_python(file: str) -> bool:
    return file.startswith(_RUNTIME) or (file.startswith(_PYTHON) and not file.startswith(_PACKAGES))


def error_text(text: str, *, keep_end: bool = False) -> str:
    """Return text of an error that JSON can hold, without secrets if it had to be cut."""
    return kept(text, MAX_ERROR_CHARACTERS, end=keep_end)


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Retry: a timer of the broker appends the event again after `delay_seconds`."""

    delay_seconds: float
    attempt: int
    """The number of the next attempt."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop retrying: the waiting step, or the task, gets the error."""

    dead_letter: bool
    """Whether the event becomes a dead letter. A rejection by the code is an answer, not a defect."""
    reason: str
    """`rejected`, `not retryable` or `attempts used up`."""


@dataclass(frozen=True, slots=True)
class Park:
    """Do not retry or fail: keep a dead letter, and leave the run suspended until a rollback or a fix."""


Decision = RetryAt | GiveUp | Park


def decide(attempt: int, policy: RetryPolicy, failed: Failed, random: Callable[[], float]) -> Decision:
    """Return what follows after `attempt` (from 1) ended as `failed`. Pure; `random` returns numbers in [0, 1).

    The first rule that fits wins: parked, rejected, not retryable, attempts used up, retry. A retry that the code
    requests counts as an attempt, so code that always requests one ends. It only sets the delay.
    """
    if failed.parked:
        return Park()
    if failed.rejected:
        return GiveUp(dead_letter=False, reason=REJECTED)
    if not failed.retryable or (failed.defect and not policy.defects):
        return GiveUp(dead_letter=True, reason=NOT_RETRYABLE)
    if attempt >= policy.attempts:
        return GiveUp(dead_letter=True, reason=USED_UP)
    if failed.retry_after_seconds is None:
        delay = policy.delay_seconds(attempt, random)
    else:
        delay = _usable(failed.retry_after_seconds)
    return RetryAt(delay, attempt + 1)


def reason_of(decision: GiveUp | Park) -> str:
    """Return the dead letter's reason as one word, for lists and metrics."""
    return "diverged" if isinstance(decision, Park) else decision.reason.replace(" ", "_")


def _usable(seconds: float) -> float:
    """Bound a delay that user code requests: it may be negative, infinite or NaN, which a timer's score may not."""
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), MAX_DELAY_SECONDS)


async def schedule_retry(
    bus: EventBus,
    metrics: Metrics,
    delivery: Delivery,
    policy: RetryPolicy,
    failed: Failed,
    error: steps.StepFailure,
    used: Usage = NOTHING_USED,
) -> GiveUp | Park | None:
    """Schedule another attempt and return None; or return the decision that there is none."""
    decision = decide(delivery.attempt, policy, failed, random.random)
    if not isinstance(decision, RetryAt):
        return decision
    metrics.retries.inc()
    logger.warning(
        "%r: attempt %d failed (%s: %s); retrying in %.2f s",
        delivery, delivery.attempt, error.type, error.message, decision.delay_seconds,
    )  # fmt: skip
    delay_ms = int(decision.delay_seconds * 1000)
    await bus.retry(delivery, delay_ms, ENCODER.encode(error), usage=used.to_json() if used else b"")
    return None


async def hand_back(bus: EventBus, delivery: Delivery, seconds: float = LACKING_SECONDS) -> None:
    """Delay the delivery without counting an attempt."""
    await bus.retry(delivery, int(seconds * 1000), b"", counts=False)


class _LimitKeys(msgspec.Struct):
    """The members of a context by which limits count."""

    tenant: str = ""
    session_id: str = ""


_NO_LIMIT_KEYS = _LimitKeys()
_LIMIT_KEYS = msgspec.json.Decoder(_LimitKeys)
_SHOWN_KEY = re.compile(r"[\w.@:/-]{1,64}", re.ASCII)


async def take_slots(
    bus: EventBus,
    delivery: Delivery,
    limits: Sequence[Limit],
    partitions: int,
    *,
    counted_as: str,
    each_attempt: bool,
) -> bool | None:
    """Take the slots of a run or a call before it starts. See `FailureVerbs.take_slots`.

    `counted_as` is the name of all runs or calls that these limits count.
    """
    data, context = delivery.data, delivery.context
    if delivery.kind == "resume":
        # A fork, or a run that continues after its end: its first event has not come to this process.
        data, context = await bus.input_of(delivery.task, delivery.run)
    kind = "tool" if delivery.kind == "call" else "agent"
    shares = [
        (
            f"{kind}:{counted_as}|{limit.label}|{_limit_key(limit.per, delivery, data, context)}",
            *limit.share(bus.keys.partition, partitions),
        )
        for limit in limits
    ]
    newest = next((limit for limit in limits if limit.replaces), None)
    return await bus.take_slots(
        delivery,
        shares,
        each_attempt=each_attempt,
        replaces=newest.replaces if newest else "",
        quiet_ms=round(1000 * (newest.debounce or 0)) if newest else 0,
    )


def _limit_key(per: str, delivery: Delivery, data: bytes, context: bytes) -> str:
    """Return the key by which a limit counts. Values of inputs may be secrets, so only their digests are stored."""
    if per.startswith("input."):
        value: object = msgspec.json.decode(data) if data else None
        for name in per.split(".")[1:]:
            value = value.get(name) if isinstance(value, dict) else None
        return "" if value is None else _digest(msgspec.json.encode(value, order="deterministic"))
    keys = _LIMIT_KEYS.decode(context) if context else _NO_LIMIT_KEYS
    key = {"": "", "tenant": keys.tenant, "session": keys.session_id, "key": delivery.key}[per]
    return key if not key or _SHOWN_KEY.fullmatch(key) else _digest(key.encode())


def _digest(value: bytes) -> str:
    return "#" + hashlib.sha256(value).hexdigest()[:16]


async def hand_on(bus: EventBus, metrics: Metrics, delivery: Delivery, known: bool, lacking: str, step: Step) -> None:
    """Delay a delivery whose name this app lacks, for another app. If none has it (not `known`), give it up with
    `step` as its row."""
    if known:
        await hand_back(bus, delivery)
        return
    error = steps.StepFailure("UnknownName", lacking, at=time.time() * 1000)
    await give_up(bus, metrics, delivery, "unknown_name", error, step)


async def give_up(
    bus: EventBus,
    metrics: Metrics,
    delivery: Delivery,
    reason: str,
    error: steps.StepFailure,
    step: Step,
    used: Usage = NOTHING_USED,
    inner: Sequence[Step] = (),
) -> None:
    """Make the delivery a dead letter and answer its waiting caller with the error.

    `inner` are rows of the run's steps that no commit has written.
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
    frames = frames_of_user(error.traceback)
    fields = {"fields": {"traceback": frames}} if frames else None
    logger.error("%r became a dead letter (%s): %s: %s", delivery, reason, error.type, error.message, extra=fields)


WRITE_OVERHEAD_BYTES = 1024
"""The memory that one unanswered write takes besides its data: a task, its command and its reply."""
MAX_REPORTS_BYTES = 256 * 1024
"""How many bytes of one call's progress may be unanswered by the broker."""

Place = tuple[str, bytes]


class _Reports:
    """The unanswered progress reports of one call."""

    __slots__ = ("bytes", "latest", "sending")

    def __init__(self) -> None:
        self.sending: set[asyncio.Task[bool]] = set()
        self.bytes = 0
        self.latest: bytes | None = None
        """The report to send when there is room again."""


class Calls:
    """Settles calls of one kind (`tool`, `ray`, …) for one consumer. Times are epoch milliseconds."""

    def __init__(self, bus: EventBus, metrics: Metrics, kind: str) -> None:
        self._bus = bus
        self._metrics = metrics
        self._kind = kind
        self._reports: dict[Place, _Reports] = {}

    async def complete(self, delivery: Delivery, output: bytes, started: float, used: Usage = NOTHING_USED) -> bool:
        """Commit a result (JSON). Return False if the call already has an answer, or its task has ended."""
        ended = time.time() * 1000
        row = self._row(delivery, Status.COMPLETED, started, ended, used)
        row.output = msgspec.Raw(output)
        sent_at = time.perf_counter()
        committed = await self._bus.commit_call(
            delivery, RESULT_OK, int(ended), output, ENCODER.encode([row]), 1, _json(used)
        )
        self._metrics.commit_seconds.observe(time.perf_counter() - sent_at)
        if not committed:
            self._metrics.duplicates_suppressed.inc()
            delivery.span.set({DUPLICATE: True})
        return committed

    async def fail(
        self, delivery: Delivery, retry: RetryPolicy, failed: Failed, started: float, used: Usage = NOTHING_USED
    ) -> bool:
        """Decide what follows a failed attempt, and do it. Return True if the call is retried."""
        now = time.time() * 1000
        error = steps.StepFailure(failed.type, failed.message, failed.traceback, now, started)
        delivery.span.failed(failed.type, failed.message)
        decision = await schedule_retry(self._bus, self._metrics, delivery, retry, failed, error, used)
        if decision is None:
            return True
        if failed.rejected:
            await self.end(delivery, error, started, used)
        else:
            row = self._row(delivery, Status.FAILED, started, now, used)
            await give_up(self._bus, self._metrics, delivery, reason_of(decision), error, row, used)
        return False

    async def end(
        self, delivery: Delivery, error: steps.StepFailure, started: float, used: Usage = NOTHING_USED
    ) -> None:
        """Answer the waiting run with an expected error, without a dead letter."""
        now = time.time() * 1000
        row = self._row(delivery, Status.FAILED, started, now, used)
        row.error = error
        payload = ENCODER.encode({"type": error.type, "message": error.message})
        await self._bus.commit_call(delivery, RESULT_ERROR, int(now), payload, ENCODER.encode([row]), 1, _json(used))

    async def wait(self, delivery: Delivery, seconds: float) -> None:
        """Delay the delivery without counting an attempt."""
        await hand_back(self._bus, delivery, seconds)

    async def hand_on(self, delivery: Delivery, known: bool, message: str) -> None:
        """Delay a call whose name this app lacks, for another app. If none has it (not `known`), give it up."""
        now = time.time() * 1000
        row = self._row(delivery, Status.FAILED, now, now, NOTHING_USED)
        await hand_on(self._bus, self._metrics, delivery, known, message, row)

    def report(self, delivery: Delivery, value: bytes) -> None:
        """Send progress (JSON) without delaying or failing the call.

        If the call reports faster than the broker accepts, only the latest report is sent.
        """
        reports = self._reports.setdefault((delivery.stream, delivery.entry), _Reports())
        if reports.bytes > MAX_REPORTS_BYTES:
            reports.latest = value
            return
        reports.bytes += len(value) + WRITE_OVERHEAD_BYTES
        sending = asyncio.get_running_loop().create_task(self._bus.progress(delivery, value))
        reports.sending.add(sending)
        sending.add_done_callback(partial(self._reported, delivery, len(value) + WRITE_OVERHEAD_BYTES))

    def _reported(self, delivery: Delivery, size: int, sending: asyncio.Task[bool]) -> None:
        place = (delivery.stream, delivery.entry)
        reports = self._reports[place]
        reports.sending.discard(sending)
        reports.bytes -= size
        if sending.cancelled():
            reports.latest = None
        elif (error := sending.exception()) is not None:
            logger.info("could not send progress: %s", error)
        if reports.latest is not None and reports.bytes <= MAX_REPORTS_BYTES:
            latest, reports.latest = reports.latest, None
            self.report(delivery, latest)
        if not reports.sending:
            del self._reports[place]

    def _row(self, delivery: Delivery, status: str, started: float, ended: float, used: Usage) -> Step:
        row = Step(delivery.run, self._kind, delivery.name, status, started, ended)
        row.attempt = delivery.attempt
        row.input = msgspec.Raw(delivery.data)
        row.owner = self._bus.owner
        row.cause = delivery.entry.decode()
        row.usage = used.amounts
        if delivery.kind == "call" and delivery.step:  # redriven with data that the code did not request
            row.attributes = {steps.DIGEST: delivery.step}
        if delivery.errors:
            row.errors = msgspec.json.decode(delivery.errors, type=list[steps.StepFailure])
        return row


def _json(used: Usage) -> bytes:
    return used.to_json() if used else b""
