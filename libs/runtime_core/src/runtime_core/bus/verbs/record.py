"""Verbs for the record stream: read it, say how far one has come, trim it."""

from __future__ import annotations

from typing import cast

from runtime_core.bus.delivery import pairs
from runtime_core.bus.reply import position
from runtime_core.bus.transport import Reply
from runtime_core.bus.verbs.partition import Partition
from runtime_core.errors import ServerError


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
