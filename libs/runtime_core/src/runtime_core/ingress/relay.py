"""Relays what leaves a partition: answers to `replyto` streams, and requests to agents in other partitions."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core.bus.connection import Transport
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import OpenRequest
from runtime_core.bus.topics import Topics
from runtime_core.errors import BusUnavailable, Fenced, Rejected, ServerError, WeftError, is_temporary
from runtime_core.ids import fingerprint
from runtime_core.ingress.answers import AnswerBounds, Answers
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire import events as facts
from runtime_core.wire.commands import Submission
from runtime_core.wire.events import ENDED

logger = logging.getLogger(__name__)

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
        """Return whether to stop retrying. Errors that may pass (a full broker, an overload) are retried for ever."""
        waited_for = isinstance(error, Rejected) or (isinstance(error, ServerError) and is_temporary(error))
        return not waited_for and time.monotonic() - self.since >= GIVE_UP_SECONDS


class _Scan:
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
        bounds: AnswerBounds = AnswerBounds(),  # noqa: B008 - it is frozen
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
        scan = _Scan()
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
        asks = await self._relay_next(keys.asks, self._ask, _Scan())
        return asks + await self._relay_next(keys.replies, self._reply, _Scan())

    async def _relay_next(self, stream: str, deliver: Callable[[Fields], Awaitable[None]], scan: _Scan) -> int:
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
        """Deliver one entry. Return True if it is finished, also as a dead letter. Its errors block no other place."""
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
        status, payload = (b"K", bytes(end.output)) if end.status == "completed" else (b"E", bytes(end.error))
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
        await self._bus.answer_request(task, run, step, b"E", payload, agent, there)

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
            await self._bus.answer_request(task, run, step, b"E", payload, agent, there)


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
    """Return the context with the caller appended to the chain of waiting runs, so that a call back need not wait."""
    if not who:
        return context
    known = msgspec.json.decode(context, type=dict[str, msgspec.Raw]) if context else {}
    chain = msgspec.json.decode(known["~chain"], type=str) if "~chain" in known else ""
    known["~chain"] = msgspec.Raw(msgspec.json.encode(f"{chain} {who}".strip()))
    return msgspec.json.encode(known)
