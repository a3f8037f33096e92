"""What writes a batch, and the rule that both databases follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime_core.errors import Fenced
from runtime_core.trajectory.rows import RecordEntry, entry_order

NO_ENTRY = "0-0"
"""The cursor before the first entry."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries of one partition's record stream, oldest first, and the epoch of who writes them."""

    namespace: str
    partition: int
    epoch: int
    entries: Sequence[RecordEntry]


class Writer(Protocol):
    """Writes batches, each in one transaction: rows and cursor together, or nothing."""

    async def write(self, batch: Batch) -> None:
        """Raise Fenced where a higher epoch has written, StoreUnavailable where the database failed."""

    async def close(self) -> None:
        """Wait for a write that is under way, then let go of the database."""


def next_cursor(batch: Batch, stored_epoch: int, stored_entry: str) -> str:
    """Return the cursor after `batch`: never behind the stored one. Raise Fenced for a lower epoch."""
    if stored_epoch > batch.epoch:
        raise Fenced(
            f"partition {batch.partition} of {batch.namespace!r} is recorded under epoch {stored_epoch}, "
            f"this writer has {batch.epoch}: stop writing and stand by"
        )
    return max((stored_entry, *(entry.entry_id for entry in batch.entries[-1:])), key=entry_order)
