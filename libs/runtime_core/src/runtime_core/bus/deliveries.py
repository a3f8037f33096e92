"""Verbs of an owner, to get deliveries (read, reopen, adopt, load) and to keep its place (heartbeat, lead, leave)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument, Reply, texts
from runtime_core.bus.keys import Keys, group_of
from runtime_core.bus.partition import Partition
from runtime_core.errors import Fenced, InvalidInput, ServerError, TurnTaken
from runtime_core.telemetry.spans import NO_SPAN
from runtime_core.wire.ids import RunHeader
from runtime_core.wire.step import OPEN_AS_STORED

HEADER_FORMAT = b"1"
QUARANTINE_AFTER = 3
"""After this many deliveries an entry runs alone, in quarantine."""
CONDEMN_AFTER = 2
"""After this many deaths of its process in quarantine, an entry becomes a dead letter."""


class Delivery:
    """One entry of a work stream, delivered to this owner.

    The header `h` has one value per line: format, kind (`start`, `resume`, `call`), task, run, name, key, attempt
    (from 1) and turn.
    """

    __slots__ = (
        "attempt", "context", "data", "deliveries", "entry", "errors", "key", "kind", "mark", "name", "partition",
        "quarantined", "reopened", "run", "silenced", "span", "step", "stream", "task", "trace", "turn", "waits",
    )  # fmt: skip

    def __init__(self, partition: int, stream: str, entry: bytes, fields: list[bytes] | None = None) -> None:
        """Parse the entry's fields, if given.

        Raises InvalidInput if the bus has not written them, or uses another format.
        """
        self.partition = partition
        self.stream = stream
        self.entry = entry
        self.kind = self.task = self.run = self.name = self.key = self.step = self.trace = ""
        self.span = NO_SPAN
        self.attempt = 1
        self.turn = 0
        self.data = b""
        self.context = b""
        self.errors = b""
        self.deliveries = 1
        """How often it was delivered; 1 again after progress of its turn."""
        self.quarantined = False
        self.reopened = False
        """Whether this owner found it among its pending entries."""
        self.silenced = ""
        """Why an earlier delivery of it has silenced this process for a lease; empty: it has not."""
        self.mark = ""
        """The mark of a call that may not be repeated and has started; empty: it is not marked."""
        self.waits = 0
        """The number of calls that its turn waits for."""
        # `span` traces its handling. `trace` is the traceparent for events that it causes, empty if not traced.
        if fields is None:
            return
        try:
            if fields[0] != b"h":
                raise InvalidInput("h", "missing: only the bus's functions may write to work streams")
            version = fields[1].partition(b"\n")[0]
            if version != HEADER_FORMAT:
                raise InvalidInput(
                    "h", f"has format {version.decode()[:20]!r}, this release reads {HEADER_FORMAT.decode()}"
                )
            _, self.kind, self.task, self.run, self.name, self.key, attempt, turn = fields[1].decode().split("\n")
            self.attempt = int(attempt)
            self.turn = int(turn)
        except (IndexError, ValueError) as error:
            raise InvalidInput("h", f"not a header of the bus: {error}") from None
        if (self.kind == "call") is stream.startswith("agent") or (self.kind == "call" and "/" not in self.run):
            raise InvalidInput("h", f"not a header of the bus: {self.kind!r} of {self.run!r} on {stream}")
        for at in range(2, len(fields) - 1, 2):
            name = fields[at]
            if name == b"d":
                self.data = fields[at + 1]
            elif name == b"s":
                self.step = fields[at + 1].decode()
            elif name == b"x":
                self.context = fields[at + 1]
            elif name == b"e":
                self.errors = fields[at + 1]

    @property
    def stream_if_again(self) -> str:
        """Its stream if the entry was delivered before: then progress of its turn clears its count. Else empty."""
        return self.stream if self.deliveries > 1 else ""

    @property
    def instance(self) -> str:
        """`agent/key` if the user gave the agent a key, else empty."""
        return f"{self.name}/{self.key}" if self.key and self.kind != "call" else ""

    def __repr__(self) -> str:
        # Log lines show it to people who know their agents and tools, not Weft's classes.
        entry = f"entry {self.entry.decode()}"
        return (
            f"{self.stream} {self.name} ({self.task}/{self.run}, {entry})" if self.name else f"{entry} of {self.stream}"
        )


@dataclass(slots=True)
class Adopted:
    """Deliveries that this owner reclaimed from dead owners."""

    deliveries: list[Delivery]
    condemned: list[Delivery]
    malformed: list[tuple[str, bytes, str]]
    """(stream, entry, reason) of entries that are not valid work."""
    must_be_idle: bool
    """Whether a quarantined entry waits until this owner has no other delivery."""


class BranchOutput(msgspec.Struct):
    """How far the output of one branch of a run is on the broker."""

    count: int = 0
    """The number of its pieces in the latest attempt of the output."""
    recorded: int = 0
    """How many of its pieces have their rows on the record."""
    checksum: int | None = None
    """The checksum of these pieces; None: not known, as in a fork."""


class StoredOutput(msgspec.Struct):
    """The output of a run on the broker."""

    attempt: int = 1
    """How often it has begun."""
    branches: dict[str, BranchOutput] = {}
    """By the prefix of the branch's steps."""


class RunFields(msgspec.Struct):
    """The fields of a run that a replay needs. A new run only has data and time."""

    cur: str = ""
    status: str = ""
    """The task's."""
    context: bytes = b""
    state: bytes = b""
    """The instance's state at the start of the run."""
    holders: list[str] = []
    """For a nested run: the holders of its instance, itself included, as `task|run`."""
    header: str = ""
    """The task's."""
    data: bytes = b""
    turn: int = 0
    started_ms: int = 0
    journal: dict[str, bytes] = {}
    pending: dict[str, str] = {}
    overrides: dict[str, bytes] = {}
    """The instance's state from a step on, if a nested run has changed it."""
    unrecorded: dict[str, bytes] = {}
    """Journaled steps whose rows are not on the record yet, with their usage (JSON; empty: none)."""
    output: StoredOutput | None = None
    """None: the run has emitted nothing."""
    withdrawn: bool = False
    """Whether nobody wants the task's answer any more."""


@dataclass(frozen=True, slots=True)
class Journaled:
    """The journal of a run since its last committed turn."""

    steps: list[str]
    """Steps that were finished in mid-turn."""
    called: bool
    """Whether the run has made calls in mid-turn."""
    emitted: bool
    """Whether the run has emitted output."""
    output_attempt: int = 1
    """The attempt of the run's output."""


def number_of(change: bytes) -> int:
    """Return the number of a change of an instance's state."""
    return int(change.partition(b" ")[0])


def pairs(reply: object) -> list[tuple[bytes, list[bytes]]]:
    """Return the entries of a stream's reply as (id, fields), without those that were deleted meanwhile."""
    entries = cast(list[tuple[bytes, list[bytes] | None] | None], reply or [])
    return [(entry[0], entry[1]) for entry in entries if entry is not None and entry[1] is not None]


def steps_of(unwritten: bytes) -> tuple[dict[str, bytes], set[str]]:
    """Return the steps in a run's field `w`, with their usage (JSON), and the branches that have emitted.

    One line each: `step · kind · name · usage`, or `step · emit · @branch`.
    """
    steps: dict[str, bytes] = {}
    branches: set[str] = set()
    for line in unwritten.split(b"\n"):
        words = line.split(b"\t")
        if words[1:2] == [b"emit"] and words[2].startswith(b"@"):
            branches.add(words[2][1:].decode())
        elif line:
            steps[words[0].decode()] = words[3] if len(words) > 3 else b""
    return steps, branches


def _stored_output(attempt: int, stored: dict[str, bytes], unrecorded: set[str]) -> StoredOutput:
    """Return a run's output from its fields by branch (`attempt count recorded checksum ms`).

    The rows of a branch that is not in `unrecorded` are all on the record.
    """
    output = StoredOutput(attempt)
    for branch, value in stored.items():
        own, count, recorded, checksum, _ = value.split(b" ")
        branch_output = BranchOutput(recorded=int(recorded if branch in unrecorded else max(count, recorded, key=int)))
        if int(own) == attempt:
            branch_output.count = int(count)
            branch_output.checksum = None if checksum == b"-" else int(checksum)
        output.branches[branch] = branch_output
    return output


_Found = list[tuple[bytes, list[tuple[bytes, list[bytes] | None]]]]
"""A reply to XREADGROUP: streams, with ids and fields of their entries."""


@lru_cache(maxsize=64)
def _group_and_keys(keys: Keys, streams: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the streams' group, and the end of a command that reads them: their keys, and `>` for each."""
    return group_of(streams[0]), [keys.stream(stream) for stream in streams] + [">"] * len(streams)


class DeliveryVerbs(Partition):
    """Reads of work streams, loads of what a replay needs; then heartbeat, leadership, and a clean exit."""

    async def read(
        self, streams: Sequence[str], count: int, block_ms: int
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        """Read up to `count` entries. Return deliveries, and (stream, entry, reason) of entries without valid work."""
        group, keys = _group_and_keys(self.keys, tuple(streams))
        try:
            reply = await self.transport.blocking(
                "XREADGROUP", "GROUP", group, self.owner, "COUNT", count, "BLOCK", block_ms, "STREAMS", *keys
            )
        except ServerError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            await self.make_groups(streams)
            return [], []
        taken: list[Delivery] = []
        malformed: list[tuple[str, bytes, str]] = []
        found: _Found = reply or []  # type: ignore[assignment]  # the shape of this command's reply
        for key, entries in found:
            stream = key.decode()[len(self.keys.base) :]
            for entry, fields in entries:
                if fields is None:
                    continue  # deleted meanwhile
                try:
                    taken.append(Delivery(self.keys.partition, stream, entry, fields))
                except InvalidInput as error:
                    malformed.append((stream, entry, str(error)))
        return taken, malformed

    async def join(self, stream: str) -> None:
        """Join the stream's group before the first read: some servers add a consumer only with its first entry."""
        try:
            await self.transport.call(
                "XGROUP", "CREATECONSUMER", self.keys.stream(stream), group_of(stream), self.owner
            )
        except ServerError as error:
            if not str(error).startswith("NOGROUP") and "requires the key to exist" not in str(error):
                raise
            await self.make_groups((stream,))

    async def answered_by(self, task: str, run: str, steps: Sequence[str]) -> list[str]:
        """Return the traceparents of the spans that gave these steps their results, if they were traced."""
        found = await self.transport.call("HMGET", self.keys.run(task, run), *(f"l:{step}" for step in steps))
        return [each.decode() for each in cast(list[bytes | None], found) if each]

    async def own_pending(self, stream: str) -> dict[bytes, int]:
        """Return the entries that are pending for this owner, with their delivery counts."""
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
        """Return deliveries of pending entries that this owner never got, because the reply of a read was lost."""
        taken: list[Delivery] = []
        malformed: list[tuple[str, bytes, str]] = []
        for entry, deliveries in entries.items():
            reply = await self.transport.call("XRANGE", self.keys.stream(stream), entry, entry)
            found = pairs(reply)
            if found:
                opened = self._open(stream, entry, found[0][1], deliveries, taken, malformed)
                if opened is not None:
                    opened.reopened = True
            else:
                await self.transport.call("XACK", self.keys.stream(stream), group_of(stream), entry)
        return taken, malformed

    async def adopt(self, stream: str, count: int, idle: bool) -> Adopted:
        """Reclaim up to `count` deliveries of a stream from dead owners. `idle`: this owner has no other delivery."""
        reply = cast(
            list[Reply],
            await self.call(
                "adopt",
                self.owner,
                stream,
                count,
                "1" if idle else "0",
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
            delivery = Delivery(self.keys.partition, stream, entry, fields)
        except InvalidInput as error:
            malformed.append((stream, entry, str(error)))
            return None
        delivery.deliveries = deliveries
        taken.append(delivery)
        return delivery

    async def load(self, delivery: Delivery) -> RunFields | None:
        """Return what a replay of the delivery's run needs.

        None if the run is gone, or waits for another one that is nested on it.
        """
        reply = cast(
            list[bytes],
            await self.call("load", delivery.task, delivery.run, delivery.instance, delivery.entry, delivery.stream),
        )
        if not reply:
            return None
        fields = RunFields(
            cur=reply[0].decode(), status=reply[1].decode(), context=reply[2], state=reply[3], header=reply[4].decode()
        )
        emitted: dict[str, bytes] = {}
        emitting: set[str] = set()
        after_change: dict[str, bytes] = {}
        output_attempt = 1
        for at in range(5, len(reply), 2):
            name, value = reply[at].decode(), reply[at + 1]
            if name == "d":
                fields.data = value
            elif name == "u":
                fields.turn = int(value)
            elif name == "w":
                fields.unrecorded, emitting = steps_of(value)
            elif name == "ea":
                output_attempt = int(value)
            elif name == "wd":
                fields.withdrawn = True
            elif name == "busy":
                fields.holders = value.decode().split("\n")
            elif name == "h":
                fields.started_ms = RunHeader.parse(value).created_ms
            elif name.startswith("e:"):
                emitted[name[2:]] = value
            elif name.startswith("o:"):
                fields.overrides[name[2:]] = value
            elif name.startswith("p:"):
                after_change[name[2:]] = value
            elif name.startswith("j:"):
                fields.journal[name[2:]] = value
            else:
                fields.pending[name[2:]] = value[:8].decode()
        if emitted:
            fields.output = _stored_output(output_attempt, emitted, emitting)
        if after_change:
            changes = {number_of(value): value for value in fields.overrides.values()}
            for step, number in after_change.items():
                if int(number) in changes and int(number) > number_of(fields.overrides.get(step, b"0")):
                    fields.overrides[step] = changes[int(number)]
        return fields

    async def begin_turn(self, delivery: Delivery, *, anyway: bool = False) -> Journaled | None:
        """Begin the part of a turn that this process executes. Return the journal since the last committed turn.

        Returns None if the turn is no longer this delivery's. Raises Fenced, and TurnTaken if another live owner works
        on this turn, except with `anyway`.
        """
        reply = await self.call(
            "begin_turn", self.owner, delivery.entry, delivery.task, delivery.run, "1" if anyway else ""
        )
        self._fence(reply)
        if reply == b"BUSY":
            raise TurnTaken(f"another process works on the turn of {delivery!r}")
        if reply == b"DONE":
            return None
        unwritten, called, attempt = cast(list[bytes], reply)
        steps, emitting = steps_of(unwritten)
        return Journaled(list(steps), called == b"1", bool(emitting), int(attempt))

    async def is_live(self, task: str) -> bool:
        """Return whether the broker has the task, and it has not ended."""
        return await self.transport.call("HGET", self.keys.task(task), "status") in OPEN_AS_STORED

    async def is_awaited(self, delivery: Delivery) -> bool:
        """Return whether the step of this call still lacks its result, or this turn is still its run's current one."""
        if delivery.kind == "call":
            run, _, step = delivery.run.rpartition("/")
            return await self.transport.call("HEXISTS", self.keys.run(delivery.task, run), f"m:{step}") == 1
        return await self.transport.call("HGET", self.keys.run(delivery.task, delivery.run), "cur") == delivery.entry

    async def results(self, task: str, run: str, steps: Sequence[str]) -> list[bytes | None]:
        """Return the journal values of these steps of a run; None for one without a result."""
        reply = await self.transport.call("HMGET", self.keys.run(task, run), *[f"j:{step}" for step in steps])
        return cast(list[bytes | None], reply)

    # -- the owner's place --------------------------------------------------------------------------------------

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        """Send a heartbeat, which also measures the silence of other owners.

        Returns the broker's time (for the next `since_ms`), the tasks that ended early since `since_ms` (it may repeat
        those of that very millisecond), and how many owners this heartbeat declared dead. Raises `Fenced` if this owner
        was declared dead.
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
        """Return a page of tasks that ended early, newest first: each as heartbeats name it, with its time (ms)."""
        reply = cast(
            list[bytes],
            await self.transport.call(
                "ZRANGE", self.keys.stopped, "+inf", "-inf", "BYSCORE", "REV", "LIMIT", offset, count, "WITHSCORES"
            ),
        )
        return [(reply[at].decode(), int(float(reply[at + 1]))) for at in range(0, len(reply), 2)]

    async def lead(self, role: str, floor: int = 0) -> int:
        """Return the epoch under which this owner leads a role, above `floor`, or 0 if another owner leads."""
        return cast(int, await self.call("lead", role, self.owner, floor))

    async def leave(self, unstarted: Iterable[Delivery]) -> None:
        """Leave: return unstarted deliveries without counting them, and let others reclaim immediately."""
        returned: list[Argument] = []
        for delivery in unstarted:
            returned += [delivery.stream, delivery.entry]
        # From now on others may own its deliveries: code that still runs must check before its next step.
        self.alive_until = 0.0
        await self.call("leave", self.owner, *returned)
