"""Verbs of a delivery that does not go well: try again, give up, and what becomes of what was given up."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from runtime_core.bus.delivery import Delivery
from runtime_core.bus.letters import bounded
from runtime_core.bus.reply import texts
from runtime_core.bus.transport import Argument
from runtime_core.bus.values import TrimmedLetters
from runtime_core.bus.verbs.partition import Partition
from runtime_core.telemetry.redaction import redactor


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
        """Count the bytes of all dead letters anew."""
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
