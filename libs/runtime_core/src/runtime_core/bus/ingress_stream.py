"""One publisher's ingress stream, read by whoever leads admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.keys import Keys, ingress
from runtime_core.bus.partition import Partition

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
