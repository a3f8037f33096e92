"""From a turn's effects to the parts of its commit."""

from __future__ import annotations

from runtime_core.bus.deliveries import Delivery
from runtime_core.runs.commit import row_of_run


def delivery() -> Delivery:
    taken = Delivery(0, "agent", b"1-1")
    taken.task, taken.run = "t", "r"
    return taken


def test_the_input_of_a_run_is_the_data_of_its_first_event() -> None:
    """A later event brings the result of a step."""
    taken = delivery()
    taken.kind, taken.data = "resume", b"7"
    later = row_of_run(taken, "failed", 1, 2, "")
    taken.kind = "start"
    assert bytes(row_of_run(taken, "failed", 1, 2, "").input) == b"7"
    assert bytes(later.input) != b"7"


def test_the_row_of_a_run_has_the_errors_of_its_earlier_attempts() -> None:
    taken = delivery()
    taken.errors = b'[{"type":"Broken","message":"first"}]'
    assert [error.message for error in row_of_run(taken, "failed", 1, 2, "").errors] == ["first"]
