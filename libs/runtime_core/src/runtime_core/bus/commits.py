"""Verbs that journal steps and end deliveries: commit, retry, dead-letter. Dead letters have bounded size."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from runtime_core.bus.connection import Argument, Reply, texts
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.partition import Partition
from runtime_core.errors import JournalLost, LimitExceeded, Reserved, ServerError
from runtime_core.telemetry.redaction import redactor
from runtime_core.wire.codec import MAX_DATA_BYTES
from runtime_core.wire.contents import UNSHORTENED_BYTES, NewLists
from runtime_core.wire.step import RESULT_ERROR

JOURNAL_LIMIT = 10_000
"""The most steps of one run."""
LONGEST_NAME = 200
"""How many characters of a step's name are stored with its journal value."""

CUT_VALUE_BYTES = 4096
"""How much of an oversized value a dead letter keeps."""
MAX_VALUE_BYTES = MAX_DATA_BYTES + 64 * 1024
"""The largest value that the bus writes: data, and room for its additions."""
MAX_STRUCTURED_BYTES = 2 * MAX_DATA_BYTES
"""The largest `data` of a structured event, as in `wire/envelope.py`."""
MAX_LETTER_BYTES = MAX_STRUCTURED_BYTES + 512 * 1024
"""The largest dead letter: the sum of its names and values."""
MAX_LETTER_FIELDS = 200
"""The most fields of a dead letter: more than an event may have attributes."""
MAX_FIELD_NAME_BYTES = 512
WIDE_PARTS = 100
"""A turn with more parts is wide. The broker does nothing else while it commits."""

_EVENT_DATA = b"event:data"


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A model call that may start now."""

    attempt: int
    """From 1; includes attempts of processes that died."""
    granted: dict[str, float]
    """The most that it may use of the task's limits, by name."""


@dataclass(frozen=True, slots=True)
class TrimmedLetters:
    """The result of trimming dead letters."""

    old: int
    """Letters trimmed because they were older than the retention."""
    large: int
    """Letters trimmed because all letters together had too many bytes."""
    stored: int
    """Letters on the stream."""
    counted: int
    """Letters whose bytes are counted. It differs from `stored` if another program changed the stream."""


class TurnMode:
    """How a turn ends, as `commit_turn.lua` has it."""

    WAITS: Final = "w"
    COMPLETED: Final = "c"
    FAILED: Final = "f"
    CANCELLED: Final = "k"
    """Its run fails, and a task that ends with it is cancelled."""
    OVER_LIMIT: Final = "x"
    """The whole task fails."""


class CommitVerbs(Partition):
    """Commits and steps in mid-turn; then retries, marks of calls that may not be repeated, quarantine, dead letters.

    A write counts only while this owner holds the delivery.
    """

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
        """Commit a turn: effects, state and acknowledgement in one step.

        `mode` is a TurnMode, and `commit_turn.lua` describes `parts`. Redacts secrets in the rows, and in the error of
        a failed run. Returns False if the event was handled before, or its task has ended. Raises `LimitExceeded` if
        the task would exceed a limit, and `JournalLost` if the journal lacks a step of the turn: in both cases nothing
        was written. Commits of more than `WIDE_PARTS` parts wait for one another, so that the broker serves others
        between them.
        """
        new_lists: NewLists = {}
        if len(record) >= UNSHORTENED_BYTES:
            record, new_lists = await self._shortened(record)
        elif record:
            record = await redactor().rows(record)
        if mode not in (TurnMode.WAITS, TurnMode.COMPLETED):
            body = redactor().data(body)
        instance = delivery.instance if delivery.key else ""
        args = (
            self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, instance, mode,
            now_ms, record, steps, body, state, count, *parts,
        )  # fmt: skip
        if count > WIDE_PARTS:
            async with self._wide_commits:
                reply = await self.insist("commit_turn", *args)
        else:
            try:  # as `insist`, without its coroutine: most turns come here
                reply = await self.transport.call(b"FCALL", self._functions["commit_turn"], 1, self._base, *args)
            except ServerError as error:
                reply = await self.insist_after(error, "commit_turn", args)
        if reply == b"OK":
            if new_lists:
                self._sent_lists.remember(new_lists)
            return True
        self._fence(reply)
        if isinstance(reply, bytes) and reply.startswith(b"LIMIT"):
            raise LimitExceeded(reply[6:].decode())
        if reply == b"LOST":
            raise JournalLost(f"the broker has lost a step of {delivery!r}")
        return False

    async def _shortened(self, record: bytes) -> tuple[bytes, NewLists]:
        while True:
            connection = self.transport.reconnects
            if connection != self._sent_since:
                self._sent_since = connection
                self._sent_lists.forget()
            shortened = await self._sent_lists.shortened(record, redactor().rows)
            # Not `_sent_since`: during a pause another commit may have forgotten the lists that these rows name.
            if self.transport.reconnects == connection:
                return shortened

    async def commit_call(
        self,
        delivery: Delivery,
        status: bytes,
        now_ms: int,
        payload: bytes,
        record: bytes,
        steps: int,
        usage: bytes = b"",
    ) -> bool:
        """Commit the result of a call (status `K`), or its error (`E`).

        Adds `usage` (JSON) to the task's usage, and ends the task if that exceeds a limit. Redacts secrets in the rows
        and in an error. Returns False if the step has its result already, or its task has ended.
        """
        secrets = redactor()
        record = await secrets.rows(record)
        if status == RESULT_ERROR:
            payload = secrets.data(payload)
        args = (
            self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, status, now_ms,
            payload, record, steps, usage, delivery.trace, "1" if delivery.mark else "",
        )  # fmt: skip
        try:  # as `insist`, without its coroutine: every call comes here
            reply = await self.transport.call(b"FCALL", self._functions["commit_call"], 1, self._base, *args)
        except ServerError as error:
            reply = await self.insist_after(error, "commit_call", args)
        if reply == b"OK":
            return True
        self._fence(reply)
        return False

    async def ask(
        self,
        delivery: Delivery,
        now_ms: int,
        reply: str,
        state: bytes,
        parts: Sequence[Argument],
        count: int,
        *,
        asked: str = "",
        answered: str = "",
    ) -> dict[str, tuple[bytes, bytes]] | None:
        """Make the calls in parts `c`, `s` and `p` (see `commit_turn.lua`) while the turn continues.

        `state` (JSON) is the state that a callback into the instance sees; empty: unchanged. Returns the journal values
        of calls that have a result already, each with the instance's state if a nested run changed it (else empty);
        those of the others come on the reply stream `reply`. If it was delivered again and waits for one, its deaths
        are cleared. Returns None if the turn is no longer this delivery's.
        Raises `LimitExceeded` if the task would exceed its `max_steps`. `asked` is the newest step that this turn has
        called or sent, and `answered` the newest one whose answer it has (empty: none); raises `JournalLost` if the
        broker has lost one of them.
        """
        answer = cast(
            list[bytes],
            await self.call(
                "ask", self.owner, delivery.entry, delivery.task, delivery.run, delivery.instance, now_ms, reply, state,
                delivery.stream_if_again, asked, answered, count, *parts,
            ),
        )  # fmt: skip
        self._fence(answer[0])
        if answer[0] == b"LIMIT":
            raise LimitExceeded(f"the task would take more than max_steps={answer[1].decode()} steps")
        if answer[0] == b"LOST":
            raise JournalLost(f"the broker has lost a request or an answer of {delivery!r}")
        if answer[0] == b"DONE":
            return None
        return {answer[at].decode(): (answer[at + 1], answer[at + 2]) for at in range(1, len(answer), 3)}

    async def record(
        self, delivery: Delivery, step: str, value: bytes, kind: str = "step", name: str = "", *, after: str = ""
    ) -> bytes | None:
        """Journal a step in mid-turn unless it has a value. Return the stored value, or None if the turn is lost.

        A new step clears the deaths of an entry that was delivered again. `kind` and `name` are for its row in the
        trajectory, if the task ends before the turn commits. `after` is the newest step that this turn has journaled
        (empty: none); raises `JournalLost` if the journal lacks it.
        """
        reply = await self.insist(
            "record", self.owner, delivery.entry, delivery.task, delivery.run, step, value, JOURNAL_LIMIT,
            _labelled(kind, name), delivery.stream_if_again, after,
        )  # fmt: skip
        self._fence(reply)
        _check_journaled(reply, after)
        if reply == value:
            delivery.deliveries = 1
        return None if reply == b"DONE" else cast(bytes, reply)

    async def begin_call(self, delivery: Delivery, step: str, reserve: bytes = b"") -> CallBegun | None:
        """Start a model call in mid-turn, or start it again. Return None if the turn is lost.

        Reserves `reserve` (JSON, names to `[least, most]`) of the task's limits until `settle_call`. Raises `Reserved`
        if other calls hold too much of the limits now, and `LimitExceeded` if too little is left.
        """
        reply = await self.call("begin_call", self.owner, delivery.entry, delivery.task, delivery.run, step, reserve)
        self._fence(reply)
        if reply == b"DONE":
            return None
        if isinstance(reply, bytes):
            kind, _, why = reply.decode().partition(" ")
            raise (Reserved if kind == "WAIT" else LimitExceeded)(why)
        attempt, granted = cast(list[bytes], reply)
        return CallBegun(int(attempt), msgspec.json.decode(granted, type=dict[str, float]))

    async def settle_call(
        self, delivery: Delivery, step: str, value: bytes, usage: bytes = b"", name: str = "", *, after: str = ""
    ) -> tuple[bytes, str] | None:
        """Journal a model call as `record` does, add its `usage` (JSON), and release its reservation.

        Returns the stored value, and the limit that the task exceeds now (empty: none); None if the turn is lost.
        """
        reply = await self.insist(
            "settle_call", self.owner, delivery.entry, delivery.task, delivery.run, step, value, JOURNAL_LIMIT, usage,
            _labelled("model", name), delivery.stream_if_again, after,
        )  # fmt: skip
        self._fence(reply)
        _check_journaled(reply, after)
        if isinstance(reply, list):
            delivery.deliveries = 1
            stored, why = cast(list[bytes], reply)
            return stored, why.decode()
        if reply == value:
            delivery.deliveries = 1
        return None if reply == b"DONE" else (cast(bytes, reply), "")

    async def stream(self, delivery: Delivery, step: str, attempt: int, pieces: Sequence[bytes]) -> bool:
        """Append pieces of a model's answer to the task's output. Return False if the call is over.

        `pieces` alternates the mark `chunk` and a value (JSON). With the mark `progress` they report the progress of
        another step of the turn; `begin_call` is not needed for it. Raises `LimitExceeded` over the limit of the
        output, where progress is dropped instead.
        """
        reply = await self.call(
            "stream", self.owner, delivery.entry, delivery.task, delivery.run, step, attempt, *pieces
        )
        self._fence(reply)
        if pieces[0] != b"progress":
            _within_output(reply)
        return reply == b"OK"

    async def emit(
        self,
        delivery: Delivery,
        branch: str,
        attempt: int,
        first: int,
        checksum: int,
        step: str,
        pieces: Sequence[bytes],
    ) -> bool:
        """Append the pieces of a branch of the run, numbered from `first`, that the task's output does not have.

        `pieces` alternates a mark, `chunk` or empty, and a value (JSON). `checksum` covers the branch's output with
        them; `step` is that of the first one. `attempt` is that of the run's output. Returns False if all were there,
        or the turn is lost. Raises `LimitExceeded` over the limit of the output; the pieces that fit are written.
        """
        reply = await self.call(
            "emit", self.owner, delivery.entry, delivery.task, delivery.run, branch, attempt, first, checksum, step,
            *pieces,
        )  # fmt: skip
        self._fence(reply)
        _within_output(reply)
        return reply == b"OK"

    async def restart_output(self, delivery: Delivery, attempt: int) -> bool:
        """Start the run's output over, as this attempt. Return False if the turn is lost."""
        reply = await self.call("restart_output", self.owner, delivery.entry, delivery.task, delivery.run, attempt)
        self._fence(reply)
        return reply == b"OK"

    async def progress(self, delivery: Delivery, data: bytes) -> bool:
        """Report the progress of a call (JSON) to the client. Return False if nobody waits for it any more."""
        reply = await self.call("progress", self.owner, delivery.task, delivery.run, delivery.attempt, data)
        self._fence(reply)
        return reply == b"OK"

    # -- failures ------------------------------------------------------------------------------------------------

    async def retry(
        self, delivery: Delivery, delay_ms: int, error: bytes, *, counts: bool = True, usage: bytes = b""
    ) -> bool:
        """Retry the delivery after `delay_ms`; it waits on the broker. Adds `usage` (JSON) to the task's usage."""
        attempt = delivery.attempt + (1 if counts else 0)
        reply = await self.insist(
            "retry",
            self.owner,
            delivery.stream,
            delivery.entry,
            delivery.task,
            delivery.run,
            delay_ms,
            attempt,
            redactor().data(error),
            usage,
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
        usage: bytes = b"",
    ) -> bool:
        """End a delivery that will not be retried: answer the waiting step, and keep the delivery as a dead letter.

        Redacts secrets in its errors and rows, but not in its input, which a redrive sends again.
        """
        secrets = redactor()
        errors, error, record = secrets.data(errors), secrets.data(error), await secrets.rows(record)
        reply = await self.insist(
            "dead_letter", self.owner, stream, entry, reason, errors, now_ms, error, record, steps, usage
        )
        self._fence(reply)
        return reply == b"OK"

    async def keep_letter(self, fields: Sequence[Argument]) -> str:
        """Keep a dead letter without a delivery, and return its id. Oversized fields are cut."""
        return cast(bytes, await self.call("keep_letter", *bounded(fields))).decode()

    async def trim_letters(self, most_bytes: int, retention_ms: int) -> TrimmedLetters:
        """Trim dead letters by age and bytes. From now on, `most_bytes` limits every function that writes letters."""
        reply = cast(list[int], await self.call("trim_letters", most_bytes, retention_ms))
        return TrimmedLetters(*reply)

    async def recount_letters(self) -> None:
        """Count the bytes of all dead letters again."""
        cursor: Argument = "-"
        while cursor:
            cursor = cast(bytes, await self.call("recount_letters", cursor))

    async def redrive(self, letter: str, reopen: bool, data: bytes = b"") -> list[str]:
        """Redrive a letter. Return `missing`, or a word of `redrive.lua` with the task (`ended`: and its status)."""
        return texts(await self.call("redrive", letter, "1" if reopen else "0", data))

    async def drop_letter(self, letter: str) -> bool:
        """Drop a dead letter. Return False if it does not exist."""
        return await self.call("drop_letter", letter) == 1

    async def mark_started(self, delivery: Delivery) -> bool | None:
        """Mark a call that may not be repeated as started, before it runs.

        Returns False if it was started before. Returns None if it must not run: it has its result, this is a late copy
        of its entry, or its task has ended.
        """
        # The same mark if this handling repeats the command, a different one if this owner gets the delivery twice.
        word = delivery.mark or secrets.token_hex(8)
        reply = await self.call(
            "mark_started", self.owner, delivery.task, delivery.run, delivery.stream, delivery.entry,
            word,
        )  # fmt: skip
        self._fence(reply)
        delivery.mark = "" if reply == b"DONE" else word
        return None if reply == b"DONE" else reply == 1

    async def take_slots(
        self,
        delivery: Delivery,
        limits: Sequence[tuple[str, int, int, int]],
        *,
        each_attempt: bool,
        replaces: str = "",
        quiet_ms: int = 0,
    ) -> bool | None:
        """Take the slots of a run or a call before it starts: of each limit its name, how many may be open, how many
        may start, and within how many ms. `each_attempt`: an attempt counts as a start. `replaces` and `quiet_ms` are
        `Limit.replaces` and `Limit.debounce` of the only limit.

        Returns False if it waits now, and its delivery is settled. Returns None if nobody wants it any more.
        """
        reply = await self.insist(
            "take_slots", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run,
            "1" if each_attempt else "", replaces[:1], quiet_ms, *(each for limit in limits for each in limit),
        )  # fmt: skip
        self._fence(reply)
        return None if reply == b"DONE" else reply == b"OK"

    async def forget_started(self, delivery: Delivery) -> None:
        """Remove the mark of a call that may not be repeated."""
        await self.transport.call("HDEL", self.keys.started, f"{delivery.task}/{delivery.run}")

    async def leave_quarantine(self, delivery: Delivery) -> None:
        """Remove the counted deaths of a quarantined entry that has ended."""
        await self.transport.call(
            "HDEL",
            self.keys.quarantine,
            f"{delivery.stream}|{delivery.entry.decode()}",
            f"~{delivery.stream}",
        )


def bounded(fields: Sequence[Argument]) -> list[bytes]:
    """Return the fields (name, value, name, …) cut to the bounds of a letter.

    If something was cut, the field `cut` is added: JSON with `bytes` (the original size of all names and values),
    `fields` (for each shortened value its original `bytes` and `sha256`), and `left_out` (how many were dropped).
    """
    words = [_encoded(word) for word in fields]
    data_limit = MAX_DATA_BYTES if b"event:type" in words[::2] else MAX_STRUCTURED_BYTES
    kept: list[tuple[bytes, bytes]] = []
    cut: dict[str, dict[str, object]] = {}
    left_out = 0
    for name, value in zip(words[::2], words[1::2], strict=True):
        if len(name) > MAX_FIELD_NAME_BYTES or len(kept) >= MAX_LETTER_FIELDS:
            left_out += 1
            continue
        if len(value) > (data_limit if name == _EVENT_DATA else MAX_VALUE_BYTES):
            value = _head(name, value, cut)
        kept.append((name, value))
    while sum(len(name) + len(value) for name, value in kept) > MAX_LETTER_BYTES:
        at = max(range(len(kept)), key=lambda place: len(kept[place][1]))
        kept[at] = (kept[at][0], _head(*kept[at], cut))
    if cut or left_out:
        about = {"bytes": sum(map(len, words)), "fields": cut, "left_out": left_out}
        kept.append((b"cut", msgspec.json.encode(about)))
    return [word for pair in kept for word in pair]


def _head(name: bytes, value: bytes, cut: dict[str, dict[str, object]]) -> bytes:
    """Return the head of a value, and add the value to `cut`."""
    digest = hashlib.sha256(value).hexdigest()
    cut[name.decode("utf-8", "replace")] = {"bytes": len(value), "sha256": digest}
    return value[:CUT_VALUE_BYTES]


def _encoded(word: Argument) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode(errors="replace")


def _check_journaled(reply: Reply, after: str) -> None:
    """Raise the error in the reply to a write in mid-turn."""
    if reply == b"LIMIT":
        raise LimitExceeded(f"the run's journal holds its limit of {JOURNAL_LIMIT} steps")
    if reply == b"LOST":
        raise JournalLost(f"the broker has lost step {after} of this turn")


def _within_output(reply: Reply) -> None:
    if isinstance(reply, bytes) and reply.startswith(b"LIMIT "):
        raise LimitExceeded(
            f"the task's output would exceed its limit of {int(reply[6:]):,} bytes (WEFT_OUTPUT_MAX_BYTES): "
            "emit less, or store it elsewhere and emit a reference"
        )


def _labelled(kind: str, name: str) -> str:
    """Return a step's kind and name on one line, separated by a tab."""
    return f"{kind}\t{' '.join(name.split())[:LONGEST_NAME]}"
