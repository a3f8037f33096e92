"""Relays what leaves a partition: answers to `replyto` streams, bounded, and requests to agents of other partitions."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core.bus.connection import Argument, Transport
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.tasks import OpenRequest
from runtime_core.bus.topics import Topics
from runtime_core.errors import BusUnavailable, Fenced, Rejected, ServerError, WeftError, is_temporary
from runtime_core.state_manager.publishers import ANSWERS, REGISTRY_SECONDS, Publishers
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire import events as facts
from runtime_core.wire.commands import Submission
from runtime_core.wire.envelope import Envelope, to_fields
from runtime_core.wire.ids import fingerprint
from runtime_core.wire.step import ENDED, RESULT_ERROR, RESULT_OK, Status

logger = logging.getLogger(__name__)

UNDELIVERABLE = "undeliverable"
WRITE_SECONDS = 1.0
"""Limit of one write: in a Cluster, a slot that no server owns would block the call forever."""
ANSWER_OVERHEAD = 512
"""The cost of an answer on the server besides its fields: its stream, and its entry in the list of answers."""
TRIM_BATCH = 100


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """How many answers to one publisher a partition keeps, by bytes and age."""

    most_bytes: int = 67_108_864
    retention_seconds: float = 604_800.0


class NotNow(WeftError):
    """An answer cannot be written now, but may be later."""


class Answers:
    """Appends facts to any key. A fact that can never be written (wrong type, no permission) becomes a dead letter."""

    def __init__(self, edge: Transport, bus: EventBus, metrics: Metrics, home: EventBus, bounds: AnswerBounds) -> None:
        """`edge` is a connection for keys of any slot. Dead letters go to the partition of `bus`.

        `home` is the first partition, which knows the publishers.
        """
        self._edge = edge
        self._bus = bus
        self._metrics = metrics
        self._kept = KeptAnswers(edge, bus, metrics, Publishers(home), bounds)

    async def write(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact`, or keep it as a dead letter if it can never be written. Raises NotNow if it may be possible
        later."""
        try:
            fields = to_fields(fact)
            async with asyncio.timeout(WRITE_SECONDS):
                entry = cast(bytes, await self._edge.call("XADD", reply_to, "*", *fields))
        except TimeoutError:
            # If the broker is unavailable, wait for it: that says nothing about this stream.
            await self._bus.transport.call("PING")
            raise NotNow(f"the broker did not answer within {WRITE_SECONDS:g} s") from None
        except (ServerError, UnicodeError) as error:
            if isinstance(error, ServerError) and is_temporary(error):
                raise NotNow(str(error)) from error
            logger.warning("replyto %r of task %s cannot be written: %s", reply_to, fact.taskid, error)
            await self.keep(reply_to, fact.taskid, error, fact.data)
        else:
            await self._kept.add(reply_to, entry, sum(map(len, fields)))

    async def send(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact` as `write` does, or queue it for the relay of this partition, which retries it."""
        try:
            await self.write(reply_to, fact)
        except NotNow as error:
            logger.warning("replyto %r of task %s will be retried: %s", reply_to, fact.taskid, error)
            fields: list[Argument] = [
                "to", reply_to, "type", fact.type, "t", fact.taskid, "d", fact.data, "id", fact.causationid,
                "x", fact.traceparent, "e", fact.id,
            ]  # fmt: skip
            await self._bus.transport.call("XADD", self._bus.keys.replies, "*", *fields)

    async def keep(self, reply_to: str, task: str, error: Exception, data: bytes) -> None:
        """Keep an undeliverable answer as a dead letter."""
        reason = msgspec.json.encode({"type": type(error).__name__, "message": str(error)})
        await self._bus.keep_letter((
            "reason", UNDELIVERABLE,
            "stream", reply_to.encode(errors="replace"), "group", STATE_MANAGER,
            "time", time.time_ns() // 1_000_000, "taskid", task, "error", reason, "errors", "[]", "d", data,
        ))  # fmt: skip
        self._metrics.dead_letters[UNDELIVERABLE].inc()


class KeptAnswers:
    """The answers that one partition has written to registered publishers, within the bounds.

    A stream per publisher lists them, oldest first, each with its place and the bytes of all answers up to it. It does
    not matter whether the publisher has read or deleted an answer, since deleting it again does nothing. Streams of
    unregistered programs are left alone.
    """

    def __init__(
        self, edge: Transport, bus: EventBus, metrics: Metrics, publishers: Publishers, bounds: AnswerBounds
    ) -> None:
        self._edge = edge
        self._bus = bus
        self._metrics = metrics
        self._publishers = publishers
        self._bounds = bounds
        self._known: frozenset[str] = frozenset()
        self._known_at = float("-inf")
        self._failed = ""
        """The last error, which is logged once."""
        self._oldest: dict[str, tuple[int, int]] = {}
        """By publisher: when its oldest listed answer was written (ms), and the bytes of all earlier ones."""

    async def add(self, reply_to: str, entry: bytes, size: int) -> None:
        """List an answer that was written, and delete older ones beyond the bounds. Raises nothing."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                publisher = reply_to.partition(ANSWERS)[0]
                if ANSWERS in reply_to and publisher in await self._registered():
                    await self._list(publisher, reply_to, entry, size + len(reply_to) + ANSWER_OVERHEAD)
        except (BusUnavailable, ServerError, TimeoutError) as error:
            if str(error) != self._failed:
                self._failed = str(error)
                logger.warning("cannot bound the answers in %r: %s", reply_to, error)

    async def _registered(self) -> frozenset[str]:
        now = time.monotonic()
        if now - self._known_at >= REGISTRY_SECONDS:
            self._known = frozenset(publisher.name for publisher in await self._publishers.all())
            self._known_at = now
        return self._known

    async def _list(self, publisher: str, stream: str, entry: bytes, size: int) -> None:
        call, keys = self._bus.transport.call, self._bus.keys
        seconds = int(self._bounds.retention_seconds)
        self._metrics.answers_trimmed[publisher]  # exports 0 from the first answer on
        # A stream that gets no more answers is deleted as a whole, empty or not.
        await self._edge.call("EXPIRE", stream, seconds)
        until = cast(int, await call("HINCRBY", keys.answer_bytes, publisher, size))
        listed = keys.answers(publisher)
        written = cast(bytes, await call("XADD", listed, "*", "k", stream, "i", entry, "b", size, "u", until))
        now = int(written.partition(b"-")[0])
        written_at, before = self._oldest.get(publisher, (0, 0))
        if until - before > self._bounds.most_bytes or now - written_at > seconds * 1000:
            self._oldest[publisher] = await self._trim(publisher, until, now - seconds * 1000)

    async def _trim(self, publisher: str, until: int, since: int) -> tuple[int, int]:
        """Delete answers older than `since` (ms), and the oldest ones while there are too many bytes. Return the start
        of the rest, as in `_oldest`."""
        call, listed = self._bus.transport.call, self._bus.keys.answers(publisher)
        while page := pairs(await call("XRANGE", listed, "-", "+", "COUNT", TRIM_BATCH)):
            for item, flat in page:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                written_at, before = int(item.partition(b"-")[0]), int(fields[b"u"]) - int(fields[b"b"])
                if until - before <= self._bounds.most_bytes and written_at >= since:
                    return written_at, before
                try:
                    deleted = await self._edge.call("XDEL", fields[b"k"], fields[b"i"])
                except ServerError as error:
                    if is_temporary(error):
                        raise
                    deleted = 0  # the publisher has written something else there
                if deleted:
                    self._metrics.answers_trimmed[publisher].inc()
                await call("XDEL", listed, item)
        return since, until


POLL_SECONDS = 0.02
REQUESTS_INTERVAL_SECONDS = 1.0
"""The time between two checks of open requests."""
PARTITION_TIMEOUT_SECONDS = 5.0
"""How long a check waits for another partition: one that is unavailable must not delay checks of the others."""
OVERLOADED_SECONDS = 0.5
RELAY_BATCH = 100
REQUESTS_BATCH = 500
"""Open requests per check."""
WAITING_MAX = 1000
"""Entries that may wait at once; later ones wait behind them."""
RESCAN_SECONDS = 0.5
"""How soon waiting entries are tried again."""
BACKOFF_MIN_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 15.0
GIVE_UP_SECONDS = 60.0
"""How long an answer is retried, counted from the first failure of its stream."""
Fields = dict[bytes, bytes]


class _Final(msgspec.Struct):
    """The part of a final event's data that becomes the result of a step."""

    status: str
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Backoff:
    """The backoff of a place that accepts nothing now."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.due = 0.0
        self.tries = 0

    def failed(self, error: Exception, place: bytes) -> None:
        delay = min(BACKOFF_MIN_SECONDS * 2**self.tries, BACKOFF_MAX_SECONDS)
        self.due = time.monotonic() + delay
        self.tries = min(self.tries + 1, 16)
        expected = isinstance(error, WeftError)
        logger.log(
            logging.WARNING if expected else logging.ERROR,
            "cannot relay to %s, next try in %.1f s: %r", place.decode(errors="replace"), delay, error,
            exc_info=None if expected else error,
        )  # fmt: skip

    def gives_up(self, error: Exception) -> bool:
        """Return whether to stop retrying. Errors that may pass (a full broker, an overload) are retried forever."""
        waited_for = isinstance(error, Rejected) or (isinstance(error, ServerError) and is_temporary(error))
        return not waited_for and time.monotonic() - self.since >= GIVE_UP_SECONDS


class _StreamPass:
    """The position of a pass over a stream, and the entries that it has skipped."""

    __slots__ = ("places", "restart_at", "skipped", "start")

    def __init__(self) -> None:
        self.places: dict[bytes, _Backoff] = {}
        self.start = "-"
        self.skipped: list[bytes] = []
        """Places of the entries skipped since the pass began at the start."""
        self.restart_at = 0.0

    def restart(self) -> None:
        self.start, self.skipped = "-", []

    def skip(self, place: bytes) -> None:
        if not self.skipped:
            self.restart_at = time.monotonic() + RESCAN_SECONDS
        self.skipped.append(place)


class Relay:
    """The relay of one partition. `buses` are all partitions, `edge` is a connection for keys that users name.

    It takes the entries of each stream oldest first and deletes an entry after its delivery. So it delivers at least
    once, and a receiver that dedupes by id handles each entry once.
    """

    def __init__(
        self,
        bus: EventBus,
        buses: Sequence[EventBus],
        edge: Transport,
        metrics: Metrics,
        bounds: AnswerBounds = AnswerBounds(),
    ) -> None:
        self._bus = bus
        self._buses = buses
        self._answers = Answers(edge, bus, metrics, buses[0], bounds)
        self._topics = Topics(buses)

    async def run(self) -> None:
        """Relay until cancelled."""
        keys = self._bus.keys
        async with asyncio.TaskGroup() as group:
            group.create_task(self._drain(keys.replies, self._reply), name="replies")
            if len(self._buses) > 1:
                group.create_task(self._drain(keys.asks, self._ask), name="asks")
                group.create_task(self._watch_requests(), name="requests")

    async def _drain(self, stream: str, deliver: Callable[[Fields], Awaitable[None]]) -> None:
        scan = _StreamPass()
        while True:
            try:
                relayed = await self._relay_next(stream, deliver, scan)
            except BusUnavailable:
                scan.restart()
                await asyncio.sleep(0.1)
                continue
            if not relayed:
                await asyncio.sleep(POLL_SECONDS)

    async def relay_once(self) -> int:
        """Relay the waiting entries once. Return how many there were."""
        keys = self._bus.keys
        asks = await self._relay_next(keys.asks, self._ask, _StreamPass())
        return asks + await self._relay_next(keys.replies, self._reply, _StreamPass())

    async def _relay_next(self, stream: str, deliver: Callable[[Fields], Awaitable[None]], scan: _StreamPass) -> int:
        """Relay the next entries, oldest first, and return how many there were.

        An entry that must wait blocks only entries for the same place.
        """
        call = self._bus.transport.call
        if scan.skipped and time.monotonic() >= scan.restart_at:
            scan.restart()
        if len(scan.skipped) >= WAITING_MAX:
            return 0
        entries = pairs(await call("XRANGE", stream, scan.start, "+", "COUNT", RELAY_BATCH))
        for entry, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            place = _place_of(fields)
            # Entries for the same place stay in order: skip those behind a skipped one.
            if place not in scan.skipped and await self._deliver(fields, deliver, place, scan.places):
                await call("XDEL", stream, entry)
            else:
                scan.skip(place)
        if entries:
            scan.start = f"({entries[-1][0].decode()}" if scan.skipped else "-"
        return len(entries)

    async def _deliver(
        self, fields: Fields, deliver: Callable[[Fields], Awaitable[None]], place: bytes, places: dict[bytes, _Backoff]
    ) -> bool:
        """Deliver one entry. Return True if it is finished, even as a dead letter. Errors block no other place."""
        backoff = places.get(place)
        if backoff is not None and backoff.due > time.monotonic():
            return False
        try:
            await deliver(fields)
        except (BusUnavailable, Fenced):
            raise
        except Exception as error:
            backoff = places.setdefault(place, _Backoff())
            backoff.failed(error, place)
            if not backoff.gives_up(error):
                return False
            try:
                await self._give_up(fields, error)
            except ServerError as refused:  # the entry stays
                logger.info("cannot write a dead letter: %s", refused)
                return False
            return True
        places.pop(place, None)
        return True

    async def _give_up(self, fields: Fields, error: Exception) -> None:
        to = fields.get(b"to", fields.get(b"place", b"")).decode(errors="replace")
        task = fields.get(b"t", b"").decode(errors="replace")
        await self._answers.keep(to, task, error, fields.get(b"d", b""))
        if back := fields.get(b"back", b"").decode():
            there = to.partition(":")[2]
            await self._refuse(back, fields.get(b"agent", b"").decode(), there, Rejected("agent", str(error)))

    async def _reply(self, fields: Fields) -> None:
        task, to = fields[b"t"].decode(), fields[b"to"].decode()
        trace = fields.get(b"x", b"").decode()
        if to.startswith("@"):
            await self._answer_step(to, task, fields[b"d"], fields.get(b"l", b"").decode())
            return
        if fields[b"type"].decode() == facts.HUMAN_REQUESTED:
            asked = facts.question(task, fields[b"d"], at_ms=time.time_ns() // 1_000_000, trace=trace)
            await self._answers.write(to, asked)
            return
        status = fields[b"type"].decode().rpartition(".")[2]
        cause = fields.get(b"id", b"").decode()
        fact = facts.final(task, status, fields[b"d"], at_ms=time.time_ns() // 1_000_000, cause=cause, trace=trace)
        if b"e" in fields:  # queued by `Answers.send`
            fact = replace(fact, id=fields[b"e"].decode())
        await self._answers.write(to, fact)

    async def _answer_step(self, to: str, there: str, final: bytes, trace: str) -> None:
        """Write the result of a step in another partition: `to` is `@<partition>|<task>|<run>|<step>|<agent>`.

        `trace` is the traceparent of the span that ended the task.
        """
        partition, task, run, step, agent = to[1:].split("|")
        end = msgspec.json.decode(final, type=_Final)
        status, payload = (
            (RESULT_OK, bytes(end.output)) if end.status == Status.COMPLETED else (RESULT_ERROR, bytes(end.error))
        )
        bus = self._buses[int(partition)]
        await bus.answer_request(task, run, step, status, payload, agent, there, bytes(end.usage), trace)

    async def _ask(self, fields: Fields) -> None:
        if b"publish" in fields:
            await self._publish(fields)
            return
        partition, _, there = fields[b"place"].decode()[1:].partition(":")
        bus = self._buses[int(partition)]
        if b"cancel" in fields:
            await bus.cancel(there, _reason(fields[b"cancel"].decode()), durable=False)
            return
        back, agent = fields[b"back"].decode(), fields[b"agent"].decode()
        new = Submission(
            task_id=there,
            source="weft",
            event_id=there,
            digest=fingerprint(there, agent),
            agent=agent,
            key=fields[b"key"].decode(),
            input_json=fields[b"d"],
            replyto=f"@{self._bus.keys.partition}|{back}|{agent}" if back else "",
            context=_asked_by(fields[b"x"], f"{self._bus.keys.partition}:{back.rpartition('|')[0]}" if back else ""),
        )
        while True:
            try:
                submitted = await bus.submit(new)
                if back and not submitted.started and submitted.status in ENDED:
                    await self._answer_known(back, agent, bus, there)
                return
            except Rejected as error:
                if error.retry_after_seconds is None:
                    await self._refuse(back, agent, there, error)
                    return
                # Later requests wait too: requests between two partitions stay in order.
                await asyncio.sleep(OVERLOADED_SECONDS)

    async def _answer_known(self, back: str, agent: str, bus: EventBus, there: str) -> None:
        """Answer with the result of a task that has already ended: its answer may have been lost."""
        final = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(there), "out"))
        if final is not None:
            await self._answer_step(f"@{self._bus.keys.partition}|{back}|{agent}", there, final, "")
            return
        task, run, step = back.split("|")
        message = (
            f"agent {agent!r} in partition {bus.keys.partition} has answered (task {there}), but its result has "
            "expired: raise WEFT_RETENTION_SECONDS"
        )
        payload = msgspec.json.encode({"type": "ResultExpired", "message": message})
        await self._bus.answer_request(task, run, step, RESULT_ERROR, payload, agent, there)

    async def _watch_requests(self) -> None:
        while True:
            try:
                due = await self.follow_requests()
            except BusUnavailable:
                due = 0
            except ServerError as error:
                logger.warning("cannot check the open requests of partition %d: %s", self._bus.keys.partition, error)
                due = 0
            if due < REQUESTS_BATCH:
                await asyncio.sleep(REQUESTS_INTERVAL_SECONDS)

    async def follow_requests(self) -> int:
        """Repeat open requests that another partition has lost, and recover lost answers.

        Return how many requests were due.
        """
        due, found = await self._bus.due_requests(REQUESTS_BATCH)
        by_partition: dict[int, list[OpenRequest]] = {}
        for request in found:
            by_partition.setdefault(request.partition, []).append(request)
        await asyncio.gather(*(self._look(self._buses[there], some) for there, some in by_partition.items()))
        return due

    async def _look(self, bus: EventBus, requests: Sequence[OpenRequest]) -> None:
        try:
            async with asyncio.timeout(PARTITION_TIMEOUT_SECONDS):
                for request in requests:
                    if request.caller:
                        await self._cancel_again(bus, request)
                    else:
                        await self._follow(bus, request)
        except (BusUnavailable, TimeoutError):
            logger.info("partition %d is unavailable; checking open requests to it later", bus.keys.partition)

    async def _cancel_again(self, bus: EventBus, request: OpenRequest) -> None:
        """Cancel until the other task is known to have ended. A task that ends now is checked once more."""
        [answer, *_] = await bus.cancel(request.task, _reason(request.caller))
        if answer != "cancelled":
            await self._bus.forget_request(request)

    async def _follow(self, bus: EventBus, request: OpenRequest) -> None:
        """Repeat the request if the other task is missing or has ended; a running task needs nothing."""
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(request.task), "status"))
        if status is not None and status.decode() not in ENDED:
            return
        # Repeating also fetches a result: it is answered because the task is known and has ended.
        if await self._bus.repeat_request(request) == "OK":
            logger.info("repeating the request %s to partition %d", request.member, request.partition)

    async def _publish(self, fields: Fields) -> None:
        """Publish a message to agents in any partition. A repeat with the same id starts nothing."""
        while True:
            try:
                await self._topics.publish(
                    fields[b"publish"].decode(), fields[b"topic"].decode(), fields[b"key"].decode(), fields[b"d"],
                    context=fields[b"x"], sender=fields[b"sender"].decode(),
                )  # fmt: skip
                return
            except Rejected:  # overloaded: later entries wait too
                await asyncio.sleep(OVERLOADED_SECONDS)

    async def _refuse(self, back: str, agent: str, there: str, error: Rejected) -> None:
        logger.warning("cannot call agent %r in another partition: %s", agent, error)
        if back:
            task, run, step = back.split("|")
            payload = msgspec.json.encode({"type": "Rejected", "message": str(error)})
            await self._bus.answer_request(task, run, step, RESULT_ERROR, payload, agent, there)


def _reason(asker: str) -> str:
    return (
        f"task {asker}, which called it, has ended. This work does not continue if that task was reopened: submit the "
        "task again"
    )


def _place_of(fields: Fields) -> bytes:
    """Return the destination of an entry: a user's stream, or `@` and a partition."""
    to = fields.get(b"to") or fields.get(b"place") or b"publish"
    return re.split(rb"[|:]", to, maxsplit=1)[0] if to.startswith(b"@") else to


def _asked_by(context: bytes, who: str) -> bytes:
    """Return the context with the caller added to the chain of waiting runs, so that a reentrant call need not wait."""
    if not who:
        return context
    known = msgspec.json.decode(context, type=dict[str, msgspec.Raw]) if context else {}
    chain = msgspec.json.decode(known["~chain"], type=str) if "~chain" in known else ""
    known["~chain"] = msgspec.Raw(msgspec.json.encode(f"{chain} {who}".strip()))
    return msgspec.json.encode(known)
