"""Journal values, and what a journal knows about a step."""

from __future__ import annotations

from runtime_core.runs.journal import Journal, State, pack, payload_of, status_of, time_of
from runtime_core.wire.step import JOURNAL_PREFIX, RESULT_ERROR


def test_a_packed_value_is_read_unchanged() -> None:
    value = pack("0badf00d", RESULT_ERROR, 1_700_000_000_123, b'{"a":1}')
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


def test_a_journal_does_not_change_its_source() -> None:
    values, pending = {"1": b"x"}, {"2": "y"}
    journal = Journal(values, pending)
    journal.add("2", b"z")
    assert (values, pending) == ({"1": b"x"}, {"2": "y"})


def released(seen: object = None) -> State:
    """A state that the code has used before it gave up its key."""
    state = State(b'{"n":1}')
    state.value()["seen"] = seen
    state.release()
    return state


def test_a_nested_runs_change_does_not_count_as_use_of_the_state_without_the_key() -> None:
    state = released()
    state.replace(b'{"n":2}')
    assert not state.differs()
    state.value()["n"] = 3
    assert state.differs()


def test_a_run_without_its_key_leaves_the_state_to_others() -> None:
    assert released("mine").working_change() is None


def test_a_change_after_the_key_s_return_counts_and_is_written() -> None:
    state = released()
    state.replace(b'{"n":2}')
    state.acquire(b'{"n":1}')
    assert state.value() == {"n": 2}
    assert state.changed() == b'{"n":2}'


def test_the_state_at_the_key_s_return_is_no_change() -> None:
    state = released()
    state.replace(b'{"n":2}')  # the last of the changes is that of the return itself
    state.acquire(b'{"n":2}')
    assert state.value() == {"n": 2}
    assert state.changed() is None


def test_a_run_that_kept_its_key_sees_what_its_nested_run_changed() -> None:
    state = released()
    state.replace(b'{"n":2}')
    state.acquire(b"false")
    assert state.value() == {"n": 2}
    assert state.changed() == b'{"n":2}'


def test_a_later_block_does_not_see_the_changes_of_an_earlier_one() -> None:
    state = released()
    state.replace(b'{"n":2}')
    state.acquire(b'{"n":1}')
    state.release()
    state.acquire(b'{"n":3}')
    assert state.value() == {"n": 3}
