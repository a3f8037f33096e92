"""Verbs that bring deliveries to an owner (read, find again, adopt, load), and the owner's own: live, lead, leave."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import cast

from runtime_core.bus.connection import Argument, Reply, texts
from runtime_core.bus.keys import group_of
from runtime_core.bus.partition import Partition
from runtime_core.bus.values import Adopted, Delivery, Journaled, RunFields, pairs
from runtime_core.errors import Fenced, InvalidInput, ServerError, TurnTaken

QUARANTINE_AFTER = 3
"""Deliveries after which an entry is run alone."""
CONDEMN_AFTER = 2
"""Deaths in quarantine after which an entry is a dead letter."""


LIVE = (b"accepted", b"running", b"waiting")
"""Statuses of a task that has not ended."""


def steps_of(unwritten: bytes) -> list[str]:
    """The steps in a run's field `w`: one line each, the step's id before its kind and name."""
    return [line.partition("\t")[0] for line in unwritten.decode().splitlines() if line]


class TakingVerbs(Partition):
    """What an owner takes from work streams, and what a replay needs of it."""

    async def read(
        self, streams: Sequence[str], count: int, block_ms: int
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        """Take up to `count` entries: the deliveries, and (stream, entry, why) of entries that are no work."""
        keys = [self.keys.stream(stream) for stream in streams]
        try:
            reply = await self.transport.blocking(
                "XREADGROUP", "GROUP", group_of(streams[0]), self.owner, "COUNT", count, "BLOCK", block_ms, "STREAMS",
                *keys, *([">"] * len(keys)),
            )  # fmt: skip
        except ServerError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            await self.make_groups(streams)
            return [], []
        taken: list[Delivery] = []
        malformed: list[tuple[str, bytes, str]] = []
        for key, entries in cast(list[tuple[bytes, Reply]], reply or []):
            stream = key.decode()[len(self.keys.base) :]
            for entry, fields in pairs(entries):
                self._open(stream, entry, fields, 1, taken, malformed)
        return taken, malformed

    async def join(self, stream: str) -> None:
        """Be a consumer of the stream's group before anything was read: some servers make one at its first entry."""
        try:
            await self.transport.call(
                "XGROUP", "CREATECONSUMER", self.keys.stream(stream), group_of(stream), self.owner
            )
        except ServerError as error:
            if not str(error).startswith("NOGROUP") and "requires the key to exist" not in str(error):
                raise
            await self.make_groups((stream,))

    async def answered_by(self, task: str, run: str, steps: Sequence[str]) -> list[str]:
        """The traceparents of the spans that gave the results of these steps, where they were traced."""
        found = await self.transport.call("HMGET", self.keys.run(task, run), *(f"l:{step}" for step in steps))
        return [each.decode() for each in cast(list[bytes | None], found) if each]

    async def own_pending(self, stream: str) -> dict[bytes, int]:
        """Entries that the group says this owner holds, with their delivery counts."""
        found: dict[bytes, int] = {}
        start = "-"
        while True:
            reply = await self._pending(stream, start)
            for item in reply:
                found[cast(bytes, item[0])] = cast(int, item[3])
            if len(reply) < 1000:
                return found
            start = "(" + cast(bytes, reply[-1][0]).decode()

    async def _pending(self, stream: str, start: str) -> list[list[Reply]]:
        try:
            reply = await self.transport.call(
                "XPENDING", self.keys.stream(stream), group_of(stream), start, "+", 1000, self.owner
            )
        except ServerError as error:
            if not await self.repair(error):
                raise
            return []
        return cast(list[list[Reply]], reply)

    async def reopen(
        self, stream: str, entries: dict[bytes, int]
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        """Deliveries of entries that this owner holds without knowing it (a read's reply was lost)."""
        taken: list[Delivery] = []
        malformed: list[tuple[str, bytes, str]] = []
        for entry, deliveries in entries.items():
            reply = await self.transport.call("XRANGE", self.keys.stream(stream), entry, entry)
            found = pairs(reply)
            if found:
                self._open(stream, entry, found[0][1], deliveries, taken, malformed)
            else:
                await self.transport.call("XACK", self.keys.stream(stream), group_of(stream), entry)
        return taken, malformed

    async def adopt(self, stream: str, count: int, empty_handed: bool) -> Adopted:
        """Take over what dead owners of a stream hold."""
        reply = cast(
            list[Reply],
            await self.call(
                "adopt",
                self.owner,
                stream,
                count,
                "1" if empty_handed else "0",
                QUARANTINE_AFTER,
                CONDEMN_AFTER,
            ),
        )
        self._fence(reply[0])
        adopted = Adopted([], [], [], reply[1] == b"1")
        for at in range(2, len(reply), 4):
            kind, entry, deliveries, fields = reply[at : at + 4]
            into = adopted.condemned if kind == b"c" else adopted.deliveries
            opened = self._open(
                stream,
                cast(bytes, entry),
                cast(list[bytes], fields),
                cast(int, deliveries),
                into,
                adopted.malformed,
            )
            if opened is not None:
                opened.quarantined = kind == b"q"
        return adopted

    def _open(
        self,
        stream: str,
        entry: bytes,
        fields: list[bytes],
        deliveries: int,
        taken: list[Delivery],
        malformed: list[tuple[str, bytes, str]],
    ) -> Delivery | None:
        try:
            delivery = Delivery(self.keys.partition, stream, entry).parse(fields)
        except InvalidInput as error:
            malformed.append((stream, entry, str(error)))
            return None
        delivery.deliveries = deliveries
        taken.append(delivery)
        return delivery

    async def load(self, delivery: Delivery) -> RunFields | None:
        """What a replay needs of the delivery's run; None where the run is no more."""
        reply = cast(
            list[bytes],
            await self.call("load", delivery.task, delivery.run, delivery.instance, delivery.entry),
        )
        if not reply:
            return None
        fields = RunFields(
            cur=reply[0].decode(), status=reply[1].decode(), context=reply[2], state=reply[3], header=reply[4].decode()
        )
        for at in range(5, len(reply), 2):
            name, value = reply[at].decode(), reply[at + 1]
            if name == "d":
                fields.data = value
            elif name == "u":
                fields.turn = int(value)
            elif name == "w":
                fields.unrecorded = steps_of(value)
            elif name == "wd":
                fields.withdrawn = True
            elif name == "h":
                fields.started_ms = int(value.split(b"\n")[4] or 0)
            elif name.startswith("o:"):
                fields.overrides[name[2:]] = value
            elif name.startswith("j:"):
                fields.journal[name[2:]] = value
            else:
                fields.pending[name[2:]] = value[:8].decode()
        return fields

    async def begin_turn(self, delivery: Delivery) -> Journaled | None:
        """Begin to do steps of a turn by itself: what the run has journaled since its last committed turn.

        None where the turn is no longer this delivery's. Raises Fenced, and TurnTaken where another living owner does
        steps of this turn.
        """
        reply = await self.call("begin_turn", self.owner, delivery.entry, delivery.task, delivery.run)
        self._fence(reply)
        if reply == b"BUSY":
            raise TurnTaken(f"another process is in the turn of {delivery!r}")
        if reply == b"DONE":
            return None
        steps, asked = cast(list[bytes], reply)
        return Journaled(steps_of(steps), asked == b"1")

    async def is_live(self, task: str) -> bool:
        """Whether the broker knows the task, and it has not ended."""
        return await self.transport.call("HGET", self.keys.task(task), "status") in LIVE

    async def results(self, task: str, run: str, steps: Sequence[str]) -> list[bytes | None]:
        """Journal values of these steps of a run, None where one is still missing."""
        reply = await self.transport.call("HMGET", self.keys.run(task, run), *[f"j:{step}" for step in steps])
        return cast(list[bytes | None], reply)


class OwnerVerbs(Partition):
    """Heartbeat, leadership, and a clean end."""

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        """Say that this owner lives, and count the silence of others.

        Returns the broker's time (for the next `since_ms`), the tasks that ended early from then on (those of that very
        millisecond may have been told before), and how many owners this beat declared dead. Raises `Fenced` where this
        owner was declared dead.
        """
        sent = time.monotonic()
        reply = texts(
            await self.call("beat", self.owner, lease_ms, max(100, lease_ms // 6), "1" if first else "0", since_ms)
        )
        if reply[0] != "OK":
            raise Fenced(f"{self.owner} was declared dead")
        self.alive_until = sent + lease_ms / 1000
        return reply[1], reply[3:], int(reply[2])

    async def recently_stopped(self, offset: int, count: int) -> list[tuple[str, int]]:
        """A page of what the broker remembers of stopped tasks, newest first, as heartbeats tell of them, and when."""
        reply = cast(
            list[bytes],
            await self.transport.call(
                "ZRANGE", self.keys.stopped, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            ),
        )
        return [(reply[at].decode(), int(float(reply[at + 1]))) for at in range(0, len(reply), 2)]

    async def lead(self, role: str, floor: int = 0) -> int:
        """The epoch under which this owner leads a role, above `floor`, or 0 where another leads."""
        return cast(int, await self.call("lead", role, self.owner, floor))

    async def leave(self, unstarted: Iterable[Delivery]) -> None:
        """Go: hand back what was not started without counting it, and let others adopt at once."""
        handed: list[Argument] = []
        for delivery in unstarted:
            handed += [delivery.stream, delivery.entry]
        # From here on others may have what this owner held: code that has not ended yet must ask before its next step.
        self.alive_until = 0.0
        await self.call("leave", self.owner, *handed)
