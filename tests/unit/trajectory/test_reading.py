"""Values read from a store: the order of steps, exported steps, and the first difference of two tasks."""

from __future__ import annotations

import json

import msgspec
import pytest

from runtime_core.trajectory.reading import (
    StepDifference,
    StoredStep,
    TaskTrajectory,
    exported,
    first_difference,
    in_order,
)
from runtime_core.wire.step import ENCODER, NOTHING, Step, StepFailure, TaskEnd


def step(run: str, path: str = "", kind: str = "tool", **changes: object) -> Step:
    plain = Step(run=run, step=path, kind=kind, name="search", status="completed", started=1.0, ended=2.0)
    return msgspec.structs.replace(plain, **changes)


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def task(*steps: Step, inherited: list[Step] | None = None) -> TaskTrajectory:
    return TaskTrajectory("weft", "t", None, sorted(steps, key=in_order), inherited=inherited or [])


WHOLE = task(
    step("r", kind="agent", input=raw("x"), output=raw("done")),
    step("r", "1", kind="model", output=raw(1)),
    step("r/2", kind="agent", name="writer", input=raw(2), output=raw(3)),
    step("r/2", "1", kind="step", output=raw(4)),
    step("r", "10", kind="step", output=raw(5)),
)


def changed(run: str, path: str, **changes: object) -> TaskTrajectory:
    return task(
        *(
            msgspec.structs.replace(each, **changes) if (each.run, each.step) == (run, path) else each
            for each in WHOLE.steps
        )
    )


def test_steps_are_in_the_order_of_their_numbers_and_the_last_attempt_comes_last() -> None:
    rows = [
        step("r", "10"),
        step("r/2"),
        step("r", "2"),
        step("r", attempt=3, ended=1.0),
        step("r", attempt=1, ended=9.0),
    ]
    assert [(each.run, each.step, each.attempt) for each in sorted(rows, key=in_order)] == [
        ("r", "", 3),
        ("r", "", 1),
        ("r", "2", 1),
        ("r", "10", 1),
        ("r/2", "", 1),
    ]


def test_a_task_is_complete_with_all_rows_that_its_end_counts() -> None:
    end = TaskEnd("t", "completed", "a", 2, 1.0, 2.0)
    assert not TaskTrajectory("weft", "t", None, [step("r")]).complete
    assert not TaskTrajectory("weft", "t", end, [step("r")]).complete
    assert TaskTrajectory("weft", "t", end, [step("r"), step("r", "1")]).complete


@pytest.mark.parametrize(
    ("run", "path", "changes", "members"),
    [
        ("r", "1", {"output": raw(7)}, ("output",)),
        ("r", "1", {"name": "other", "kind": "tool", "output": raw(7)}, ("kind", "name")),
        ("r/2", "", {"input": raw(7)}, ("input",)),
        ("r/2", "1", {"status": "failed", "error": StepFailure("E", "no")}, ("status", "error")),
        ("r", "10", {"output": raw(7)}, ("output",)),
        ("r", "", {"output": raw("else")}, ("output",)),
    ],
)
def test_the_first_difference_names_its_place_and_members(
    run: str, path: str, changes: dict[str, object], members: tuple[str, ...]
) -> None:
    """A run that a step has started is named as that step."""
    found = first_difference(WHOLE, changed(run, path, **changes))
    assert isinstance(found, StepDifference)
    parent, _, number = run.rpartition("/")
    assert (found.run, found.step) == ((run, path) if path or not parent else (parent, number))
    assert found.members == members
    assert found.one != found.other


def test_the_input_of_a_run_differs_before_its_steps_and_its_output_after_them() -> None:
    one = changed("r/2", "", input=raw(7), output=raw(8))
    other = changed("r/2", "1", output=raw(9))
    found = first_difference(one, other)
    assert found is not None
    assert (found.step, found.members) == ("2", ("input",))
    both = first_difference(changed("r/2", "", output=raw(8)), other)
    assert both is not None
    assert (both.run, both.step) == ("r/2", "1")


def test_times_owners_usage_and_the_writing_of_json_are_no_difference() -> None:
    other = changed("r", "", started=7.0, ended=8.0, owner="o", usage={"n": 1.0}, input=msgspec.Raw(b' "x" '))
    assert first_difference(WHOLE, other) is None
    failed = {"status": "failed", "error": StepFailure("E", "no", "trace", 1.0)}
    again = {"status": "failed", "error": StepFailure("E", "no", "another trace", 2.0)}
    assert first_difference(changed("r", "1", **failed), changed("r", "1", **again)) is None


def test_a_missing_step_is_a_difference_on_either_side() -> None:
    shorter = task(*(each for each in WHOLE.steps if each.step != "10"))
    for one, other in ((WHOLE, shorter), (shorter, WHOLE)):
        found = first_difference(one, other)
        assert found is not None
        assert (found.run, found.step, found.members) == ("r", "10", ("missing",))
        assert (found.one is None) is (one is shorter)


def test_the_last_attempt_of_a_step_counts() -> None:
    again = task(*WHOLE.steps, step("r", "1", kind="model", output=raw(7), attempt=1, ended=9.0))
    assert first_difference(WHOLE, again) is not None
    back = task(*again.steps, step("r", "1", kind="model", output=raw(1), attempt=2, ended=10.0))
    assert first_difference(WHOLE, back) is None


def test_a_fork_that_has_replaced_a_result_differs_by_it() -> None:
    """Its row does not know what was called."""
    begun, rest = WHOLE.steps[:1], [each for each in WHOLE.steps if each.step != "1" or each.run != "r"]
    for result, differs in ((1, False), (7, True)):
        fork = step("r", "0.0", kind="fork", input=raw({"task": "t", "step": "1", "result": result}))
        found = first_difference(WHOLE, task(*rest, fork, inherited=begun))
        assert (found is not None) is differs
        if found is not None:
            assert (found.run, found.step, found.members) == ("r", "1", ("output",))


def test_an_exported_step_is_one_line_with_its_task() -> None:
    pretty = step("r", "1", kind="model", input=msgspec.Raw(b'{\n "a":\r\n 1}'), output=NOTHING, usage={"n": 1.0})
    end = TaskEnd("t", "completed", "writer", 1, 1.0, 2.0, session="s")
    line = ENCODER.encode(exported("weft", StoredStep("t", end, pretty)))
    assert b"\n" not in line
    assert b"\r" not in line
    found = json.loads(line)
    assert (found["agent"], found["session"], found["task_ended"]) == ("writer", "s", 2.0)
    assert (found["input"], found["output"], found["usage"]) == ({"a": 1}, None, {"n": 1.0})
    running = exported("weft", StoredStep("t", None, pretty))
    assert (running.agent, running.task_status, running.task_created) == (None, None, None)
