"""Admits what any language has appended to the ingress streams, in the order of each stream.

`<namespace>:tasks` is for programs that are trusted. Publishers that are not have streams of their own, whose commands
are bound to their publisher and its tenant (`runtime_core.ingress.publishers`).

One admitter at a time: it carries its epoch, and a newer one fences it. An entry is acknowledged and deleted only
after its task was started, or its rejection was kept; each step may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core.blobs.urls import folder_of_namespace
from runtime_core.bus.admin import IngressEntry, IngressStream
from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, ingress
from runtime_core.bus.partition import make_group
from runtime_core.bus.spans import command_span
from runtime_core.bus.topics import Topics, published
from runtime_core.bus.values import NotDurable, NotYet, pairs
from runtime_core.consumer.progress import ProgressWatch
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, Rejected, ServerError, is_temporary
from runtime_core.ingress import schedules
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.publishers import Publisher, PublisherStreams
from runtime_core.ingress.relay import Answers
from runtime_core.ingress.schedules import Schedules
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import REFUSALS
from runtime_core.telemetry.spans import Span, task_traceparent, tracing
from runtime_core.wire import commands as wire
from runtime_core.wire import events as facts
from runtime_core.wire.commands import Submission, data_of
from runtime_core.wire.envelope import Envelope, parse, reply_address
from runtime_core.wire.results import ENDED

logger = logging.getLogger(__name__)

TASKS = "tasks"
BLOCK_MS = 500
BATCH = 200
"""How many commands are read at once, where they are small."""
FIRST_BATCH = 8
READ_BYTES = 4 * 1024 * 1024
"""About how many bytes are read at once: the number of commands follows the size of those before."""
YIELD_BYTES = 256 * 1024
"""How many bytes are parsed at a stretch."""
WAIT_SECONDS = 0.2
"""How long a command that cannot be carried out yet waits before the next try."""
LOOK_AHEAD = 1000
"""How many commands may wait at once; those behind them are not read yet."""
TRIES = 20
"""How often a command is tried that fails for a reason of its own."""


class Admitter:
    """Reads `<namespace>:tasks` and the streams of publishers for one epoch."""

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        home: EventBus,
        topics: Topics,
        namespace: str,
        metrics: Metrics,
        watch: ProgressWatch,
        connect: Callable[[], Awaitable[Transport]] | None = None,
        blob_url: str | None = None,
    ) -> None:
        """`connect` opens a connection for one publisher's stream, where those may live on other servers.

        `blob_url` is the blob store, if there is one.
        """
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
        self._connect = connect
        self._blobs = f"{blob_url}/{folder_of_namespace(namespace)}" if blob_url else ""
        self._batch = min(FIRST_BATCH, BATCH)

    async def run(self, epoch: str) -> None:
        """Admit until cancelled. Raises Fenced where another leads by now."""
        streams = PublisherStreams(
            self._home,
            self._transport,
            self._bound_command,
            lambda commands: self._settle_all(epoch, commands),
            _close,
            self._connect,
        )
        publishers = asyncio.create_task(streams.run(), name="publishers")
        shared = asyncio.create_task(self._read_shared(epoch), name="tasks")
        try:
            done, _ = await asyncio.wait((publishers, shared), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (publishers, shared):
                task.cancel()
            await asyncio.wait((publishers, shared))

    async def _read_shared(self, epoch: str) -> None:
        """Admit what trusted programs append to the stream that they share."""
        consumer = f"admitter-{epoch}"
        # What an earlier admitter had taken comes first: the order of the stream is the order of admission.
        cursor = "0-0"
        waiting: list[_Command] = []
        try:
            while True:
                try:
                    if len(waiting) >= LOOK_AHEAD:
                        await asyncio.sleep(WAIT_SECONDS)
                        entries = []
                    elif cursor != ">":
                        entries = await self._left_behind(consumer, cursor)
                        cursor = entries[-1][0].decode() if entries else ">"
                    else:
                        entries = await self._read(consumer, int(WAIT_SECONDS * 1000) if waiting else BLOCK_MS)
                except (BusUnavailable, ServerError) as error:
                    # At its memory limit a server makes no group.
                    if isinstance(error, ServerError) and not is_temporary(error):
                        raise
                    await asyncio.sleep(0.1)
                    cursor = "0-0"
                    _close(waiting)
                    waiting = []
                    continue
                await self._take(entries, waiting)
                self._watch.waiting(bool(waiting))
                waiting = await self._settle_all(epoch, waiting)
                self._watch.waiting(False)
        finally:
            _close(waiting)

    async def _take(self, entries: Sequence[tuple[bytes, list[bytes]]], waiting: list[_Command]) -> None:
        """Parse what was read. The heartbeat of the lead must not wait for many large commands."""
        size = parsed = 0
        for entry, fields in entries:
            waiting.append(self._command(entry, fields))
            size += sum(map(len, fields))
            if size - parsed > YIELD_BYTES:
                parsed = size
                await asyncio.sleep(0)
        if size > READ_BYTES:
            self._batch = max(1, len(entries) * READ_BYTES // size)
        elif entries:
            self._batch = min(BATCH, self._batch * 2)

    async def _settle_all(self, epoch: str, commands: list[_Command]) -> list[_Command]:
        """Carry out commands in order; returns those that must wait.

        Behind one that waits everything else waits too, so that submits keep their order. Cancels and answers go on,
        since they end tasks and so make room; but not past an earlier command for the same task.
        """
        waiting: list[_Command] = []
        tasks: set[str] = set()
        held_up = False
        for command in commands:
            behind = command.task in tasks if command.overtakes else held_up
            if behind or not await self._settle(epoch, command):
                waiting.append(command)
                held_up = held_up or not command.overtakes
                if command.task:
                    tasks.add(command.task)
            self._watch.progressed()
        return waiting

    async def _read(self, consumer: str, block_ms: int) -> list[tuple[bytes, list[bytes]]]:
        try:
            reply = await self._transport.blocking(
                "XREADGROUP", "GROUP", STATE_MANAGER, consumer, "COUNT", self._batch, "BLOCK", block_ms,
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
        while True:
            listed = cast(list[list[Reply]], await call("XPENDING", self._key, STATE_MANAGER, start, "+", self._batch))
            if not listed:
                return []
            ids = [cast(bytes, item[0]) for item in listed]
            found = pairs(await call("XCLAIM", self._key, STATE_MANAGER, consumer, 0, *ids))
            if found:
                return found
            # All of them were deleted, and only their acknowledgement is missing.
            await call("XACK", self._key, STATE_MANAGER, *ids)

    async def _settle(self, epoch: str, command: _Command) -> bool:
        """Carry out one command and remove its entry; False where it must wait.

        Whatever is wrong with it is answered and kept, and stops nothing.
        """
        try:
            if command.error is None:
                try:
                    await self._carry_out(epoch, command)
                except (NotYet, NotDurable):
                    return False
                except InvalidInput as error:
                    command.error = _without_names(command, error)
            if command.error is not None:
                await self._reject(command, command.error)
        except (BusUnavailable, Fenced):
            raise
        except Exception as error:
            if not await self._given_up(command, error):
                return False
        command.close()
        await self._remove(command)
        self._metrics.events_handled["admitted"].inc()
        return True

    async def _remove(self, command: _Command) -> None:
        """Take an entry out of the stream; a server that cannot write just now is waited for."""
        while True:
            try:
                # Delete first: a command that is only acknowledged would stay in the stream for ever.
                if command.stream is not None:
                    await command.stream.remove(command.entry)
                    return
                await self._transport.call("XDEL", self._key, command.entry)
                await self._transport.call("XACK", self._key, STATE_MANAGER, command.entry)
                return
            except ServerError as error:
                if not is_temporary(error):
                    raise
                logger.warning("%s: a command cannot be removed now: %s", command.place, error)
            await asyncio.sleep(WAIT_SECONDS)

    async def _given_up(self, command: _Command, error: Exception) -> bool:
        """Whether a command that cannot be carried out is kept as a dead letter by now; else it is tried again.

        A broker without room is waited for. Anything else would come back at every try, and hold up the others.
        """
        if isinstance(error, ServerError) and is_temporary(error):
            if not command.tries:
                logger.warning("entry %s of %s waits: %s", command.entry.decode(), command.place, error)
            command.tries += 1
            return False
        command.tries += 1
        logger.error(
            "entry %s of %s, try %d: %r", command.entry.decode(), command.place, command.tries, error, exc_info=error
        )
        if command.tries < TRIES:
            return False
        try:
            await self._keep(command, "defect", type(error).__name__, str(error))
        except ServerError as refused:
            logger.warning("entry %s of %s waits: %s", command.entry.decode(), command.place, refused)
            return False
        return True

    def _command(self, entry: bytes, fields: list[bytes]) -> _Command:
        """An entry as it was read; what is wrong with it is in its `error`."""
        return self._parsed(_Command(entry, fields))

    def _bound_command(
        self, publisher: Publisher, stream: IngressStream, entry: IngressEntry, refused: InvalidInput | None
    ) -> _Command:
        """An entry of a publisher's stream, bound to the publisher and its tenant."""
        command = _Command(entry.id, entry.fields, publisher, stream)
        if refused is not None:
            command.error, command.overtakes = refused, True
            return command
        return self._parsed(command)

    def _parsed(self, command: _Command) -> _Command:
        publisher = command.publisher
        try:
            envelope = parse(command.entry.decode(), command.fields, self._namespace)
            if publisher is not None:
                envelope = publisher.bind(envelope)
            command.envelope = envelope
            match envelope.type:
                case wire.SUBMIT:
                    submit = wire.parse_submit(envelope)
                    if publisher is not None:
                        publisher.check_agent(submit.agent)
                        submit = publisher.scope(submit, self._blobs)
                    command.wanted, command.task = submit, submit.task_id
                case wire.CANCEL:
                    cancel = wire.parse_cancel(envelope)
                    command.wanted = cancel if publisher is None else publisher.scope(cancel)
                    command.task, command.overtakes = command.wanted.task_id, True
                case wire.SIGNAL:
                    signal = wire.parse_signal(envelope)
                    command.wanted = signal if publisher is None else publisher.scope(signal, self._blobs)
                    command.task, command.overtakes = command.wanted.task_id, True
                case wire.PUBLISH:
                    message = wire.parse_publish(envelope)
                    if publisher is not None:
                        publisher.check_topic(message.topic)
                        message = publisher.scope(message, self._blobs)
                    command.wanted = message
                case schedules.SET | schedules.DELETE:
                    pass
                case other:
                    known = (
                        wire.SUBMIT, wire.CANCEL, wire.SIGNAL, wire.PUBLISH, schedules.SET,
                        schedules.DELETE,
                    )  # fmt: skip
                    raise InvalidInput("type", f"{other!r} is no command; known are {', '.join(known)}")
        except InvalidInput as error:
            command.error, command.overtakes = error, True
        return command

    async def _carry_out(self, epoch: str, command: _Command) -> None:
        assert command.envelope is not None
        match command.wanted:
            case Submission() as wanted:
                await self._submit(epoch, command, wanted)
            case wire.Cancellation() as wanted:
                await self._cancel(wanted)
            case wire.Signal() as wanted:
                await self._signal(command.entry, wanted, command.envelope)
            case wire.Publication() as wanted:
                await self._publish(command.entry, wanted)
            case None if command.envelope.type == schedules.SET:
                await self._set_schedule(command, command.envelope)
            case None:
                schedule_id = schedules.parse_delete(data_of(command.envelope))
                if command.publisher is not None:
                    schedule_id = command.publisher.schedule_id(schedule_id)
                await self._schedules.delete(schedule_id)

    async def _set_schedule(self, command: _Command, envelope: Envelope) -> None:
        # The entry's own time: a second look at the same entry must find the same schedule.
        said_ms = int(command.entry.partition(b"-")[0])
        data = data_of(envelope)
        schedule = schedules.parse_set(data, said_ms, envelope.tenant)
        if command.publisher is not None:
            command.publisher.check_agent(schedule.agent)
            scoped = command.publisher.schedule(data, self._blobs)
            schedule = schedules.parse_set(scoped, said_ms, envelope.tenant)
        await self._schedules.set(schedule)

    async def _submit(self, epoch: str, command: _Command, wanted: Submission) -> None:
        if not tracing():
            await self._start(epoch, wanted)
            return
        if command.span is None:
            trace = task_traceparent(self._namespace, wanted.task_id, wanted.traceparent)
            command.open(self._span(command.entry, wanted.task_id, trace, wanted.tracestate))
        assert command.span is not None
        if command.span.recording:  # of a trace that is not kept nothing is said again
            wanted = replace(wanted, traceparent=command.span.traceparent)
        await self._start(epoch, wanted)

    def _span(self, entry: bytes, task: str, traceparent: str, tracestate: str = "") -> AbstractContextManager[Span]:
        """The span of a command, which what it starts is under."""
        return command_span(
            STATE_MANAGER, entry=entry.decode(), task=task, traceparent=traceparent, tracestate=tracestate
        )

    async def _start(self, epoch: str, wanted: Submission) -> None:
        wanted.epoch = epoch
        submitted = await self._admission.admit(wanted)
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

    async def _cancel(self, wanted: wire.Cancellation) -> None:
        bus = await self._admission.find(wanted.task_id)
        # Its entry is acknowledged after it: a broker that loses the cancel gives the entry again.
        answer = await bus.cancel(wanted.task_id, wanted.reason or "cancelled by its user", durable=False)
        if wanted.replyto and answer[0] == "unknown":
            # A repeat is answered as well, so nothing is said of a task that is not known but this.
            error = InvalidInput(
                "data.task_id", f"no task {wanted.task_id!r} is known; a later submit of it is refused"
            )
            await self._answers.send(
                wanted.replyto,
                facts.rejected(wanted.event_id, error, at_ms=_now(), task_id=wanted.task_id, cause=wanted.event_id),
            )

    async def _signal(self, entry: bytes, wanted: wire.Signal, envelope: Envelope) -> None:
        if not tracing():
            await self._hand_over(wanted)
            return
        with self._span(entry, wanted.task_id, envelope.traceparent, envelope.tracestate) as span:
            await self._hand_over(wanted, span.traceparent if span.recording else "")

    async def _hand_over(self, wanted: wire.Signal, trace: str = "") -> None:
        bus = await self._admission.find(wanted.task_id)
        event = f"{wanted.source}\n{wanted.event_id}"
        answer = await bus.signal(
            wanted.task_id, wanted.request_id, wanted.value_json, event, trace=trace, durable=False
        )
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

    async def _publish(self, entry: bytes, message: wire.Publication) -> None:
        if not tracing():
            await self._send(message, message.traceparent)
            return
        with self._span(entry, message.message_id, message.traceparent) as span:
            await self._send(message, span.traceparent or message.traceparent)

    async def _send(self, message: wire.Publication, traceparent: str) -> None:
        tenant = msgspec.json.encode({"tenant": message.tenant}) if message.tenant else b""
        context = published(tenant, message.topic, traceparent=traceparent)
        await self._topics.publish(
            message.message_id, message.topic, message.topic_source, message.data_json, context=context
        )

    async def _reject(self, command: _Command, error: InvalidInput) -> None:
        """Answer where there is a `replyto`, and keep the entry as a dead letter."""
        entry, task = command.entry.decode(), error.task_id if isinstance(error, Rejected) else ""
        fact = facts.rejected(entry, error, at_ms=_now(), task_id=task, cause=entry)
        await self._keep(command, "rejected", "Rejected", str(error), field=error.field, task=task)
        reply_to = reply_address(command.fields, self._namespace)
        if reply_to and (command.publisher is None or command.publisher.owns(reply_to)):
            await self._answers.send(reply_to, fact)
        logger.warning("an entry of %s is rejected: %s", command.place, error)
        self._metrics.tasks_refused[self._partition, _refusal(error)].inc()

    async def _keep(
        self, command: _Command, reason: str, type: str, message: str, *, field: str = "", task: str = ""
    ) -> None:
        """Keep an entry as a dead letter, once. Its fields stay as they came, unless they are over the size limit."""
        if command.kept:
            return
        letter: list[Argument] = [
            "reason", reason, "stream", command.place, "group", STATE_MANAGER, "entry", command.entry, "time", _now(),
            "field", field, "error", msgspec.json.encode({"type": type, "message": message}),
            "errors", msgspec.json.encode([{"type": type, "message": message, "at": float(_now())}]),
            *([] if not task else ["taskid", task]),
        ]  # fmt: skip
        for at in range(0, len(command.fields) - 1, 2):
            letter += [b"event:" + command.fields[at], command.fields[at + 1]]
        await self._home.keep_letter(letter)
        command.kept = True
        self._metrics.dead_letters[reason].inc()


class _Command:
    """An entry of an ingress stream that was read and is not settled."""

    __slots__ = (
        "_context", "_manager", "entry", "envelope", "error", "fields", "kept", "overtakes", "publisher", "span",
        "stream", "task", "tries", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        entry: bytes,
        fields: list[bytes],
        publisher: Publisher | None = None,
        stream: IngressStream | None = None,
    ) -> None:
        self.entry = entry
        self.fields = fields
        self.publisher = publisher
        """Whom it is bound to; None on the stream that trusted programs share."""
        self.stream = stream
        self.envelope: Envelope | None = None
        self.wanted: Submission | wire.Cancellation | wire.Signal | wire.Publication | None = None
        self.error: InvalidInput | None = None
        self.task = ""
        self.overtakes = False
        """Whether it may go before commands that wait."""
        self.kept = False
        self.tries = 0
        self.span: Span | None = None
        self._manager: AbstractContextManager[Span] | None = None
        self._context = copy_context()

    @property
    def place(self) -> str:
        """Its stream, as dead letters and the log name it."""
        return TASKS if self.publisher is None else f"{TASKS}:{self.publisher.name}"

    def open(self, span: AbstractContextManager[Span]) -> None:
        """Open the one span of all tries. It is not current between them: other commands come in between."""
        self._manager = span
        self.span = self._context.run(span.__enter__)

    def close(self) -> None:
        """End the span, with what is wrong with the command."""
        manager, self._manager, self.span = self._manager, None, None
        if manager is not None:
            error = self.error
            self._context.run(manager.__exit__, type(error) if error else None, error, None)


def _close(commands: Sequence[_Command]) -> None:
    for command in commands:
        command.close()


def _without_names(command: _Command, error: InvalidInput) -> InvalidInput:
    """The refusal as its publisher may see it: it must not learn which agents other tenants use."""
    if command.publisher is None or error.field != "data.agent" or command.envelope is None:
        return error
    return command.publisher.unknown_agent(str(data_of(command.envelope)["agent"]))


def _refusal(error: InvalidInput) -> str:
    """One word of `REFUSALS`."""
    if isinstance(error, Rejected) and error.retry_after_seconds is not None:
        return "overloaded"
    return {"data.agent": "unknown_agent", "id": "duplicate_id", "task_id": "duplicate_id"}.get(error.field, "invalid")


def _now() -> int:
    return time.time_ns() // 1_000_000
