"""Admits what any language has appended to the ingress stream, in stream order.

One admitter at a time: it carries its epoch, and a newer one fences it. An entry is acknowledged and deleted only
after its task was started, or its rejection was kept; each step may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core import facts, submission
from runtime_core.admission import Admission
from runtime_core.bus.delivery import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, ingress
from runtime_core.bus.transport import Argument, Reply, Transport
from runtime_core.bus.values import NotDurable, NotYet
from runtime_core.bus.verbs.partition import make_group
from runtime_core.command_fields import data_of
from runtime_core.envelope import Envelope, parse, reply_address
from runtime_core.errors import BusUnavailable, InvalidInput, Rejected, ServerError
from runtime_core.progress import ProgressWatch
from runtime_core.schedules import definition as schedules
from runtime_core.schedules.store import Schedules
from runtime_core.submission import Submission
from runtime_core.telemetry.messaging import command_span
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import REFUSALS
from runtime_core.telemetry.spans import Span, task_traceparent, tracing
from runtime_core.topics import Topics, published
from services.state_manager.answers import Answers

logger = logging.getLogger(__name__)

BLOCK_MS = 500
BATCH = 200
ENDED = ("completed", "failed", "cancelled")
WAIT_SECONDS = 0.2
"""How long an entry that cannot be admitted yet waits before the next look; those behind it wait with it."""


class Admitter:
    """Reads `<namespace>:tasks` for one epoch."""

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        home: EventBus,
        topics: Topics,
        namespace: str,
        metrics: Metrics,
        watch: ProgressWatch,
    ) -> None:
        self._transport = transport
        self._admission = admission
        self._home = home
        self._namespace = namespace
        self._key = ingress(namespace)
        self._metrics = metrics
        self._watch = watch
        self._partition = str(home.keys.partition)
        for reason in REFUSALS:
            metrics.tasks_refused[self._partition, reason]  # with 0, from the start
        self._answers = Answers(transport, home, metrics)
        self._schedules = Schedules(home, admission)
        self._topics = topics

    async def run(self, epoch: str) -> None:
        """Admit until cancelled. Raises Fenced where another leads by now."""
        consumer = f"admitter-{epoch}"
        # What an earlier admitter had taken comes first: the order of the stream is the order of admission.
        cursor = "0-0"
        while True:
            try:
                if cursor != ">":
                    entries = await self._left_behind(consumer, cursor)
                    if not entries:
                        cursor = ">"
                        continue
                    cursor = entries[-1][0].decode()
                else:
                    entries = await self._read(consumer)
            except BusUnavailable:
                await asyncio.sleep(0.1)
                cursor = "0-0"
                continue
            self._watch.waiting(bool(entries))
            for entry, fields in entries:
                await self._admit_or_reject(epoch, entry, fields)
                self._watch.progressed()
            self._watch.waiting(False)

    async def _read(self, consumer: str) -> list[tuple[bytes, list[bytes]]]:
        try:
            reply = await self._transport.blocking(
                "XREADGROUP", "GROUP", STATE_MANAGER, consumer, "COUNT", BATCH, "BLOCK", BLOCK_MS,
                "STREAMS", self._key, ">",
            )  # fmt: skip
        except ServerError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            await make_group(self._transport, self._key, STATE_MANAGER)
            return []
        return pairs(cast(list[list[Reply]], reply)[0][1]) if reply else []

    async def _left_behind(self, consumer: str, after: str) -> list[tuple[bytes, list[bytes]]]:
        """Entries that were read and not admitted, by whomever, oldest first."""
        await make_group(self._transport, self._key, STATE_MANAGER)
        start = "-" if after == "0-0" else f"({after}"
        call = self._transport.call
        listed = cast(list[list[Reply]], await call("XPENDING", self._key, STATE_MANAGER, start, "+", BATCH))
        if not listed:
            return []
        ids = [cast(bytes, item[0]) for item in listed]
        claimed = await call("XCLAIM", self._key, STATE_MANAGER, consumer, 0, *ids)
        found = pairs(claimed)
        if not found:
            await call("XACK", self._key, STATE_MANAGER, *ids)
        return found

    async def _admit_or_reject(self, epoch: str, entry: bytes, fields: list[bytes]) -> None:
        """Admit one entry; whatever is wrong with it is answered and kept, and stops nothing."""
        while True:
            try:
                await self._one(epoch, entry, fields)
                break
            except (NotYet, NotDurable):
                await asyncio.sleep(WAIT_SECONDS)
            except InvalidInput as error:
                await self._reject(entry, fields, error)
                self._metrics.tasks_refused[self._partition, _refusal(error)].inc()
                break
        call = self._transport.call
        await call("XACK", self._key, STATE_MANAGER, entry)
        await call("XDEL", self._key, entry)
        self._metrics.events_handled["admitted"].inc()

    async def _one(self, epoch: str, entry: bytes, fields: list[bytes]) -> None:
        envelope = parse(entry.decode(), fields, self._namespace)
        match envelope.type:
            case submission.SUBMIT:
                await self._submit(epoch, entry, submission.parse_submit(envelope))
            case submission.CANCEL:
                await self._cancel(submission.parse_cancel(envelope))
            case submission.SIGNAL:
                await self._signal(entry, submission.parse_signal(envelope), envelope)
            case submission.PUBLISH:
                await self._publish(entry, submission.parse_publish(envelope))
            case schedules.SET:
                # The entry's own time: a second look at the same entry must find the same schedule.
                said_ms = int(entry.partition(b"-")[0])
                await self._schedules.set(schedules.parse_set(data_of(envelope), said_ms))
            case schedules.DELETE:
                await self._schedules.delete(schedules.parse_delete(data_of(envelope)))
            case other:
                known = (
                    submission.SUBMIT, submission.CANCEL, submission.SIGNAL, submission.PUBLISH, schedules.SET,
                    schedules.DELETE,
                )  # fmt: skip
                raise InvalidInput("type", f"{other!r} is no command; known are {', '.join(known)}")

    async def _submit(self, epoch: str, entry: bytes, wanted: Submission) -> None:
        if not tracing():
            await self._start(epoch, wanted)
            return
        trace = task_traceparent(self._namespace, wanted.task_id, wanted.traceparent)
        with self._span(entry, wanted.task_id, trace, wanted.tracestate) as span:
            if span.recording:  # of a trace that is not kept nothing is said anew
                wanted = replace(wanted, traceparent=span.traceparent)
            while True:
                try:
                    return await self._start(epoch, wanted)
                except (NotYet, NotDurable):  # in here, for one span
                    await asyncio.sleep(WAIT_SECONDS)

    def _span(self, entry: bytes, task: str, traceparent: str, tracestate: str = "") -> AbstractContextManager[Span]:
        """The span of a command, which what it starts is under."""
        return command_span(
            STATE_MANAGER, entry=entry.decode(), task=task, traceparent=traceparent, tracestate=tracestate
        )

    async def _start(self, epoch: str, wanted: Submission) -> None:
        submitted = await self._admission.admit(wanted, reply=wanted.replyto, epoch=epoch)
        if not wanted.replyto:
            return
        if submitted.started or submitted.status not in ENDED:
            fact = facts.accepted(submitted.task, at_ms=_now(), cause=wanted.event_id, trace=wanted.traceparent)
            await self._answers.send(wanted.replyto, fact)
            return
        bus = await self._admission.find(submitted.task)
        final = await bus.transport.call("HGET", bus.keys.task(submitted.task), "out")
        if final is None:
            known = {"task_id": submitted.task, "status": submitted.status}
            final = msgspec.json.encode(known)
        await self._answers.send(
            wanted.replyto,
            facts.final(
                submitted.task,
                submitted.status,
                cast(bytes, final),
                at_ms=_now(),
                cause=wanted.event_id,
                trace=wanted.traceparent,
            ),
        )

    async def _cancel(self, wanted: submission.Cancellation) -> None:
        bus = await self._admission.find(wanted.task_id)
        answer = await bus.cancel(wanted.task_id, wanted.reason or "cancelled by its user")
        if wanted.replyto and answer[0] == "unknown":
            # A repeat is answered as well, so nothing is said of a task that is not known but this.
            error = InvalidInput(
                "data.task_id", f"no task {wanted.task_id!r} is known; a later submit of it is refused"
            )
            await self._answers.send(
                wanted.replyto,
                facts.rejected(wanted.event_id, error, at_ms=_now(), task_id=wanted.task_id, cause=wanted.event_id),
            )

    async def _signal(self, entry: bytes, wanted: submission.Signal, envelope: Envelope) -> None:
        if not tracing():
            await self._hand_over(wanted)
            return
        with self._span(entry, wanted.task_id, envelope.traceparent, envelope.tracestate) as span:
            await self._hand_over(wanted, span.traceparent if span.recording else "")

    async def _hand_over(self, wanted: submission.Signal, trace: str = "") -> None:
        bus = await self._admission.find(wanted.task_id)
        answer = await bus.signal(wanted.task_id, wanted.request_id, wanted.value_json, trace)
        match answer[0]:
            case "unknown":
                raise InvalidInput("data.task_id", f"no task {wanted.task_id!r} is known")
            case "ended":
                raise InvalidInput("data.task_id", f"the task {wanted.task_id!r} has ended ({answer[1]})")
            case "answered":
                raise InvalidInput("data.request_id", f"{wanted.request_id!r} was already answered")
            case "no_request":
                raise InvalidInput("data.request_id", f"the task has no open question {wanted.request_id!r}")
            case "invalid":
                raise InvalidInput("data.value", answer[1])

    async def _publish(self, entry: bytes, message: submission.Publication) -> None:
        if not tracing():
            await self._send(message, message.traceparent)
            return
        with self._span(entry, message.message_id, message.traceparent) as span:
            await self._send(message, span.traceparent or message.traceparent)

    async def _send(self, message: submission.Publication, traceparent: str) -> None:
        context = published(b"", message.topic, traceparent=traceparent)
        await self._topics.publish(
            message.message_id, message.topic, message.topic_source, message.data_json, context=context
        )

    async def _reject(self, entry: bytes, fields: list[bytes], error: InvalidInput) -> None:
        """Answer where there is a `replyto`, and keep the entry as a dead letter."""
        reply_to = reply_address(fields, self._namespace)
        task = error.task_id if isinstance(error, Rejected) else ""
        fact = facts.rejected(entry.decode(), error, at_ms=_now(), task_id=task, cause=entry.decode())
        letter: list[Argument] = [
            "reason", "rejected", "stream", "tasks", "group", STATE_MANAGER, "entry", entry, "time", _now(),
            "field", error.field, "error", msgspec.json.encode({"type": "Rejected", "message": str(error)}),
            "errors", msgspec.json.encode([{"type": "Rejected", "message": str(error), "at": float(_now())}]),
            *([] if not task else ["taskid", task]),
        ]  # fmt: skip
        # The fields as they came, so that the letter can be read, mended and sent again.
        for at in range(0, len(fields) - 1, 2):
            letter += [b"event:" + fields[at], fields[at + 1]]
        await self._home.transport.call("XADD", self._home.keys.dead, "*", *letter)
        if reply_to:
            await self._answers.send(reply_to, fact)
        self._metrics.dead_letters["rejected"].inc()
        logger.warning("an entry of %s is rejected: %s", self._key, error)


def _refusal(error: InvalidInput) -> str:
    """One word of `REFUSALS`."""
    if isinstance(error, Rejected) and error.retry_after_seconds is not None:
        return "overloaded"
    return {"data.agent": "unknown_agent", "id": "duplicate_id", "task_id": "duplicate_id"}.get(error.field, "invalid")


def _now() -> int:
    return time.time_ns() // 1_000_000
