"""The values in which a turn ends."""

from __future__ import annotations

from runtime_core.consumer.effects import Effect, finished_steps
from runtime_core.runs.effects import Publish, Send
from runtime_core.wire.step import Step


def row(step: str, kind: str) -> Step:
    return Step(run="r", kind=kind, name="x", status="completed", started=1, ended=2, step=step)


def test_messages_that_never_leave_have_no_rows() -> None:
    rows = [row("1", "send"), row("2", "step"), row("3", "publish"), row("31", "step")]
    unsent: list[Effect] = [Send("1", "audit", "", b"1"), Publish("3", "news", "", b"1")]
    assert [each.step for each in finished_steps(rows, unsent)] == ["2", "31"]
    assert finished_steps(rows, []) == rows
