"""Admits the commands on the ingress streams, in the order of each stream.

Trusted programs append to `<namespace>:tasks`, in any language. An untrusted publisher has its own stream, and its
commands are bound to the publisher and its tenant (`runtime_core.state_manager.publishers`).

One admitter leads at a time: an admitter with a newer epoch fences it. It deletes and acknowledges an entry only after
it has started the task or stored the rejection. Each step may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core.base.periodic import cancel_and_wait
from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, ingress
from runtime_core.bus.partition import make_group
from runtime_core.bus.spans import command_span
from runtime_core.bus.tasks import NotYet
from runtime_core.bus.topics import Topics, published
from runtime_core.consumer.progress import ProgressWatch
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, NotDurable, Rejected, ServerError, is_temporary
from runtime_core.state_manager import schedules
from runtime_core.state_manager.admission import Admission, answer_question
from runtime_core.state_manager.ingress import Command, IngressEntry, IngressStream, PublisherStreams
from runtime_core.state_manager.publishers import Publisher
from runtime_core.state_manager.relay import AnswerBounds, Answers
from runtime_core.state_manager.schedules import Schedules
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import REFUSALS
from runtime_core.telemetry.spans import Span, task_traceparent, tracing
from runtime_core.wire import commands
from runtime_core.wire import events as facts
from runtime_core.wire.blobs import folder_of_namespace
from runtime_core.wire.commands import Submission, data_of
from runtime_core.wire.envelope import Envelope, reply_address
from runtime_core.wire.step import ENDED

logger = logging.getLogger(__name__)

BLOCK_MS = 500
READ_BATCH_MAX = 200
"""Commands per read, if they are small."""
READ_BATCH_FIRST = 8
READ_BYTES = 4 * 1024 * 1024
"""Target size of a read: the number of commands adapts to the size of earlier ones."""
YIELD_BYTES = 256 * 1024
"""How many bytes are parsed before the event loop gets a turn."""
RETRY_SECONDS = 0.2
"""The pause before commands that must wait are tried again."""
WAITING_MAX = 1000
"""Commands that may wait at once; later ones are not read yet."""
TRIES_MAX = 20
"""Attempts at a command that fails with an unexpected error."""


class Admitter:
    """Reads `<namespace>:tasks` and the streams of publishers for one epoch."""

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        buses: Sequence[EventBus],
        metrics: Metrics,
        watch: ProgressWatch,
        connect: Callable[[], Awaitable[Transport]] | None = None,
        blob_url: str | None = None,
        edge: Transport | None = None,
        bounds: AnswerBounds = AnswerBounds(),  # noqa: B008 - it is frozen
        schedule_bounds: schedules.ScheduleBounds = schedules.ScheduleBounds(),  # noqa: B008 - it is frozen
    ) -> None:
        """Submit to the partitions `buses`; the first one has the ingress.

        For a Cluster, `connect` opens a connection per publisher's stream, and `edge` writes the answers. `blob_url`:
        the blob store.
        """
        home, namespace = buses[0], buses[0].keys.namespace
        self._transport = transport
        self._admission = admission
        self._home = home
        self._namespace = namespace
        self._key = ingress(namespace)
        self._metrics = metrics
        self._watch = watch
        self._partition = str(home.keys.partition)
        for reason in REFUSALS:
            metrics.tasks_refused[self._partition, reason]  # exports 0 from the start
        self._answers = Answers(edge or transport, home, metrics, home, bounds)
        self._schedules = Schedules(home, admission)
        self._tenant_schedules = schedules.TenantSchedules(self._schedules, schedule_bounds)
        self._topics = Topics(buses)
        self._connect = connect
        self._blobs = f"{blob_url}/{folder_of_namespace(namespace)}" if blob_url else ""
        self._batch = min(READ_BATCH_FIRST, READ_BATCH_MAX)

    async def run(self, epoch: str) -> None:
        """Admit until cancelled. Raises Fenced if another admitter leads."""
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
            await cancel_and_wait(publishers, shared)

    async def _read_shared(self, epoch: str) -> None:
        """Admit the commands on the stream that trusted programs share."""
        consumer = f"admitter-{epoch}"
        # First the entries that an earlier admitter has read: admission follows the order of the stream.
        cursor = "0-0"
        waiting: list[Command] = []
        try:
            while True:
                try:
                    if len(waiting) >= WAITING_MAX:
                        await asyncio.sleep(RETRY_SECONDS)
                        entries = []
                    elif cursor != ">":
                        entries = await self._left_behind(consumer, cursor)
                        cursor = entries[-1][0].decode() if entries else ">"
                    else:
                        entries = await self._read(consumer, int(RETRY_SECONDS * 1000) if waiting else BLOCK_MS)
                        if await self._others_hold(consumer):
                            # A former leader has read on, before it learned that it leads no longer.
                            cursor = "0-0"
                            _close(waiting)
                            waiting = []
                            continue
                except (BusUnavailable, ServerError) as error:
                    # At its memory limit a server creates no group.
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

    async def _take(self, entries: Sequence[tuple[bytes, list[bytes]]], waiting: list[Command]) -> None:
        """Parse entries, and yield to the loop in between: large commands must not delay the leader's heartbeat."""
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
            self._batch = min(READ_BATCH_MAX, self._batch * 2)

    async def _settle_all(self, epoch: str, commands: list[Command]) -> list[Command]:
        """Execute commands in order, and return those that must wait.

        Later commands wait behind one that waits, so that submits keep their order. Cancels and signals overtake them,
        because they end tasks and free memory, but never an earlier command for the same task.
        """
        waiting: list[Command] = []
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

    async def _others_hold(self, consumer: str) -> bool:
        """Return whether another admitter has read entries that it has not acknowledged."""
        try:
            reply = cast(list[Reply], await self._transport.call("XPENDING", self._key, STATE_MANAGER))
        except ServerError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            return False
        holders = cast(list[list[bytes]], reply[3] or [])
        return any(name != consumer.encode() for name, _ in holders)

    async def _left_behind(self, consumer: str, after: str) -> list[tuple[bytes, list[bytes]]]:
        """Claim entries that any admitter has read and not admitted, oldest first."""
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
            # All were deleted but not acknowledged.
            await call("XACK", self._key, STATE_MANAGER, *ids)

    async def _settle(self, epoch: str, command: Command) -> bool:
        """Execute one command and remove its entry. Return False if it must wait.

        An invalid command is answered and kept as a dead letter; it does not block the stream.
        """
        try:
            if command.error is None:
                try:
                    await self._carry_out(epoch, command)
                except (NotYet, NotDurable):
                    return False
                except InvalidInput as error:
                    command.error = command.public_error(error)
            if command.error is not None:
                await self._reject(command, command.error)
        except (BusUnavailable, Fenced):
            raise
        except Exception as error:
            if not await self._dead_lettered(command, error):
                return False
        command.close()
        await self._remove(command)
        self._metrics.events_handled["admitted"].inc()
        return True

    async def _remove(self, command: Command) -> None:
        """Delete an entry from its stream; retry while the server cannot write."""
        while True:
            try:
                # Delete first: an entry that is only acknowledged would stay in the stream forever.
                if command.stream is not None:
                    await command.stream.remove(command.entry)
                    return
                await self._transport.call("XDEL", self._key, command.entry)
                await self._transport.call("XACK", self._key, STATE_MANAGER, command.entry)
                return
            except ServerError as error:
                if not is_temporary(error):
                    raise
                logger.warning("cannot delete a command from %s, retrying: %s", command.place, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _dead_lettered(self, command: Command, error: Exception) -> bool:
        """Return True if a failing command is now a dead letter, False if it will be retried.

        A full broker is retried without a limit. Any other error has a limit, because it would block the stream.
        """
        if isinstance(error, ServerError) and is_temporary(error):
            if not command.tries:
                logger.warning("entry %s of %s waits for the broker: %s", command.entry.decode(), command.place, error)
            command.tries += 1
            return False
        command.tries += 1
        logger.error(
            "entry %s of %s failed, attempt %d: %r",
            command.entry.decode(),
            command.place,
            command.tries,
            error,
            exc_info=error,
        )
        if command.tries < TRIES_MAX:
            return False
        try:
            await self._keep(command, "defect", type(error).__name__, str(error))
        except ServerError as refused:
            logger.warning("entry %s of %s waits for the broker: %s", command.entry.decode(), command.place, refused)
            return False
        return True

    def _command(self, entry: bytes, fields: list[bytes]) -> Command:
        """Return a command for an entry; `error` is set if the entry is invalid."""
        command = Command(entry, fields)
        command.parse(self._namespace, self._blobs)
        return command

    def _bound_command(
        self, publisher: Publisher, stream: IngressStream, entry: IngressEntry, refused: InvalidInput | None
    ) -> Command:
        """Return a command of a publisher's stream, bound to the publisher and its tenant."""
        command = Command(entry.id, entry.fields, publisher, stream)
        if refused is not None:
            command.error, command.overtakes = refused, True
        else:
            command.parse(self._namespace, self._blobs)
        return command

    async def _carry_out(self, epoch: str, command: Command) -> None:
        assert command.envelope is not None
        match command.wanted:
            case Submission() as wanted:
                await self._submit(epoch, command, wanted)
            case commands.Cancellation() as wanted:
                await self._cancel(wanted)
            case commands.Signal() as wanted:
                await self._signal(command.entry, wanted, command.envelope)
            case commands.Publication() as wanted:
                await self._publish(command.entry, wanted)
            case None if command.envelope.type == schedules.SET:
                await self._set_schedule(epoch, command, command.envelope)
            case None:
                schedule_id = schedules.parse_delete(data_of(command.envelope))
                if command.publisher is None:
                    await self._schedules.delete(schedule_id, epoch)
                else:
                    await self._tenant_schedules.delete(command.publisher.schedule_id(schedule_id), epoch)

    async def _set_schedule(self, epoch: str, command: Command, envelope: Envelope) -> None:
        # The entry's time: admitting the same entry again must give the same schedule.
        said_ms = int(command.entry.partition(b"-")[0])
        data = data_of(envelope)
        schedule = schedules.parse_set(data, said_ms, envelope.tenant)
        if command.publisher is None:
            await self._schedules.set(schedule, epoch)
            return
        command.publisher.check_agent(schedule.agent)
        scoped = command.publisher.schedule(data, self._blobs)
        await self._tenant_schedules.set(schedules.parse_set(scoped, said_ms, envelope.tenant), epoch)

    async def _submit(self, epoch: str, command: Command, wanted: Submission) -> None:
        if not tracing():
            await self._start(epoch, wanted)
            return
        if command.span is None:
            trace = task_traceparent(self._namespace, wanted.task_id, wanted.traceparent)
            command.open(self._span(command.entry, wanted.task_id, trace, wanted.tracestate))
        assert command.span is not None
        if command.span.recording:  # an unsampled trace is not propagated
            wanted = replace(wanted, traceparent=command.span.traceparent)
        await self._start(epoch, wanted)

    def _span(self, entry: bytes, task: str, traceparent: str, tracestate: str = "") -> AbstractContextManager[Span]:
        """Return the span of a command, the parent of what the command starts."""
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

    async def _cancel(self, wanted: commands.Cancellation) -> None:
        bus = await self._admission.find(wanted.task_id)
        # Not durable: the entry is acknowledged later, so a broker that loses the cancel delivers the entry again.
        answer = await bus.cancel(wanted.task_id, wanted.reason or "cancelled by its user", durable=False)
        if wanted.replyto and answer[0] == "unknown":
            # A repeated cancel gets the same answer.
            error = InvalidInput(
                "data.task_id", f"task {wanted.task_id!r} is unknown; a later submit of it will be refused"
            )
            await self._answers.send(
                wanted.replyto,
                facts.rejected(wanted.event_id, error, at_ms=_now(), task_id=wanted.task_id, cause=wanted.event_id),
            )

    async def _signal(self, entry: bytes, wanted: commands.Signal, envelope: Envelope) -> None:
        if not tracing():
            await self._deliver_signal(wanted)
            return
        with self._span(entry, wanted.task_id, envelope.traceparent, envelope.tracestate) as span:
            await self._deliver_signal(wanted, span.traceparent if span.recording else "")

    async def _deliver_signal(self, wanted: commands.Signal, trace: str = "") -> None:
        bus = await self._admission.find(wanted.task_id)
        event = f"{wanted.source}\n{wanted.event_id}"
        answer = await answer_question(
            bus, wanted.task_id, wanted.request_id, wanted.value_json, event, trace=trace, durable=False
        )
        match answer[0]:
            case "unknown":
                raise InvalidInput("data.task_id", f"task {wanted.task_id!r} is unknown")
            case "ended":
                raise InvalidInput("data.task_id", f"task {wanted.task_id!r} has already ended ({answer[1]})")
            case "answered":
                raise InvalidInput("data.request_id", f"question {wanted.request_id!r} was already answered")
            case "no_request":
                raise InvalidInput("data.request_id", f"the task has no open question {wanted.request_id!r}")
            case "invalid":
                raise InvalidInput(f"data.{answer[2]}", answer[1])

    async def _publish(self, entry: bytes, message: commands.Publication) -> None:
        if not tracing():
            await self._send(message, message.traceparent)
            return
        with self._span(entry, message.message_id, message.traceparent) as span:
            await self._send(message, span.traceparent or message.traceparent)

    async def _send(self, message: commands.Publication, traceparent: str) -> None:
        tenant = msgspec.json.encode({"tenant": message.tenant}) if message.tenant else b""
        context = published(tenant, message.topic, traceparent=traceparent)
        await self._topics.publish(
            message.message_id, message.topic, message.topic_source, message.data_json, context=context
        )

    async def _reject(self, command: Command, error: InvalidInput) -> None:
        """Keep the entry as a dead letter, and answer on its `replyto`, if it has one."""
        entry, task = command.entry.decode(), error.task_id if isinstance(error, Rejected) else ""
        fact = facts.rejected(entry, error, at_ms=_now(), task_id=task, cause=entry)
        await self._keep(command, "rejected", "Rejected", str(error), field=error.field, task=task)
        reply_to = reply_address(command.fields, self._namespace)
        if reply_to and (command.publisher is None or command.publisher.owns(reply_to)):
            await self._answers.send(reply_to, fact)
        logger.warning("rejected entry %s of %s: %s", entry, command.place, error)
        self._metrics.tasks_refused[self._partition, _refusal(error)].inc()

    async def _keep(
        self, command: Command, reason: str, type: str, message: str, *, field: str = "", task: str = ""
    ) -> None:
        """Keep an entry as a dead letter, once. Fields over the size limit are truncated."""
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


def _close(commands: Sequence[Command]) -> None:
    for command in commands:
        command.close()


def _refusal(error: InvalidInput) -> str:
    """Return the metric's reason, one of `REFUSALS`."""
    if isinstance(error, Rejected) and error.retry_after_seconds is not None:
        return "overloaded"
    return {"data.agent": "unknown_agent", "id": "duplicate_id", "task_id": "duplicate_id"}.get(error.field, "invalid")


def _now() -> int:
    return time.time_ns() // 1_000_000
