"""Journal values, and what a journal knows about a step."""

from __future__ import annotations

from runtime_core.consumer.effects import FAILED, JOURNAL_PREFIX
from runtime_core.runs.journal import Journal, pack, payload_of, status_of, time_of


def test_a_packed_value_is_read_unchanged() -> None:
    value = pack("0badf00d", FAILED, 1_700_000_000_123, b'{"a":1}')
    assert value == b'0badf00dE1700000000123{"a":1}'
    assert len(value) - len(payload_of(value)) == JOURNAL_PREFIX
    assert (status_of(value), time_of(value), payload_of(value)) == (b"E", 1_700_000_000_123, b'{"a":1}')


def test_the_first_value_of_a_step_stays() -> None:
    journal = Journal({}, {"1": "aaaaaaaa"})
    assert journal.digest("1") == "aaaaaaaa"
    first = pack("bbbbbbbb", b"K", 1, b"1")
    assert journal.add("1", first)
    assert not journal.add("1", pack("cccccccc", b"K", 2, b"2"))
    assert journal.values == {"1": first}
    assert journal.pending == {}
    assert journal.size == len(first)
    assert journal.digest("1") == "bbbbbbbb"
    assert journal.digest("2") == ""


def test_a_journal_does_not_change_what_it_was_made_from() -> None:
    values, pending = {"1": b"x"}, {"2": "y"}
    journal = Journal(values, pending)
    journal.add("2", b"z")
    assert (values, pending) == ({"1": b"x"}, {"2": "y"})
