"""The recorder's pause between two transactions."""

from __future__ import annotations

from runtime_core.trajectory.recorder import (
    BUSY_BYTES,
    BUSY_ENTRIES,
    BUSY_POLL_SECONDS,
    POLL_SECONDS,
    READ_BATCH,
    pause_after,
)
from runtime_core.trajectory.tables import RecordEntry


def entries(count: int, size: int = 100) -> list[RecordEntry]:
    return [RecordEntry(f"{number}-0", "task", b"x" * size, None) for number in range(count)]


def test_a_few_entries_are_recorded_soon() -> None:
    assert pause_after(entries(BUSY_ENTRIES - 1)) == POLL_SECONDS


def test_many_entries_share_larger_transactions() -> None:
    assert pause_after(entries(BUSY_ENTRIES)) == BUSY_POLL_SECONDS


def test_large_entries_do_not_pile_up_in_memory() -> None:
    assert pause_after(entries(BUSY_ENTRIES, BUSY_BYTES // BUSY_ENTRIES)) == POLL_SECONDS


def test_entries_that_wait_already_are_read_without_a_pause() -> None:
    assert pause_after(entries(READ_BATCH)) == 0
