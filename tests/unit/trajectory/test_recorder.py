"""The recorder's pause between two transactions."""

from __future__ import annotations

from runtime_core.trajectory.recorder import (
    BUSY_BYTES,
    BUSY_ENTRIES,
    BUSY_POLL_SECONDS,
    POLL_SECONDS,
    pause_after_many,
)
from runtime_core.trajectory.tables import RecordEntry


def entries(size: int) -> list[RecordEntry]:
    return [RecordEntry(f"{number}-0", "task", b"x" * size, None) for number in range(BUSY_ENTRIES)]


def test_many_entries_share_larger_transactions() -> None:
    assert pause_after_many(entries(100)) == BUSY_POLL_SECONDS


def test_large_entries_do_not_pile_up_in_memory() -> None:
    assert pause_after_many(entries(BUSY_BYTES // BUSY_ENTRIES)) == POLL_SECONDS
