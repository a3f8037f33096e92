"""Carries what leaves a partition: final events to the streams that want them, requests to instances elsewhere."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from runtime_core.bus.connection import Argument, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.topics import Topics
from runtime_core.bus.values import OpenRequest, pairs
from runtime_core.errors import BusUnavailable, Fenced, Rejected, ServerError, WeftError, is_temporary
from runtime_core.ids import fingerprint
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire import events as facts
from runtime_core.wire.commands import Submission
from runtime_core.wire.envelope import Envelope, to_fields
from runtime_core.wire.results import ENDED

logger = logging.getLogger(__name__)

UNDELIVERABLE = "undeliverable"
WRITE_SECONDS = 1.0
"""How long one answer may take: in a Cluster nobody may serve the slot of its stream, and the call waits for ever."""


class NotNow(WeftError):
    """An answer cannot be written at the moment."""


class Answers:
    """Appends facts to any key. One that can never be written (another type, no right) becomes a dead letter."""

    def __init__(self, edge: Transport, bus: EventBus, metrics: Metrics) -> None:
        """`edge` is a connection for keys of any slot; what cannot be delivered is kept in the partition of `bus`."""
        self._edge = edge
        self._bus = bus
        self._metrics = metrics

    async def write(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact`, or keep it as a dead letter where it can never be. Raises NotNow where it may be later."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._edge.call("XADD", reply_to, "*", *to_fields(fact))
        except TimeoutError:
            # A broker that is away says nothing about this stream: wait until it is back.
            await self._bus.transport.call("PING")
            raise NotNow(f"no answer within {WRITE_SECONDS:g} s") from None
        except (ServerError, UnicodeError) as error:
            if isinstance(error, ServerError) and is_temporary(error):
                raise NotNow(str(error)) from error
            logger.warning("replyto %r of task %s cannot be written: %s", reply_to, fact.taskid, error)
            await self.keep(reply_to, fact.taskid, error, fact.data)

    async def send(self, reply_to: str, fact: Envelope) -> None:
        """Append `fact` as `write` does, or leave it to the relay of this partition, which tries again."""
        try:
            await self.write(reply_to, fact)
        except NotNow as error:
            logger.warning("replyto %r of task %s is tried again: %s", reply_to, fact.taskid, error)
            fields: list[Argument] = [
                "to", reply_to, "type", fact.type, "t", fact.taskid, "d", fact.data, "id", fact.causationid,
                "x", fact.traceparent, "e", fact.id,
            ]  # fmt: skip
            await self._bus.transport.call("XADD", self._bus.keys.replies, "*", *fields)

    async def keep(self, reply_to: str, task: str, error: Exception, data: bytes) -> None:
        """Keep an answer that is not written as a dead letter."""
        reason = msgspec.json.encode({"type": type(error).__name__, "message": str(error)})
        await self._bus.keep_letter((
            "reason", UNDELIVERABLE,
            "stream", reply_to.encode(errors="replace"), "group", STATE_MANAGER,
            "time", time.time_ns() // 1_000_000, "taskid", task, "error", reason, "errors", "[]", "d", data,
        ))  # fmt: skip
        self._metrics.dead_letters[UNDELIVERABLE].inc()


IDLE_SECONDS = 0.02
LOOK_SECONDS = 1.0
"""Between two looks at open requests."""
PATIENCE_SECONDS = 5.0
"""How long a look waits for another partition. One that is away must not delay the looks at the others."""
OVERLOADED_SECONDS = 0.5
BATCH = 100
REQUESTS = 500
"""How many open requests are looked at in one go."""


LOOK_AHEAD = 1000
"""How many entries may wait at once; those behind them wait with them."""
AGAIN_SECONDS = 0.5
"""How soon entries that wait are looked at again."""
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_LAST_SECONDS = 15.0
GIVE_UP_SECONDS = 60.0
"""How long an answer is tried, from the first failure of its stream on."""

Fields = dict[bytes, bytes]


class _Final(msgspec.Struct):
    """What of a final event's data becomes the result of a step."""

    status: str
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Backoff:
    """A place that takes nothing at the moment."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.due = 0.0
        self.tries = 0

    def failed(self, error: Exception, place: bytes) -> None:
        delay = min(BACKOFF_FIRST_SECONDS * 2**self.tries, BACKOFF_LAST_SECONDS)
        self.due = time.monotonic() + delay
        self.tries = min(self.tries + 1, 16)
        expected = isinstance(error, WeftError)
        logger.log(
            logging.WARNING if expected else logging.ERROR,
            "%s takes nothing now, next try in %.1f s: %r", place.decode(errors="replace"), delay, error,
            exc_info=None if expected else error,
        )  # fmt: skip

    def gives_up(self, error: Exception) -> bool:
        """Whether it has been tried for long enough. What other tasks wait for is not given up while it may pass."""
        waited_for = isinstance(error, Rejected) or (isinstance(error, ServerError) and is_temporary(error))
        return not waited_for and time.monotonic() - self.since >= GIVE_UP_SECONDS


class _Looking:
    """Where a look at a stream is, and what it has left for later."""

    __slots__ = ("again_at", "passed", "places", "start")

    def __init__(self) -> None:
        self.places: dict[bytes, _Backoff] = {}
        self.start = "-"
        self.passed: list[bytes] = []
        """Places of the entries that were left where they are since the last look from the start."""
        self.again_at = 0.0

    def again(self) -> None:
        self.start, self.passed = "-", []

    def pass_by(self, place: bytes) -> None:
        if not self.passed:
            self.again_at = time.monotonic() + AGAIN_SECONDS
        self.passed.append(place)


class Relay:
    """One partition's relay; `buses` are all partitions, `edge` is a connection for users' own keys.

    It takes the entries of each stream oldest first, and deletes an entry after its delivery. So it delivers at least
    once, and a receiver that dedupes by id handles each entry once.
    """

    def __init__(self, bus: EventBus, buses: Sequence[EventBus], edge: Transport, metrics: Metrics) -> None:
        self._bus = bus
        self._buses = buses
        self._answers = Answers(edge, bus, metrics)
        self._topics = Topics(buses)

    async def run(self) -> None:
        """Relay until cancelled."""
        keys = self._bus.keys
        async with asyncio.TaskGroup() as group:
            group.create_task(self._empty(keys.replies, self._reply), name="replies")
            if len(self._buses) > 1:
                group.create_task(self._empty(keys.asks, self._ask), name="asks")
                group.create_task(self._watch_requests(), name="requests")

    async def _empty(self, stream: str, carry: Callable[[Fields], Awaitable[None]]) -> None:
        looking = _Looking()
        while True:
            try:
                looked = await self._look_at(stream, carry, looking)
            except BusUnavailable:
                looking.again()
                await asyncio.sleep(0.1)
                continue
            if not looked:
                await asyncio.sleep(IDLE_SECONDS)

    async def carry(self) -> int:
        """Carry what waits now, once; how many entries there were."""
        keys = self._bus.keys
        asks = await self._look_at(keys.asks, self._ask, _Looking())
        return asks + await self._look_at(keys.replies, self._reply, _Looking())

    async def _look_at(self, stream: str, carry: Callable[[Fields], Awaitable[None]], looking: _Looking) -> int:
        """Carry the next entries, oldest first; how many there were.

        One that must wait holds up only those that go to the same place.
        """
        call = self._bus.transport.call
        if looking.passed and time.monotonic() >= looking.again_at:
            looking.again()
        if len(looking.passed) >= LOOK_AHEAD:
            return 0
        entries = pairs(await call("XRANGE", stream, looking.start, "+", "COUNT", BATCH))
        for entry, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            place = _place_of(fields)
            # Once one was passed by, those behind it for the same place are, too: their order is kept.
            if place not in looking.passed and await self._carried(fields, carry, place, looking.places):
                await call("XDEL", stream, entry)
            else:
                looking.pass_by(place)
        if entries:
            looking.start = f"({entries[-1][0].decode()}" if looking.passed else "-"
        return len(entries)

    async def _carried(
        self, fields: Fields, carry: Callable[[Fields], Awaitable[None]], place: bytes, places: dict[bytes, _Backoff]
    ) -> bool:
        """Whether the entry is done with; whatever is wrong with it stops nothing else."""
        backoff = places.get(place)
        if backoff is not None and backoff.due > time.monotonic():
            return False
        try:
            await carry(fields)
        except (BusUnavailable, Fenced):
            raise
        except Exception as error:
            backoff = places.setdefault(place, _Backoff())
            backoff.failed(error, place)
            if not backoff.gives_up(error):
                return False
            try:
                await self._give_up(fields, error)
            except ServerError as refused:  # not even a dead letter has room: it stays where it is
                logger.info("no dead letter can be written: %s", refused)
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
        if b"e" in fields:  # left to us by the admitter
            fact = replace(fact, id=fields[b"e"].decode())
        await self._answers.write(to, fact)

    async def _answer_step(self, to: str, there: str, final: bytes, trace: str) -> None:
        """The task that was started for a step elsewhere has ended: `@<partition>|<task>|<run>|<step>|<agent>`.

        `trace` is the traceparent of the span that has ended it.
        """
        partition, task, run, step, agent = to[1:].split("|")
        end = msgspec.json.decode(final, type=_Final)
        status, payload = (b"K", bytes(end.output)) if end.status == "completed" else (b"E", bytes(end.error))
        bus = self._buses[int(partition)]
        await bus.answered(task, run, step, status, payload, agent, there, bytes(end.usage), trace)

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
                # Those behind it wait with it: the order between two partitions is kept.
                await asyncio.sleep(OVERLOADED_SECONDS)

    async def _answer_known(self, back: str, agent: str, bus: EventBus, there: str) -> None:
        """Answer from the result of a task that ended before: its own answer may have been lost."""
        final = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(there), "out"))
        if final is not None:
            await self._answer_step(f"@{self._bus.keys.partition}|{back}|{agent}", there, final, "")
            return
        task, run, step = back.split("|")
        message = (
            f"agent {agent!r} in partition {bus.keys.partition} has answered (task {there}), but its result is past "
            "its retention: raise WEFT_RETENTION_SECONDS"
        )
        payload = msgspec.json.encode({"type": "ResultExpired", "message": message})
        await self._bus.answered(task, run, step, b"E", payload, agent, there)

    async def _watch_requests(self) -> None:
        while True:
            try:
                due = await self.look_at_requests()
            except BusUnavailable:
                due = 0
            except ServerError as error:
                logger.warning("open requests of partition %d: %s", self._bus.keys.partition, error)
                due = 0
            if due < REQUESTS:
                await asyncio.sleep(LOOK_SECONDS)

    async def look_at_requests(self) -> int:
        """Repeat open requests that another partition has forgotten, and take answers that were lost.

        Returns how many requests were due.
        """
        due, found = await self._bus.due_requests(REQUESTS)
        by_partition: dict[int, list[OpenRequest]] = {}
        for request in found:
            by_partition.setdefault(request.partition, []).append(request)
        await asyncio.gather(*(self._look(self._buses[there], some) for there, some in by_partition.items()))
        return due

    async def _look(self, bus: EventBus, requests: Sequence[OpenRequest]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                for request in requests:
                    if request.asker:
                        await self._cancel_again(bus, request)
                    else:
                        await self._follow(bus, request)
        except (BusUnavailable, TimeoutError):
            logger.info("partition %d is away; open requests to it are looked at later", bus.keys.partition)

    async def _cancel_again(self, bus: EventBus, request: OpenRequest) -> None:
        """Cancel until the task there is known to have ended: one that ends now is looked at once more."""
        [answer, *_] = await bus.cancel(request.task, _reason(request.asker))
        if answer != "cancelled":
            await self._bus.forget_request(request)

    async def _follow(self, bus: EventBus, request: OpenRequest) -> None:
        """Ask again where the task there is gone, answer where it has ended. One that runs needs nothing."""
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(request.task), "status"))
        if status is not None and status.decode() not in ENDED:
            return
        # Also for a result: the request is answered when the repeat finds that its task is known and has ended.
        if await self._bus.repeat_request(request) == "OK":
            logger.info("repeating the request %s to partition %d", request.member, request.partition)

    async def _publish(self, fields: Fields) -> None:
        """A message for agents in any partition; its id makes a repeat start nothing."""
        while True:
            try:
                await self._topics.publish(
                    fields[b"publish"].decode(), fields[b"topic"].decode(), fields[b"key"].decode(), fields[b"d"],
                    context=fields[b"x"], sender=fields[b"sender"].decode(),
                )  # fmt: skip
                return
            except Rejected:  # full: those behind it wait with it
                await asyncio.sleep(OVERLOADED_SECONDS)

    async def _refuse(self, back: str, agent: str, there: str, error: Rejected) -> None:
        logger.warning("agent %r in another partition cannot be asked: %s", agent, error)
        if back:
            task, run, step = back.split("|")
            payload = msgspec.json.encode({"type": "Rejected", "message": str(error)})
            await self._bus.answered(task, run, step, b"E", payload, agent, there)


def _reason(asker: str) -> str:
    return f"task {asker}, which asked for it, has ended"


def _place_of(fields: Fields) -> bytes:
    """Where an entry goes: a user's stream, or `@` and a partition."""
    to = fields.get(b"to") or fields.get(b"place") or b"publish"
    return re.split(rb"[|:]", to, maxsplit=1)[0] if to.startswith(b"@") else to


def _asked_by(context: bytes, who: str) -> bytes:
    """The context with one more link of the chain of who waits for whom: a call back to one of them must not wait."""
    if not who:
        return context
    known = msgspec.json.decode(context, type=dict[str, msgspec.Raw]) if context else {}
    chain = msgspec.json.decode(known["~chain"], type=str) if "~chain" in known else ""
    known["~chain"] = msgspec.Raw(msgspec.json.encode(f"{chain} {who}".strip()))
    return msgspec.json.encode(known)
