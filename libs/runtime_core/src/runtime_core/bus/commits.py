"""Verbs of a delivery that goes well: what it keeps and asks in its middle, and how it is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.partition import Partition
from runtime_core.bus.values import CallBegun
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
