"""The broker's verbs for one partition: publish, read, commit, record, retry, dead-letter, adopt.

The bus knows no agents and no tools: it moves entries, and every change is one function on the broker (see
`functions/`), so that it happens whole or not at all. The same functions run on a server and in `memory://`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from runtime_core.bus.delivery import Delivery, pairs
from runtime_core.bus.keys import (
    NAMESPACE_FORMAT,
    STATE_MANAGER,
    TRAJECTORY_RECORDER,
    Keys,
    group_of,
    namespace_settings,
)
from runtime_core.bus.library import library
from runtime_core.bus.transport import Argument, Reply, Transport
from runtime_core.bus.values import Adopted, NewTask, NotDurable, NotYet, RunFields, Submitted
from runtime_core.errors import ConfigurationError, Fenced, InvalidInput, LimitExceeded, Rejected, ServerError

JOURNAL_LIMIT = 10_000
"""Steps that one run may journal."""
QUARANTINE_AFTER = 3
"""Deliveries after which an entry is run alone."""
CONDEMN_AFTER = 2
"""Deaths in quarantine after which an entry is a dead letter."""


class EventBus:
    """One partition of a namespace, seen by one owner.

    `owner` is this process's incarnation: boot time and random, so that no name comes back. Every method may raise
    `BusUnavailable`; those that write for a delivery raise `Fenced` where the owner was declared dead.
    """

    def __init__(self, transport: Transport, keys: Keys, owner: str = "", *, durability: str = "fast") -> None:
        self.transport = transport
        self.keys = keys
        self.owner = owner
        self.durability = durability
        self._library = library()
        self._functions = self._library.functions
        self._base = keys.base.encode()

    # -- functions ---------------------------------------------------------------------------------------------

    async def call(self, function: str, *args: Argument) -> Reply:
        """Call one function of the library; a lost library or group is made again, once."""
        try:
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)
        except ServerError as error:
            if not await self.repair(error):
                raise
            return await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)

    async def repair(self, error: ServerError) -> bool:
        """Make again what a flushed or failed-over server has lost. False: this error is something else."""
        text = str(error)
        if "Function not found" in text:
            await self.load_library()
            return True
        if "NOGROUP" in text or "no such key" in text:
            await self.make_groups(group_streams=())
            return True
        return False

    async def load_library(self) -> None:
        try:
            await self.transport.call("FUNCTION", "LOAD", self._library.source)
        except ServerError as error:
            if "already exists" not in str(error):
                raise

    async def make_groups(self, group_streams: Iterable[str]) -> None:
        """Make the groups of these work streams and of the record stream, from 0: never from `$`."""
        wanted = [(self.keys.stream(stream), group_of(stream)) for stream in group_streams]
        wanted += [(self.keys.record, STATE_MANAGER), (self.keys.record, TRAJECTORY_RECORDER)]
        for key, group in wanted:
            await self.make_group(key, group)

    async def namespace_is_newer(self) -> bool:
        """Whether a newer release has written this namespace since it was opened."""
        stored = await self.transport.call("HGET", namespace_settings(self.keys.namespace), "format")
        return isinstance(stored, bytes) and int(stored) > NAMESPACE_FORMAT

    async def make_group(self, key: str, group: str) -> None:
        await make_group(self.transport, key, group)

    # -- publish -----------------------------------------------------------------------------------------------

    async def submit(self, new: NewTask) -> Submitted:
        """Start a task, or say what became of an equal submit.

        Raises `Rejected` with the field, `NotYet` before the first manifest, `Fenced` for a replaced admitter.
        """
        reply = await self.call(
            "submit", new.task, new.source, new.event_id, new.digest, new.agent, new.key, new.data, new.reply,
            new.context, new.session, new.max_steps, new.timeout_ms, new.epoch, "1" if new.streamed else "0",
        )  # fmt: skip
        answer = [_text(item) for item in cast(list[Reply], reply)]
        match answer[0]:
            case "started":
                await self._make_durable()
                return Submitted(answer[1], "accepted", True)
            case "known":
                await self._make_durable()  # the first one's answer may have been lost before it was
                return Submitted(answer[1], answer[2], False)
            case "overloaded":
                raise Rejected("overloaded", answer[1], retry_after_seconds=1.0, task_id=new.task)
            case "wait":
                raise NotYet("data.agent", "no agent-handler has published its agents yet", 0.2, new.task)
            case "fenced":
                raise Fenced("another admitter leads")
        raise Rejected(answer[1], answer[2], task_id=new.task)

    async def _make_durable(self) -> None:
        """Wait until the submit is on disk (`fsync`) or on a replica (`quorum`), as far as the server can say.

        Raises NotDurable where it is not within two seconds: the task runs, and the same submit may be repeated.
        """
        if self.durability == "fast":
            return
        try:
            if self.durability == "fsync":
                done = cast(list[int], await self.transport.call("WAITAOF", 1, 0, 2000))[0] >= 1
            else:
                done = cast(int, await self.transport.call("WAIT", 1, 2000)) >= 1
        except ServerError as error:
            raise ConfigurationError(
                f"WEFT_DURABILITY={self.durability}: the server cannot promise it ({error}); fsync needs an "
                "append-only file and Redis 7.2 or Valkey, quorum a replica"
            ) from error
        if not done:
            raise NotDurable("durability", f"the submit is not {self.durability}-durable yet; submit it again", 1.0)

    async def cancel(self, task: str, reason: str) -> list[str]:
        """`cancelled`, `ended` + status, or `unknown` (then a later submit of this id is refused)."""
        return _texts(await self.call("cancel", task, reason))

    async def signal(self, task: str, request: str, value: bytes) -> list[str]:
        """`ok`, `answered`, `no_request`, `unknown`, or `ended` + status."""
        return _texts(await self.call("signal", task, request, value))

    # -- read --------------------------------------------------------------------------------------------------

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
                fields.unrecorded = value.decode().split()
            elif name == "h":
                fields.started_ms = int(value.split(b"\n")[4] or 0)
            elif name.startswith("o:"):
                fields.overrides[name[2:]] = value
            elif name.startswith("j:"):
                fields.journal[name[2:]] = value
            else:
                fields.pending[name[2:]] = value[:8].decode()
        return fields

    async def results(self, task: str, run: str, steps: Sequence[str]) -> list[bytes | None]:
        """Journal values of these steps of a run, None where one is still missing."""
        key = self.keys.task(task) if run == "r" else f"{self.keys.base}run:{task}/{run}"
        reply = await self.transport.call("HMGET", key, *[f"j:{step}" for step in steps])
        return cast(list[bytes | None], reply)

    # -- commit ------------------------------------------------------------------------------------------------

    async def commit_turn(
        self,
        delivery: Delivery,
        mode: str,
        now_ms: int,
        record: bytes,
        steps: int,
        body: bytes,
        state: bytes,
        parts: Sequence[Argument],
        count: int,
    ) -> bool:
        """Commit a turn: effects, state, acknowledgement in one step.

        `mode` is `w` (waits), `c` (completed) or `f` (failed); `parts` are described in `commit_turn.lua`.
        Returns False where the event had been handled before or its task is over. Raises `LimitExceeded` where the
        task would go over its `max_steps` (nothing was written).
        """
        reply = await self.call(
            "commit_turn", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, delivery.instance,
            mode, now_ms, record, steps, body, state, count, *parts,
        )  # fmt: skip
        if reply == b"OK":
            return True
        self._fence(reply)
        if isinstance(reply, bytes) and reply.startswith(b"LIMIT"):
            raise LimitExceeded(f"the task would take more than max_steps={reply[6:].decode()} steps")
        return False

    async def commit_call(
        self, delivery: Delivery, status: bytes, now_ms: int, payload: bytes, record: bytes, steps: int
    ) -> bool:
        """Commit the result of a call; False where the step has its result already or its task is over."""
        reply = await self.call(
            "commit_call", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, status, now_ms,
            payload, record, steps,
        )  # fmt: skip
        self._fence(reply)
        return reply == b"OK"

    async def record(self, delivery: Delivery, step: str, value: bytes) -> bytes | None:
        """Journal a step in mid-turn, put if absent: what is stored now, or None where the turn is lost."""
        reply = await self.call(
            "record", self.owner, delivery.entry, delivery.task, delivery.run, step, value, JOURNAL_LIMIT
        )
        self._fence(reply)
        if reply == b"LIMIT":
            raise LimitExceeded(f"the run's journal holds its limit of {JOURNAL_LIMIT} steps")
        return None if reply == b"DONE" else cast(bytes, reply)

    async def emit(self, delivery: Delivery, step: str, value: bytes, data: bytes) -> bool:
        """Append a delta to the task's output, once per step."""
        reply = await self.call(
            "emit",
            self.owner,
            delivery.entry,
            delivery.task,
            delivery.run,
            step,
            value,
            delivery.attempt,
            data,
        )
        self._fence(reply)
        return reply == b"OK"

    async def progress(self, delivery: Delivery, data: bytes) -> bool:
        """Show the client how far a call is (JSON); False where nobody waits for it any more."""
        reply = await self.call("progress", self.owner, delivery.task, delivery.run, delivery.attempt, data)
        self._fence(reply)
        return reply == b"OK"

    async def retry(self, delivery: Delivery, delay_ms: int, error: bytes, *, counts: bool = True) -> bool:
        """Put the delivery back for `delay_ms`, waiting on the broker."""
        attempt = delivery.attempt + (1 if counts else 0)
        reply = await self.call(
            "retry",
            self.owner,
            delivery.stream,
            delivery.entry,
            delivery.task,
            delivery.run,
            delay_ms,
            attempt,
            error,
        )
        self._fence(reply)
        return reply == b"OK"

    async def dead_letter(
        self,
        stream: str,
        entry: bytes,
        reason: str,
        errors: bytes,
        now_ms: int,
        error: bytes,
        record: bytes = b"",
        steps: int = 0,
    ) -> bool:
        """End a delivery that will not be tried again, answer who waits for it, and keep it whole."""
        reply = await self.call("dead_letter", self.owner, stream, entry, reason, errors, now_ms, error, record, steps)
        self._fence(reply)
        return reply == b"OK"

    async def mark_started(self, delivery: Delivery) -> bool:
        """Mark a call that may not be repeated, before it runs; False where an earlier owner had begun it."""
        reply = await self.call("mark_started", self.owner, delivery.task, delivery.run)
        self._fence(reply)
        return reply == 1

    async def forget_started(self, delivery: Delivery) -> None:
        await self.transport.call("HDEL", self.keys.started, f"{delivery.task}/{delivery.run}")

    async def knows_tool(self, name: str) -> bool:
        """Whether any app has declared this tool."""
        return await self.transport.call("HEXISTS", self.keys.tools, name) == 1

    async def knows_agent(self, name: str) -> bool:
        return await self.transport.call("HEXISTS", self.keys.agents, name) == 1

    async def leave_quarantine(self, delivery: Delivery) -> None:
        """A quarantined entry came to an end: forget its deaths."""
        await self.transport.call(
            "HDEL",
            self.keys.quarantine,
            f"{delivery.stream}|{delivery.entry.decode()}",
            f"~{delivery.stream}",
        )

    # -- owners ------------------------------------------------------------------------------------------------

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        """Say that this owner lives, and count the silence of others.

        Returns the broker's time (for the next `since_ms`), the tasks that ended early since then, and how many
        owners this beat declared dead. Raises `Fenced` where this owner was declared dead.
        """
        reply = _texts(
            await self.call("beat", self.owner, lease_ms, max(100, lease_ms // 6), "1" if first else "0", since_ms)
        )
        if reply[0] != "OK":
            raise Fenced(f"{self.owner} was declared dead")
        return reply[1], reply[3:], int(reply[2])

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

    async def leave(self, unstarted: Iterable[Delivery]) -> None:
        """Go: hand back what was not started without counting it, and let others adopt at once."""
        handed: list[Argument] = []
        for delivery in unstarted:
            handed += [delivery.stream, delivery.entry]
        await self.call("leave", self.owner, *handed)

    async def lead(self, role: str, floor: int = 0) -> int:
        """The epoch under which this owner leads a role, above `floor`, or 0 where another leads."""
        return cast(int, await self.call("lead", role, self.owner, floor))

    # -- timers, record, letters -------------------------------------------------------------------------------

    async def promote(self, count: int = 100) -> tuple[int, int]:
        """Do what is due: (how many, ms until the next timer or -1)."""
        done, wait = cast(list[int], await self.call("promote", count))
        return done, wait

    async def trim_record(self) -> tuple[int, int]:
        """Trim the record behind both its groups: (entries removed, groups made again)."""
        removed, made = cast(list[int], await self.call("trim"))
        return removed, made

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
        return cursor if _position(cursor) <= _position(last) else "0-0"

    async def publish_cursor(self, group: str, cursor: str) -> None:
        """Tell the broker how far a group of the record stream has come; trimming follows it."""
        try:
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)
        except ServerError as error:
            if not await self.repair(error):
                raise
            await self.transport.call("XGROUP", "SETID", self.keys.record, group, cursor)

    async def answered(
        self, task: str, run: str, step: str, status: bytes, payload: bytes, agent: str, there: str
    ) -> bool:
        """Answer a step that was asked in another partition, where task `there` has ended; once."""
        return await self.call("answered", task, run, step, status, payload, agent, there) == b"OK"

    async def redrive(self, letter: str, reopen: bool, data: bytes = b"") -> list[str]:
        """`ok` + task, `missing`, `ended` + task + status, or `gone` + task."""
        return _texts(await self.call("redrive", letter, "1" if reopen else "0", data))

    async def drop_letter(self, letter: str) -> bool:
        return await self.call("drop_letter", letter) == 1

    async def erase(self, task: str) -> str:
        """`OK`, `unknown`, or the status of a task that has not ended."""
        return _text(await self.call("erase", task))

    def _fence(self, reply: Reply) -> None:
        if reply == b"FENCED":
            raise Fenced(f"{self.owner} was declared dead")


async def make_group(transport: Transport, key: str, group: str) -> None:
    """Make a group where it is missing, from 0, and its stream with it."""
    try:
        await transport.call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    except ServerError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise


def _position(entry: str) -> tuple[int, int]:
    ms, _, sequence = entry.partition("-")
    return int(ms), int(sequence or 0)


def _text(item: Reply) -> str:
    return item.decode() if isinstance(item, bytes) else str(item)


def _texts(reply: Reply) -> list[str]:
    return [_text(item) for item in cast(list[Reply], reply)]
