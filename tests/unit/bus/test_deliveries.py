"""Entries as the broker's functions write them, and a run's fields, as values of this process."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import BranchOutput, Delivery, StoredOutput, _stored_output, pairs, steps_of
from runtime_core.errors import InvalidInput

RUN_HEADER = b"1\nstart\nt\nr\nwriter\nkey\n2\n7"


def test_an_entry_is_read_by_the_names_of_its_fields() -> None:
    fields = [b"h", RUN_HEADER, b"later", b"?", b"e", b"[1]", b"x", b"{}", b"s", b"3", b"d", b"1"]
    taken = Delivery(1, "agent:gpu", b"5-1", fields)
    assert (taken.kind, taken.task, taken.run, taken.name, taken.key) == ("start", "t", "r", "writer", "key")
    assert (taken.attempt, taken.turn, taken.data, taken.step) == (2, 7, b"1", "3")
    assert (taken.context, taken.errors) == (b"{}", b"[1]")
    assert (taken.instance, repr(taken)) == ("writer/key", "agent:gpu writer (t/r, entry 5-1)")
    assert repr(Delivery(0, "tool", b"5-0")) == "entry 5-0 of tool"


@pytest.mark.parametrize(
    ("stream", "fields", "message"),
    [
        ("agent", [b"d", RUN_HEADER], "h: missing: only the bus's functions may write to work streams"),
        ("agent", [], "h: not a header of the bus"),
        ("agent", [b"h", b"2\nstart"], "h: has format '2', this release reads 1"),
        ("agent", [b"h", b"1\nstart\nt\nr"], "h: not a header of the bus"),
        ("agent", [b"h", RUN_HEADER.replace(b"\n2\n", b"\nx\n")], "h: not a header of the bus"),
        ("tool", [b"h", RUN_HEADER], "h: not a header of the bus: 'start' of 'r' on tool"),
        ("agent", [b"h", RUN_HEADER.replace(b"start", b"call")], "h: not a header of the bus: 'call'"),
        ("tool", [b"h", RUN_HEADER.replace(b"start", b"call")], "h: not a header of the bus: 'call' of 'r'"),
        ("agent", [b"h", b"1\n\xff"], "h: not a header of the bus"),
    ],
)
def test_an_entry_of_another_writer_is_refused(stream: str, fields: list[bytes], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Delivery(0, stream, b"1-1", fields)
    assert str(refused.value).startswith(message)


def test_only_an_agent_with_a_key_is_an_instance() -> None:
    call = Delivery(0, "tool", b"1-1", [b"h", b"1\ncall\nt\nr/2\nsearch\nkey\n1\n1"])
    assert call.instance == ""
    assert Delivery(0, "agent", b"1-1", [b"h", RUN_HEADER.replace(b"key", b"")]).instance == ""


def test_a_count_is_cleared_only_where_there_is_one() -> None:
    taken = Delivery(0, "agent", b"1-1")
    assert taken.stream_if_again == ""
    taken.deliveries = 2
    assert taken.stream_if_again == "agent"


def test_deleted_entries_are_left_out() -> None:
    assert pairs([(b"1-1", [b"a", b"b"]), (b"2-1", None), None]) == [(b"1-1", [b"a", b"b"])]
    assert pairs(None) == []


def test_unwritten_steps_are_read_with_their_usage_and_branches() -> None:
    lines = (b"1\tstep\tname", b'2\tmodel\tm\t{"tokens":1}', b"0e1\temit\t@", b"3.0.e1\temit\t@3.0.", b"")
    steps, branches = steps_of(b"\n".join(lines))
    assert steps == {"1": b"", "2": b'{"tokens":1}'}
    assert branches == {"", "3.0."}
    assert steps_of(b"") == ({}, set())


def test_output_of_an_earlier_attempt_only_counts_as_recorded() -> None:
    """A branch without unrecorded rows has rows for all that it ever emitted."""
    stored = {"": b"2 5 3 17 0", "1.": b"2 5 3 - 0", "2.": b"1 9 4 17 0"}
    assert _stored_output(2, stored, {"", "2."}) == StoredOutput(
        2, {"": BranchOutput(5, 3, 17), "1.": BranchOutput(5, 5, None), "2.": BranchOutput(0, 4, None)}
    )
