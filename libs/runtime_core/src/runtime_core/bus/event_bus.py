"""The broker's verbs for one partition: publish, read, commit, record, retry, dead-letter, adopt.

The bus runs no agents and no tools: it moves entries. One function on the broker makes each change (see `functions/`),
so that it happens completely or not at all. The verbs of tasks, topics, deliveries and commits are in files of their
own; those for the services around them are here: the record, timers, measures, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from runtime_core.bus.connection import Reply, position
from runtime_core.bus.deliveries import Delivery, DeliveryVerbs, pairs
from runtime_core.bus.topics import TopicVerbs
from runtime_core.errors import Fenced, ServerError
from runtime_core.telemetry.redaction import redactor
from runtime_core.wire.step import RESULT_ERROR

RECORD_BLOCK_MS = 500
"""How long a read of the record waits for an entry."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The amount of waiting work."""

    started: int
    """Tasks started so far."""
    open: int
    mail: int
    """Events in mailboxes; a lower bound if more than 1,000 mailboxes are deeper than 50."""
    deepest: int


@dataclass(frozen=True, slots=True)
class Gateways:
    """The gateways that serve a stream of an engine."""

    live: int
    """The number of live gateways."""
    silent_seconds: float | None
    """Time since the last sign of a gateway; None: there was none."""
    now: float
    """The partition's time, in seconds since 1970."""
    problem: str
    """The message if no gateway serves the stream: one line, with the remedy."""


class EventBus(TopicVerbs, DeliveryVerbs):
    """One partition of a namespace, seen by one owner (`bus/partition.py` says what an owner is)."""

    # -- the record: one entry for each commit that has rows ---------------------------------------------------------

    async def read_record(self, after: str, count: int) -> list[tuple[bytes, list[bytes]]]:
        """Return entries of the record stream after a cursor. The reader stores the cursor itself."""
        reply = await self.transport.blocking(
            "XREAD", "COUNT", count, "BLOCK", RECORD_BLOCK_MS, "STREAMS", self.keys.record, after
        )
        return pairs(cast(list[list[Reply]], reply)[0][1]) if reply else []

    async def within_record(self, cursor: str) -> str:
        """Return the cursor, or `0-0` if it is ahead of the stream because the broker has lost writes.

        Reading again from the start repeats rows, which changes nothing. Reading from a cursor ahead of the stream
        would miss the next rows.
        """
        try:
            info = cast(list[Reply], await self.transport.call("XINFO", "STREAM", self.keys.record))
        except ServerError as error:
            if not await self.repair(error):
                raise
            return "0-0"
        last = cast(bytes, dict(zip(info[::2], info[1::2], strict=True))[b"last-generated-id"]).decode()
        return cursor if position(cursor) <= position(last) else "0-0"

    async def publish_cursor(self, group: str, cursor: str) -> None:
        """Store how far a group has read the record stream, so that `trim_record` can follow it."""
        try:
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)
        except ServerError as error:
            if not await self.repair(error):
                raise
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)

    async def trim_record(self) -> tuple[int, int]:
        """Trim the record behind both its groups. Return (entries removed, groups recreated)."""
        removed, made = cast(list[int], await self.call("trim"))
        return removed, made

    # -- timers and schedules ----------------------------------------------------------------------------------------

    async def promote(self, count: int = 100) -> tuple[int, int]:
        """Fire due timers. Return their number, and the ms until the next timer or -1."""
        done, wait, self.queued = cast(list[int], await self.call("promote", count))
        return done, wait

    async def clock_ms(self) -> int:
        """Return the time of this partition's timers in epoch milliseconds."""
        offset = cast(bytes | None, await self.transport.call("HGET", self.keys.meta, "offset"))
        return await self.time_ms() + int(offset or 0)

    async def shift_clock(self, ms: int) -> None:
        """Move the time of this partition's timers."""
        await self.transport.call("HINCRBY", self.keys.meta, "offset", ms)

    async def timers(self) -> list[tuple[str, int]]:
        """Return all timers, the next one first, with their times in epoch milliseconds."""
        raw = cast(list[bytes], await self.transport.call("ZRANGE", self.keys.timers, 0, -1, "WITHSCORES"))
        return [(member.decode(), int(float(at))) for member, at in zip(raw[::2], raw[1::2], strict=True)]

    async def refill(self, count: int, streams: Sequence[str] = ()) -> int:
        """Move queued work onto its streams, in turn among tenants, until each stream has `count` unread entries.

        Without `streams`, refill all of them. Returns how many tasks and calls still wait.
        """
        self.queued = cast(int, await self.call("refill", count, *streams))
        return self.queued

    async def schedule(
        self, schedule: str, seen: str | bytes, new: bytes, look_ms: int | None, most: int = 0, epoch: str = ""
    ) -> int:
        """Store a schedule, or remove it if `new` is empty, unless it differs from `seen`.

        `look_ms` is the time of its next check. Returns 1 if done, 0 if not, -1 over `most` schedules. `epoch` is the
        leader's, if a leader changes it; raises Fenced if another process leads now.
        """
        look = "" if look_ms is None else look_ms
        reply = await self.call("schedule", schedule, seen, new, look, most, epoch)
        if reply == b"FENCED":
            raise Fenced("another state-manager leads: it changes schedules")
        return cast(int, reply)

    async def time_ms(self) -> int:
        """Return the broker's time in epoch milliseconds."""
        seconds, micros = cast(list[bytes], await self.transport.call("TIME"))
        return int(seconds) * 1000 + int(micros) // 1000

    # -- measures of all tasks and mailboxes, at a cost that does not depend on their number ---------------------------

    async def measure_backlog(self) -> Backlog:
        return Backlog(*cast(list[int], await self.call("measure_backlog")))

    # -- engines, whose steps wait on their streams (`ray`, `spark:big`), even before a gateway serves them ------------

    async def announce_engine(self, streams: Sequence[str]) -> None:
        """Announce that this owner, a gateway, serves these streams while it lives.

        Call it before the first step, and periodically, so that a flushed server learns it again.
        """
        await self.call("announce_engine", self.owner, "1", *streams)

    async def withdraw_engine(self, streams: Sequence[str]) -> None:
        """Announce that this owner no longer serves these streams."""
        await self.call("announce_engine", self.owner, "0", *streams)

    async def gateways(self, stream: str) -> Gateways:
        """Return the gateways that serve a stream of an engine."""
        live, silent, now, problem = cast(tuple[int, int, int, bytes], await self.call("gateways", stream))
        return Gateways(live, None if silent < 0 else silent / 1000, now / 1000, problem.decode())

    async def expire_call(self, delivery: Delivery, now_ms: int, error: bytes, record: bytes) -> bool:
        """End a step that has waited too long for a gateway, with an error (JSON); `record` is its row.

        Returns False if a gateway serves the stream or works on the step, or the step has ended.
        """
        secrets = redactor()
        reply = await self.call(
            "expire_call", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, RESULT_ERROR,
            now_ms, secrets.data(error), await secrets.rows(record), 1, b"",
        )  # fmt: skip
        self._fence(reply)
        return reply == b"OK"
