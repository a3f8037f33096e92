"""The messages of tasks that were recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.aworld.events.message import Constants, Message, MessageQuestions, message_id
from runtime_core.record.step import Step, place
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import decoded

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore

_decode = msgspec.json.Decoder(dict[str, Any]).decode  # Any: JSON


class Recorded:
    """Where trajectories are kept: a store, and the namespace in it."""

    def __init__(self, store: TrajectoryStore, namespace: str = "weft") -> None:
        self.store = store
        self.namespace = namespace


class EventHistory(MessageQuestions):
    """Asks the trajectory store for messages, in the order of their emission; as many as there are."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    async def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        """Page by page; a task's in the order of emission."""
        held: list[tuple[str, Step]] = []
        store, namespace = self._recorded.store, self._recorded.namespace
        async for stored in store.steps(namespace, tasks=[task_id] if task_id else None, kind="message"):
            if held and held[0][0] != stored.task:
                for message in in_order(held):
                    yield message
                held = []
            held.append((stored.task, stored.step))
        for message in in_order(held):
            yield message


_CATEGORY = {"agent": Constants.AGENT, "tool": Constants.TOOL, "human": Constants.HUMAN, "emit": Constants.CHUNK}


def events_of(trajectory: TaskTrajectory) -> list[Message]:
    """A task's messages in the order of their emission; of a task that emitted none, made from its steps.

    Such a message has the step's input as its payload and, in its headers, the `status` and the `result` or `error`.
    """
    emitted = [(trajectory.task, step) for step in trajectory.steps if step.kind == "message"]
    if emitted:
        return in_order(emitted)
    steps = [step for step in trajectory.steps if step.kind in _CATEGORY and (step.run != "r" or step.step)]
    steps.sort(key=lambda step: (step.started, place(step.run, step.step)))
    return [_from_step(trajectory, step) for step in steps]


def _from_step(trajectory: TaskTrajectory, step: Step) -> Message:
    headers: dict[str, Any] = {"status": step.status}  # Any: JSON
    if step.error is not None:
        headers["error"] = {"type": step.error.type, "message": step.error.message}
    elif step.kind != "emit":
        headers["result"] = decoded(step.output)
    return Message.from_dict(
        {
            "category": _CATEGORY[step.kind],
            "payload": decoded(step.output if step.kind == "emit" else step.input),
            "receiver": step.name if step.kind in ("agent", "tool") else "",
            "headers": headers,
            "session_id": trajectory.end.session if trajectory.end is not None else "",
            "task_id": trajectory.task,
            "id": message_id(trajectory.task, step.run, step.step).rstrip("/"),
            "timestamp": step.started / 1000,
        }
    )


def in_order(rows: list[tuple[str, Step]]) -> list[Message]:
    """The messages of a task's rows: by run, the first to speak first, and each run's in the order of emission."""
    begun: dict[str, float] = {}
    for _, step in rows:
        begun[step.run] = min(begun.get(step.run, step.started), step.started)
    rows.sort(key=lambda row: (begun[row[1].run], place(row[1].run, row[1].step)))
    return [message_of(task, step) for task, step in rows]


def message_of(task: str, step: Step) -> Message:
    """The message that a row holds."""
    message = Message.from_dict(_decode(bytes(step.input)))
    return message.replace(id=message.id or message_id(task, step.run, step.step), task_id=task)
