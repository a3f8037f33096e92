"""Verbs of a delivery that fails: retry, give up, and its dead letter, cut to a bounded size."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.partition import Partition
from runtime_core.bus.reply import texts
from runtime_core.bus.values import TrimmedLetters
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.telemetry.redaction import redactor

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
