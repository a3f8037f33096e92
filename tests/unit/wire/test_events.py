"""The output of a task as a reader keeps it."""

from __future__ import annotations

import pytest

from runtime_core.wire.events import OUTPUT_DELTA, StreamEvent, StreamingMode
from weft import TaskOutput


def delta(seq: int, value: object, *, run: str = "r", attempt: int = 1, **marks: bool) -> StreamEvent:
    name = "text" if isinstance(value, str) else "value"
    data = {"task_id": "t", "run_id": run, "attempt": attempt, "seq": seq, name: value, **marks}
    return StreamEvent(f"{seq}-0", OUTPUT_DELTA, data)


def test_pieces_are_in_the_order_of_the_stream() -> None:
    output = TaskOutput()
    assert output.add(delta(1, "a"))
    assert output.add(delta(2, {"n": 1}, run="r/3"))
    assert output.add(delta(3, "b"))
    assert output.pieces == ["a", {"n": 1}, "b"]
    assert output.text == "ab"


def test_a_higher_attempt_replaces_the_pieces_of_its_run_alone() -> None:
    output = TaskOutput()
    for event in (delta(1, "old"), delta(2, "other", run="r/2"), delta(3, "", attempt=2, restart=True)):
        assert output.add(event)
    assert output.text == "other"
    assert not output.add(delta(4, "late"))
    assert not output.add(delta(5, "", attempt=3, restart=True)), "there was nothing to replace"
    assert output.add(delta(6, "new", attempt=3))
    assert output.text == "othernew"


def test_a_stream_may_be_read_again() -> None:
    output = TaskOutput()
    events = [delta(1, "a"), delta(2, "b"), delta(3, "", attempt=2, restart=True), delta(4, "c", attempt=2)]
    for event in events:
        output.add(event)
    assert not any(output.add(event) for event in events)
    assert output.text == "c"


@pytest.mark.parametrize(
    "event",
    [delta(1, {"done": 0.5}, progress=True), StreamEvent("1-0", "weft.task.completed", {"task_id": "t"})],
)
def test_progress_and_other_events_are_not_output(event: StreamEvent) -> None:
    output = TaskOutput()
    assert not output.add(event)
    assert output.pieces == []


def test_readers_of_output_see_that_it_starts_over() -> None:
    mark = delta(1, "", attempt=2, restart=True)
    shown = {mode for mode in StreamingMode if mode.shows(mark.type, mark.data)}
    assert shown == set(StreamingMode) - {StreamingMode.CORE}
