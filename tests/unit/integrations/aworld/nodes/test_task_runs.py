"""Recorded runs, calls and questions of a task as nodes."""

from __future__ import annotations

import json

import msgspec

from runtime_core.integrations.aworld.nodes.store import HandleResult, RunNode, RunNodeBusiType, RunNodeStatus
from runtime_core.integrations.aworld.nodes.task_runs import (
    _finished,
    _open_steps,
    ended_node,
    in_order,
    recorded_nodes,
)
from runtime_core.runs.journal import pack
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.step import RESULT_ERROR, RESULT_OK, Step, StepFailure, TaskEnd

END = TaskEnd("t", "completed", "lead", 3, 1_000.0, 9_000.0, session="s")


def step(run: str, path: str = "", kind: str = "agent", **changes: object) -> Step:
    plain = Step(run=run, step=path, kind=kind, name="x", status="completed", started=2_000.0, ended=3_000.0)
    return msgspec.structs.replace(plain, **changes)


def nodes(*steps: Step, end: TaskEnd | None = END) -> dict[str, RunNode]:
    return {node.node_id: node for node in recorded_nodes(TaskTrajectory("weft", "t", end, list(steps)))}


def test_steps_that_are_work_are_nodes_below_their_runs() -> None:
    found = nodes(step("r"), step("r/2", kind="tool"), step("r", "3", kind="human"), step("r", "4", kind="timer"))
    assert {node_id: (node.busi_type.value, node.parent_node_id) for node_id, node in found.items()} == {
        "t/r": ("AGENT", ""),
        "t/r/2": ("TOOL", "t/r"),
        "t/r/3": ("HUMAN", "t/r"),
    }
    assert {(node.task_id, node.session_id, node.create_time) for node in found.values()} == {("t", "s", 2.0)}


def test_the_last_attempt_of_a_call_counts() -> None:
    failed = step("r/2", kind="tool", status="failed", error=StepFailure("OSError", "gone"))
    again = step("r/2", kind="tool", attempt=2, key="k", output=msgspec.Raw(b'"found"'))
    [node] = (node for node in nodes(failed, again).values() if node.node_id == "t/r/2")
    assert (node.status, node.metadata) == (RunNodeStatus.SUCCESS, {"key": "k", "attempts": 2})
    assert node.results == [HandleResult("x", RunNodeStatus.SUCCESS, "", "found")]
    only = nodes(failed)["t/r/2"]
    assert (only.status, only.result_msg) == (RunNodeStatus.FAILED, "OSError: gone")


def test_a_limit_that_has_passed_is_a_timeout() -> None:
    late = step("r", "3", kind="human", status="failed", error=StepFailure("HumanTimeout", "late"))
    assert nodes(late)["t/r/3"].status is RunNodeStatus.TIMEOUT


def test_a_task_without_a_row_of_its_own_has_a_root() -> None:
    """One that was cancelled, or that ended another way than its run."""
    over = msgspec.structs.replace(END, status="failed", error=StepFailure("TimeLimit", "over"))
    for found in (nodes(end=over), nodes(step("r"), end=over)):
        assert (found["t/r"].status, found["t/r"].result_msg) == (RunNodeStatus.TIMEOUT, "TimeLimit: over")
    assert ended_node(END).end_time == 9.0
    assert nodes(end=None) == {}


def test_open_calls_and_questions_are_nodes() -> None:
    question = b"1700000000000" + json.dumps({"prompt": "ok?"}).encode()
    fields = {"h": b"agent\nlead\n\n\n1600000000000", "m:1": b"0badf00dt", "m:2": b"0badf00dh", "q:2": question}
    fields |= {"m:3": b"0badf00ds", "m:4": b"0badf00di"}
    found = {node.node_id: node for node in _open_steps("t", "r", fields, "s")}
    assert list(found) == ["t/r/1", "t/r/2", "t/r/3"], "a sleep is none"
    assert (found["t/r/1"].status, found["t/r/1"].create_time) == (RunNodeStatus.RUNNING, 1_600_000_000.0)
    assert (found["t/r/2"].status, found["t/r/2"].create_time) == (RunNodeStatus.BREAKED, 1_700_000_000.0)
    assert found["t/r/2"].metadata == {"question": {"prompt": "ok?"}}
    assert found["t/r/3"].metadata == {"engine": "spark"}


def test_a_run_that_has_ended_is_read_from_its_callers_journal() -> None:
    good = _finished("t", "r/2", "s", pack("0badf00d", RESULT_OK, 5_000, b'"out"'))
    assert (good.status, good.parent_node_id, good.end_time) == (RunNodeStatus.SUCCESS, "t/r", 5.0)
    assert good.results[0].result == "out"
    bad = _finished("t", "r/2", "s", pack("0badf00d", RESULT_ERROR, 5_000, b'{"type":"E","message":"no"}'))
    assert (bad.status, bad.result_msg, bad.results[0].result) == (RunNodeStatus.FAILED, "E: no", None)


def test_a_run_comes_before_those_that_it_has_started() -> None:
    made = [RunNode(node_id=node_id, busi_type=RunNodeBusiType.AGENT) for node_id in ("t/r/2", "t/r")]
    assert [node.node_id for node in sorted(made, key=in_order)] == ["t/r", "t/r/2"]
