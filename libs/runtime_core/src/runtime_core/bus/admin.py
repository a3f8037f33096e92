"""Verbs for the roles around tasks: the record stream, counts, timers, engines, and a publisher's ingress stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from runtime_core.bus.connection import Reply, Transport, position
from runtime_core.bus.keys import Keys, ingress
from runtime_core.bus.partition import Partition
from runtime_core.bus.values import Delivery, Gateways, pairs
from runtime_core.errors import ServerError
from runtime_core.telemetry.redaction import redactor

MAX_ENTRY_BYTES = 3 * 1024 * 1024
"""The largest entry that is read whole; no valid command is larger."""
AHEAD_MS = 24 * 3600 * 1000
"""How far ahead of the server's clock an entry's id may be."""


@dataclass(frozen=True, slots=True)
class IngressEntry:
    """One entry; of one that is too large only the heads of its fields were read."""

    id: bytes
    fields: list[bytes]
    too_large: int = 0
    """Its bytes, where it is too large; else 0."""


class IngressStream(Partition):
    """Without a consumer group: one admitter reads at a time, and what it has settled is deleted.

    So nothing that a publisher does to its stream (deleting, trimming, resetting it) leaves the reader behind.
    """

    def __init__(self, transport: Transport, namespace: str, publisher: str) -> None:
        super().__init__(transport, Keys(namespace, 0))
        self.key = ingress(namespace, publisher)
        self._base = self.key.encode()

    async def read(self, after: bytes, count: int, size: int) -> list[IngressEntry]:
        """The entries after this one (empty: from the first), up to so many and so many bytes, but at least one.

        A stream that is empty and can get no more entries, since one had the largest id, is removed.
        """
        start = b"(" + after if after else b"-"
        reply = await self.call("read_ingress", start, count, size, MAX_ENTRY_BYTES, AHEAD_MS)
        return [
            IngressEntry(cast(bytes, entry), cast(list[bytes], fields), cast(int, large))
            for entry, large, fields in cast(list[list[Reply]], reply)
        ]

    async def remove(self, entry: bytes) -> None:
        await self.transport.call("XDEL", self.key, entry)


class RecordVerbs(Partition):
    """The record of this partition: one entry for each commit that has rows."""

    async def read_record(self, after: str, count: int, block_ms: int) -> list[tuple[bytes, list[bytes]]]:
        """Entries of the record stream after a cursor; the reader keeps the cursor itself."""
        reply = await self.transport.blocking(
            "XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", self.keys.record, after
        )
        return pairs(cast(list[list[Reply]], reply)[0][1]) if reply else []

    async def within_record(self, cursor: str) -> str:
        """The cursor, or `0-0` where the stream has never come that far: a broker that lost its last writes, or all.

        Reading again from the start repeats rows, which changes nothing; going on from a cursor ahead of the stream
        would miss what is written next.
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
        """Tell the broker how far a group of the record stream has come; trimming follows it."""
        try:
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)
        except ServerError as error:
            if not await self.repair(error):
                raise
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)

    async def trim_record(self) -> tuple[int, int]:
        """Trim the record behind both its groups: (entries removed, groups made again)."""
        removed, made = cast(list[int], await self.call("trim"))
        return removed, made


LOOK_AGAIN = 50
"""Tasks, and mailboxes, whose counts one look puts right."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look has found; `next_task` and `next_mailbox` are where the next one puts counts right."""

    started: int
    """Tasks that were ever started."""
    open: int
    mail: int
    """Events in mailboxes; at least these where more than 1,000 mailboxes are deeper than 50."""
    deepest: int
    next_task: int = 0
    next_mailbox: int = 0


class SurveyVerbs(Partition):
    """A look at all tasks and mailboxes that costs the same however many there are."""

    async def survey(self, last: Survey | None) -> Survey:
        """`last` is what the look before has given."""
        begin = (0, 0) if last is None else (last.next_task, last.next_mailbox)
        return Survey(*cast(list[int], await self.call("survey", LOOK_AGAIN, *begin)))


class TimerVerbs(Partition):
    """Timers of this partition, and schedules."""

    async def promote(self, count: int = 100) -> tuple[int, int]:
        """Do what is due: (how many, ms until the next timer or -1)."""
        done, wait, self.queued = cast(list[int], await self.call("promote", count))
        return done, wait

    async def refill(self, count: int, streams: Sequence[str] = ()) -> int:
        """Move tasks that wait for their tenants' turns until `count` entries of each stream are unread.

        Without `streams`, of all. Returns how many tasks still wait.
        """
        self.queued = cast(int, await self.call("refill", count, *streams))
        return self.queued

    async def schedule(self, schedule: str, seen: str | bytes, new: bytes, look_ms: int | None, most: int = 0) -> int:
        """Keep or (`new` empty) remove a schedule, if it still is as `seen`: 1 done, 0 not, -1 over `most`."""
        look = "" if look_ms is None else look_ms
        return cast(int, await self.call("schedule", schedule, seen, new, look, most))

    async def time_ms(self) -> int:
        """The broker's clock, in epoch milliseconds."""
        seconds, micros = cast(list[bytes], await self.transport.call("TIME"))
        return int(seconds) * 1000 + int(micros) // 1000


class EngineVerbs(Partition):
    """Steps of an engine wait on its stream (`ray`, `spark:big`), also where no gateway serves it yet."""

    async def announce_engine(self, streams: Sequence[str]) -> None:
        """Say that this owner, a gateway, serves these streams; it counts while the owner lives.

        Said before the first step is taken, and again now and then: what a flushed server has lost comes back by it.
        """
        await self.call("announce_engine", self.owner, "1", *streams)

    async def withdraw_engine(self, streams: Sequence[str]) -> None:
        """Say that this owner takes no more steps of these streams."""
        await self.call("announce_engine", self.owner, "0", *streams)

    async def gateways(self, stream: str) -> Gateways:
        """Who serves a stream of an engine."""
        live, silent, now, nobody = cast(tuple[int, int, int, bytes], await self.call("gateways", stream))
        return Gateways(live, None if silent < 0 else silent / 1000, now / 1000, nobody.decode())

    async def expire_call(self, delivery: Delivery, now_ms: int, error: bytes, record: bytes) -> bool:
        """End a step that has waited too long for a gateway, with an error (JSON); `record` is its row.

        False where a gateway serves the stream or has the step in hand, and where it has ended already.
        """
        secrets = redactor()
        reply = await self.call(
            "expire_call", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, b"E", now_ms,
            secrets.data(error), secrets.data(record), 1, b"",
        )  # fmt: skip
        self._fence(reply)
        return reply == b"OK"
