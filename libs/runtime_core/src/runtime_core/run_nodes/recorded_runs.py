"""Recorded steps of tasks as nodes: what has ended, also after the broker has forgotten it."""

from __future__ import annotations

import msgspec

from runtime_core.identifiers import child_run, idempotency_key
from runtime_core.run_nodes.node import HandleResult, RunNode, RunNodeBusiType, RunNodeStatus
from runtime_core.trajectory.recorded import TaskTrajectory
from runtime_core.trajectory.steps import Step, TaskEnd

_KINDS = {
    "agent": RunNodeBusiType.AGENT,
    "tool": RunNodeBusiType.TOOL,
    "engine": RunNodeBusiType.TOOL,
    "human": RunNodeBusiType.HUMAN,
}
"""The kinds of steps that are nodes; the others (sleeps, deltas, local steps) are not."""


def recorded_nodes(recorded: TaskTrajectory) -> list[RunNode]:
    """The runs, calls and questions of a task. Of several attempts the last one counts."""
    found: dict[str, RunNode] = {}
    for step in recorded.steps:
        if step.kind in _KINDS:
            node = _node(recorded.task, step, recorded.end)
            found[node.node_id] = node
    if recorded.end is not None:
        root = idempotency_key(recorded.task, "r")
        # The end of a task that was cancelled or timed out has no row of a run.
        found.setdefault(root, ended_node(recorded.end))
        if recorded.end.status != "completed":
            found[root] = msgspec.structs.replace(
                found[root], status=_status(recorded.end.status, _type(recorded.end)), result_msg=_message(recorded.end)
            )
    return list(found.values())


def ended_node(end: TaskEnd) -> RunNode:
    """A task's first run, by what is recorded of the task's end."""
    return RunNode(
        node_id=idempotency_key(end.task, "r"),
        busi_type=RunNodeBusiType.AGENT,
        busi_id=end.agent,
        task_id=end.task,
        session_id=end.session,
        status=_status(end.status, _type(end)),
        result_msg=_message(end),
        create_time=end.created / 1000,
        end_time=end.ended / 1000,
    )


def _node(task: str, step: Step, end: TaskEnd | None) -> RunNode:
    run = child_run(step.run, step.step) if step.step else step.run
    above = run.rpartition("/")[0]
    status = _status(step.status, step.error.type if step.error else "")
    message = f"{step.error.type}: {step.error.message}" if step.error else ""
    output = msgspec.json.decode(step.output) if bytes(step.output) else None
    metadata: dict[str, object] = {"key": step.key} if step.key else {}
    if step.attempt > 1:
        metadata["attempts"] = step.attempt
    return RunNode(
        node_id=idempotency_key(task, run),
        busi_type=_KINDS[step.kind],
        busi_id=step.name,
        task_id=task,
        session_id=end.session if end else "",
        parent_node_id=idempotency_key(task, above) if above else "",
        status=status,
        result_msg=message,
        results=[HandleResult(step.name, status, message, output)],
        create_time=step.started / 1000,
        execute_time=step.started / 1000,
        end_time=step.ended / 1000,
        metadata=metadata,
    )


def _status(status: str, error: str) -> RunNodeStatus:
    if status == "completed":
        return RunNodeStatus.SUCCESS
    return RunNodeStatus.TIMEOUT if error in ("TimeLimit", "HumanTimeout") else RunNodeStatus.FAILED


def _type(end: TaskEnd) -> str:
    return end.error.type if end.error else ""


def _message(end: TaskEnd) -> str:
    return f"{end.error.type}: {end.error.message}" if end.error else ""
