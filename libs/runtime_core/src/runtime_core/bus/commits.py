"""Verbs that end a delivery: commit, retry, give up, and a dead letter of bounded size."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument, Reply, texts
from runtime_core.bus.partition import Partition
from runtime_core.bus.values import CallBegun, Delivery, TrimmedLetters
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.errors import LimitExceeded, Reserved
from runtime_core.record.shortening import Told
from runtime_core.telemetry.redaction import Redactor, redactor

JOURNAL_LIMIT = 10_000
"""Steps that one run may journal."""
LONGEST_NAME = 200
"""Characters of a step's name that are kept beside its journal value."""


class CommitVerbs(Partition):
    """Every write counts only while this owner holds the delivery."""

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

        `mode` is `w` (waits), `c` (completed), `f` (failed) or `x` (the whole task fails); `parts` are described in
        `commit_turn.lua`. Returns False where the event had been handled before or its task is over. Raises
        `LimitExceeded` where the task would go over a limit of its own (nothing was written). Secrets are taken out of
        the rows, and out of the error that a failed run ends with.
        """
        secrets = redactor()
        record, told = self._shortened(record, secrets)
        if mode not in ("w", "c"):
            body = secrets.data(body)
        reply = await self.insist(
            "commit_turn", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, delivery.instance,
            mode, now_ms, record, steps, body, state, count, *parts,
        )  # fmt: skip
        if reply == b"OK":
            self._told.remember(told)
            return True
        self._fence(reply)
        if isinstance(reply, bytes) and reply.startswith(b"LIMIT"):
            raise LimitExceeded(reply[6:].decode())
        return False

    def _shortened(self, record: bytes, secrets: Redactor) -> tuple[bytes, Told]:
        if self.transport.reconnects != self._told_since:
            self._told_since = self.transport.reconnects
            self._told.forget()
        return self._told.shortened(record, secrets.data)

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

        Returns False where the step has its result already or its task is over.
        `usage` (JSON) is added to the task's; over a limit, the task ends here. Secrets are taken out of the rows, and
        out of an error.
        """
        secrets = redactor()
        record = secrets.data(record)
        if status == b"E":
            payload = secrets.data(payload)
        reply = await self.insist(
            "commit_call", self.owner, delivery.stream, delivery.entry, delivery.task, delivery.run, status, now_ms,
            payload, record, steps, usage, delivery.trace, "1" if delivery.mark else "",
        )  # fmt: skip
        self._fence(reply)
        return reply == b"OK"

    async def ask(
        self, delivery: Delivery, now_ms: int, reply: str, state: bytes, parts: Sequence[Argument], count: int
    ) -> dict[str, bytes] | None:
        """Ask for parts `c`, `s` and `p` (see `commit_turn.lua`) while the turn goes on.

        Returns the journal values of calls that have their result already; the others' come on the reply stream
        `reply`. None: the turn is no longer this delivery's. `state`, JSON, is what a call back into the instance sees;
        empty: unchanged. Raises `LimitExceeded` where the task would go over its `max_steps`.
        """
        answer = cast(
            list[bytes],
            await self.call(
                "ask", self.owner, delivery.entry, delivery.task, delivery.run, delivery.instance, now_ms, reply, state,
                count, *parts,
            ),
        )  # fmt: skip
        self._fence(answer[0])
        if answer[0] == b"LIMIT":
            raise LimitExceeded(f"the task would take more than max_steps={answer[1].decode()} steps")
        if answer[0] == b"DONE":
            return None
        return {answer[at].decode(): answer[at + 1] for at in range(1, len(answer), 2)}

    async def record(
        self, delivery: Delivery, step: str, value: bytes, kind: str = "step", name: str = ""
    ) -> bytes | None:
        """Journal a step in mid-turn, put if absent: what is stored now, or None where the turn is lost.

        `kind` and `name` are those of its row in the trajectory, should the task end before the turn commits.
        """
        reply = await self.insist(
            "record", self.owner, delivery.entry, delivery.task, delivery.run, step, value, JOURNAL_LIMIT,
            _labelled(kind, name),
        )  # fmt: skip
        self._fence(reply)
        if reply == b"LIMIT":
            raise _journal_is_full()
        return None if reply == b"DONE" else cast(bytes, reply)

    async def begin_call(self, delivery: Delivery, step: str, reserve: bytes = b"") -> CallBegun | None:
        """Begin a model call in mid-turn, or begin it again; None where the turn is lost.

        `reserve` (JSON, names to `[least, most]`) is held of the task's limits until the call is settled. Raises
        `Reserved` where other calls hold too much of them now, and `LimitExceeded` where too little is left for good.
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
        self, delivery: Delivery, step: str, value: bytes, usage: bytes = b"", name: str = ""
    ) -> tuple[bytes, str] | None:
        """Journal a model call as `record` does, with what it has used (JSON); its reservation is given back.

        Returns what is stored now, and which limit the task is over by it (empty: none); None where the turn is lost.
        """
        reply = await self.insist(
            "settle_call", self.owner, delivery.entry, delivery.task, delivery.run, step, value, JOURNAL_LIMIT, usage,
            _labelled("model", name),
        )  # fmt: skip
        self._fence(reply)
        if reply == b"LIMIT":
            raise _journal_is_full()
        if isinstance(reply, list):
            stored, why = cast(list[bytes], reply)
            return stored, why.decode()
        return None if reply == b"DONE" else (cast(bytes, reply), "")

    async def stream(self, delivery: Delivery, step: str, attempt: int, data: bytes, *, progress: bool = False) -> bool:
        """Append a piece of a model's answer (JSON) to the task's output; False where nobody wants it any more.

        Raises `LimitExceeded` over the limit of the output; progress is dropped there.

        With `progress`, say how far a step of the turn is: that is no model call, and need not have begun as one.
        """
        reply = await self.call(
            "stream",
            self.owner,
            delivery.entry,
            delivery.task,
            delivery.run,
            step,
            attempt,
            data,
            "p" if progress else "",
        )
        self._fence(reply)
        if not progress:
            _within_output(reply)
        return reply == b"OK"

    async def emit(self, delivery: Delivery, step: str, value: bytes, data: bytes) -> bool:
        """Append a delta to the task's output, once per step. Raises `LimitExceeded` over the limit of the output."""
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
        _within_output(reply)
        return reply == b"OK"

    async def progress(self, delivery: Delivery, data: bytes) -> bool:
        """Show the client how far a call is (JSON); False where nobody waits for it any more."""
        reply = await self.call("progress", self.owner, delivery.task, delivery.run, delivery.attempt, data)
        self._fence(reply)
        return reply == b"OK"


def _journal_is_full() -> LimitExceeded:
    return LimitExceeded(f"the run's journal holds its limit of {JOURNAL_LIMIT} steps")


def _within_output(reply: Reply) -> None:
    if isinstance(reply, bytes) and reply.startswith(b"LIMIT "):
        raise LimitExceeded(
            f"the task's output would be over its limit of {int(reply[6:]):,} bytes (WEFT_OUTPUT_MAX_BYTES): "
            "emit less, or store it elsewhere and emit a reference"
        )


def _labelled(kind: str, name: str) -> str:
    """A step's kind and name on one line, with a tab between them."""
    return f"{kind}\t{' '.join(name.split())[:LONGEST_NAME]}"


HEAD_BYTES = 4096
"""What is kept of a value that is too large."""
MAX_VALUE_BYTES = MAX_DATA_BYTES + 64 * 1024
"""The largest value that the bus itself writes: data and what it adds to them."""
MAX_STRUCTURED_BYTES = 2 * MAX_DATA_BYTES
"""The largest `data` of a structured event, as `envelope.py` has it."""
MAX_LETTER_BYTES = MAX_STRUCTURED_BYTES + 512 * 1024
"""All names and values together."""
MAX_FIELDS = 200
"""More than an event may have attributes."""
MAX_NAME_BYTES = 512

_EVENT_DATA = b"event:data"


def bounded(fields: Sequence[Argument]) -> list[bytes]:
    """The fields (name, value, name, …) within the bounds of a letter.

    Where something had to go, `cut` is added: JSON with `bytes` (all names and values as they came), `fields` (of each
    value of which only a head was kept its `bytes` and `sha256`), and `left_out` (how many fields were dropped).
    """
    words = [_encoded(word) for word in fields]
    data_limit = MAX_DATA_BYTES if b"event:type" in words[::2] else MAX_STRUCTURED_BYTES
    kept: list[tuple[bytes, bytes]] = []
    cut: dict[str, dict[str, object]] = {}
    left_out = 0
    for name, value in zip(words[::2], words[1::2], strict=True):
        if len(name) > MAX_NAME_BYTES or len(kept) >= MAX_FIELDS:
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
    """The head of a value, which is noted in `cut`."""
    digest = hashlib.sha256(value).hexdigest()
    cut[name.decode("utf-8", "replace")] = {"bytes": len(value), "sha256": digest}
    return value[:HEAD_BYTES]


def _encoded(word: Argument) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode(errors="replace")


class FailureVerbs(Partition):
    """Retries, marks of calls that may not be repeated, quarantine, dead letters."""

    async def retry(
        self, delivery: Delivery, delay_ms: int, error: bytes, *, counts: bool = True, usage: bytes = b""
    ) -> bool:
        """Put the delivery back for `delay_ms`, waiting on the broker; `usage` (JSON) is added to the task's."""
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
        """End a delivery that will not be tried again, answer who waits for it, and keep it.

        What it was sent stays as it was, to be sent again; secrets are taken out of its errors and rows.
        """
        secrets = redactor()
        errors, error, record = secrets.data(errors), secrets.data(error), secrets.data(record)
        reply = await self.insist(
            "dead_letter", self.owner, stream, entry, reason, errors, now_ms, error, record, steps, usage
        )
        self._fence(reply)
        return reply == b"OK"

    async def keep_letter(self, fields: Sequence[Argument]) -> str:
        """Keep a dead letter that no delivery of a handler goes with; oversized fields are cut. Returns its id."""
        return cast(bytes, await self.call("keep_letter", *bounded(fields))).decode()

    async def trim_letters(self, most_bytes: int, retention_ms: int) -> TrimmedLetters:
        """Trim dead letters by age and bytes; from now on `most_bytes` holds for all that write letters."""
        reply = cast(list[int], await self.call("trim_letters", most_bytes, retention_ms))
        return TrimmedLetters(*reply)

    async def recount_letters(self) -> None:
        """Count the bytes of all dead letters again."""
        cursor: Argument = "-"
        while cursor:
            cursor = cast(bytes, await self.call("recount_letters", cursor))

    async def redrive(self, letter: str, reopen: bool, data: bytes = b"") -> list[str]:
        """`ok` + task, `missing`, `cut` + task, `ended` + task + status, or `gone` + task."""
        return texts(await self.call("redrive", letter, "1" if reopen else "0", data))

    async def drop_letter(self, letter: str) -> bool:
        return await self.call("drop_letter", letter) == 1

    async def mark_started(self, delivery: Delivery) -> bool | None:
        """Mark a call that may not be repeated, before it runs.

        False where it was begun before. None where it must not run: it has its result, this is a late copy
        of its entry, or its task has ended.
        """
        # The same for a repeat by this handling of the delivery, and no other's: this owner may have it twice.
        word = delivery.mark or secrets.token_hex(8)
        reply = await self.call(
            "mark_started", self.owner, delivery.task, delivery.run, delivery.stream, delivery.entry,
            word,
        )  # fmt: skip
        self._fence(reply)
        delivery.mark = "" if reply == b"DONE" else word
        return None if reply == b"DONE" else reply == 1

    async def forget_started(self, delivery: Delivery) -> None:
        await self.transport.call("HDEL", self.keys.started, f"{delivery.task}/{delivery.run}")

    async def leave_quarantine(self, delivery: Delivery) -> None:
        """A quarantined entry came to an end: forget its deaths."""
        await self.transport.call(
            "HDEL",
            self.keys.quarantine,
            f"{delivery.stream}|{delivery.entry.decode()}",
            f"~{delivery.stream}",
        )
