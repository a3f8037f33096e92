"""Appends answers to `replyto` streams, and bounds the answers that a publisher leaves unread."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument, Transport
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.errors import BusUnavailable, ServerError, WeftError, is_temporary
from runtime_core.ingress.publishers import ANSWERS, REGISTRY_SECONDS, Publishers
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.envelope import Envelope, to_fields

logger = logging.getLogger(__name__)

UNDELIVERABLE = "undeliverable"
WRITE_SECONDS = 1.0
"""Limit of one write: in a Cluster, a slot that no server owns would block the call for ever."""
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
