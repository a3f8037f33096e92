"""The run tree of a task."""

from __future__ import annotations

import json

import msgspec

from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import last_failure, render, to_tree
from runtime_core.wire.step import Fork, Step, StepFailure, TaskEnd


def step(
    run: str, path: str = "", kind: str = "tool", name: str = "search", took: float = 1.0, **changes: object
) -> Step:
    plain = Step(run=run, step=path, kind=kind, name=name, status="completed", started=100.0, ended=100.0 + took)
    return msgspec.structs.replace(plain, **changes)


def trajectory(*steps: Step, end: TaskEnd | None = None) -> TaskTrajectory:
    return TaskTrajectory("weft", "t-1", end, list(steps))


def ended(steps: int, status: str = "completed", error: StepFailure | None = None, session: str = "") -> TaskEnd:
    return TaskEnd("t-1", status, "researcher", steps, created=100.0, ended=3_520.0, error=error, session=session)


RESEARCH = trajectory(
    step("r", kind="agent", name="researcher", took=3_400, input=msgspec.Raw(b'"Redis  Streams"')),
    step("r", "1", kind="model", name="small", took=812.35, output=msgspec.Raw(b'{ "plan":\n ["a", "b"] }')),
    step("r", "10", kind="emit", name="emit"),
    step(
        "r/2.0",
        attempt=2,
        took=12.34,
        input=msgspec.Raw(b'{"query":"a"}'),
        errors=[StepFailure("OSError", "first try")],
    ),
    step("r/2.1", status="failed", error=StepFailure("ValueError", "no such\nsecond line")),
    step("r/3", kind="agent", name="writer", key="7", took=90_000),
    step("r/3", "1", kind="step", name="count"),
    step("r/3/2", kind="engine", name="rank"),
    end=ended(8, session="s-1"),
)


def test_a_run_has_the_time_of_all_its_attempts() -> None:
    run = step("r", kind="agent", name="writer", took=6_690, attempt=5, errors=[StepFailure("OSError", "first")])
    assert "agent writer  completed  5 attempts in 6.69 s" in render(trajectory(run, end=ended(1)))


def test_a_tree_shows_runs_below_their_callers() -> None:
    assert render(RESEARCH).splitlines() == [
        "task t-1  researcher  completed  session s-1",
        '└─ ◆ agent researcher  completed  3.40 s  "Redis  Streams"',
        '   ├─ ○ model small  step 1  completed  812.4 ms  {"plan":["a","b"]}',
        "   ├─ ▸ tool search  step 2.0  completed  2 attempts, the last one 12.3 ms  ✗ attempt 1: OSError: first try"
        '  {"query":"a"}',
        "   ├─ ▸ tool search  step 2.1  failed  1.0 ms  ✗ ValueError: no such",
        "   ├─ ◆ agent writer/7  step 3  completed  1 min 30 s",
        "   │  ├─ · step count  step 3/1  completed  1.0 ms",
        "   │  └─ ▲ engine rank  step 3/2  completed  1.0 ms",
        "   └─ » emit  step 10  completed  1.0 ms",
        "completed in 3.42 s: 8 steps (2 agent, 2 tool, 1 model, 1 emit, 1 step, 1 engine)",
    ]


def test_the_output_counts_missing_steps() -> None:
    lines = render(trajectory(step("r"), end=ended(3))).splitlines()
    assert lines[-1] == "not complete: 1 of 3 steps are recorded"


def test_the_output_shows_that_a_task_has_not_ended() -> None:
    lines = render(trajectory(step("r", took=20))).splitlines()
    assert lines[0] == "task t-1"
    assert lines[-2:] == [
        "20.0 ms so far: 1 step (1 tool)",
        "not complete: the task is still running, or its last steps are not recorded yet",
    ]


def test_a_failed_task_shows_its_error() -> None:
    failed = ended(1, "failed", StepFailure("ValueError", "no\nmore"))
    assert "failed in 3.42 s with ValueError: no: 1 step" in render(trajectory(step("r"), end=failed))


def test_a_run_that_is_not_recorded_keeps_its_place() -> None:
    lines = render(trajectory(step("r"), step("r/1/2/3"), step("r/1/4", "1"))).splitlines()
    assert lines[1:-2] == [
        "└─ ▸ tool search  completed  1.0 ms",
        "   └─ - run r/1  still running, or not recorded yet",
        "      ├─ - run r/1/2  still running, or not recorded yet",
        "      │  └─ ▸ tool search  step 1/2/3  completed  1.0 ms",
        "      └─ - run r/1/4  still running, or not recorded yet",
        "         └─ ▸ tool search  step 1/4/1  completed  1.0 ms",
    ]


def test_attempts_of_a_step_share_a_line_with_the_last_result() -> None:
    first = step("r", "1", status="failed", error=StepFailure("OSError", "first"))
    found = trajectory(step("r"), first, step("r", "1", attempt=2))
    assert [line for line in render(found).splitlines() if "2 attempts" in line] == [
        "   └─ ▸ tool search  step 1  completed  2 attempts, the last one 1.0 ms  ✗ attempt 1: OSError: first"
    ]
    (root,) = to_tree(found)["runs"]
    assert [error["message"] for error in root["children"][0]["errors"]] == ["first"]


def test_a_redriven_step_shows_its_success_after_its_failures() -> None:
    down = [StepFailure("OSError", f"down {number}", "raise OSError", at=number) for number in (1, 2, 3)]
    failed = step("r", "1", attempt=3, status="failed", error=down[2], errors=down[:2])
    found = trajectory(step("r", kind="agent", name="desk"), failed, step("r", "1", took=9.0))
    (line,) = (line for line in render(found).splitlines() if "▸" in line)
    assert line.startswith(
        "   └─ ▸ tool search  step 1  completed  4 attempts, the last one 9.0 ms  ✗ attempt 1: OSError: down 1"
    )
    assert last_failure(found) is None
    (root,) = to_tree(found)["runs"]
    assert root["children"][0]["failed_at"] == [failed.ended]
    (root,) = to_tree(found)["runs"]
    (child,) = root["children"]
    assert (child["status"], child["attempts"], len(child["errors"])) == ("completed", 4, 3)


def test_the_last_failure_is_that_of_the_step_which_failed_its_run() -> None:
    call = step("r/1/2", kind="tool", status="failed", error=StepFailure("ValueError", "no room", "in tool", at=1))
    child = step("r/1", kind="agent", status="failed", error=StepFailure("ToolError", "2: no room", "in child", at=2))
    own = step("r", kind="agent", status="failed", error=StepFailure("AgentError", "1: 2: no room", "in agent", at=3))
    assert last_failure(trajectory(own, child, call)) == (call, call.error)
    other = step("r", kind="agent", status="failed", error=StepFailure("KeyError", "'x'", "in agent", at=3))
    assert last_failure(trajectory(other, child, call)) == (other, other.error)


def test_recorded_text_cannot_drive_the_terminal() -> None:
    evil = step(
        "r",
        name="\x1b[2J",
        input=msgspec.Raw(b'"\\u001b]0;title\\u0007"'),
        output=msgspec.Raw(b'"\xc2\x9b2J' + b"x" * 9_000 + b'"'),
        error=StepFailure("E\r", "\x1b[31m"),
    )
    text = render(trajectory(evil))
    assert text.replace("\n", "").isprintable()


def test_long_inputs_are_cut() -> None:
    (_, line, *_rest) = render(trajectory(step("r", input=msgspec.Raw(b'"' + b"x" * 100_000 + b'"')))).splitlines()
    assert line.endswith("xxx…")
    assert len(line) < 120


def test_the_dicts_are_plain_json_with_decoded_values() -> None:
    tree = json.loads(json.dumps(to_tree(RESEARCH)))
    assert (tree["task"], tree["complete"], tree["expected_steps"], tree["status"]) == ("t-1", True, 8, "completed")
    (root,) = tree["runs"]
    assert root["input"] == "Redis  Streams"
    assert [(child["run"], child["step"]) for child in root["children"]] == [
        ("r", "1"),
        ("r/2.0", ""),
        ("r/2.1", ""),
        ("r/3", ""),
        ("r", "10"),
    ]
    assert root["children"][0]["output"] == {"plan": ["a", "b"]}
    assert root["children"][1]["attempts"] == 2
    assert root["children"][2]["error"]["type"] == "ValueError"
    assert to_tree(trajectory(step("r/1")))["runs"][0]["recorded"] is False


def test_runs_may_nest_deeper_than_python_s_calls() -> None:
    runs = ["r" + "/1" * depth for depth in range(480)]
    nested = trajectory(*(step(run) for run in runs))
    assert render(nested).count("search") == len(runs)
    depth, nodes = 0, to_tree(nested)["runs"]
    while nodes:
        depth, nodes = depth + 1, nodes[0]["children"]
    assert depth == len(runs)


def test_a_fork_names_its_origin_and_shows_its_inherited_steps() -> None:
    own = step("r", "3", name="own")
    forked = TaskTrajectory("weft", "f", None, [step("r"), own], Fork("t", "3"), [step("r", "1", name="theirs")])
    tree = to_tree(forked)
    assert tree["fork"] == {"task": "t", "step": "3", "inherited": 1}
    assert [child["name"] for child in tree["runs"][0]["children"]] == ["theirs", "own"]
    assert render(forked).splitlines()[1] == "fork of t at step 3, with 1 step of its trajectory"
    again = TaskTrajectory("weft", "f", None, [], Fork("t"))
    assert render(again).splitlines()[1] == "fork of t at its beginning"
    assert to_tree(trajectory(step("r")))["fork"] is None
