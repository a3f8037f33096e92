"""What a client is told of a task: how it ended, what its stream says, what the broker holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from runtime_core.errors import WeftError

ENDED = ("completed", "failed", "cancelled")


class TaskFailed(WeftError):
    """A task that ended `failed` or `cancelled`, raised by `TaskResponse.value()`."""


@dataclass(frozen=True, slots=True)
class TaskResponse:
    """How a task ended."""

    task_id: str
    status: str
    """`completed`, `failed` or `cancelled`."""
    output: Any = None  # Any: the agent's own result, from JSON
    error: dict[str, str] | None = None
    """`type` and `message`, where it did not complete."""
    usage: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    trajectory: str = ""

    def value(self) -> Any:  # Any: as output
        """The output. Raises TaskFailed where there is none."""
        if self.status != "completed":
            error = self.error or {}
            raise TaskFailed(f"task {self.task_id} {self.status}: {error.get('type', '')}: {error.get('message', '')}")
        return self.output


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a task's stream. `entry_id` is where a later `stream(after=…)` goes on."""

    entry_id: str
    type: str
    data: dict[str, Any]  # Any: JSON, as docs/wire.md describes it per type

    @property
    def text(self) -> str:
        """The text of a delta, else empty."""
        return cast(str, self.data.get("text", ""))


def response_of(final: bytes) -> TaskResponse:
    """The final event's data as a value."""
    data = msgspec.json.decode(final)
    return TaskResponse(
        data["task_id"],
        data["status"],
        data.get("output"),
        data.get("error"),
        data.get("usage") or {},
        data.get("steps", 0),
        data.get("trajectory", ""),
    )


def stream_event(entry: bytes, fields: Sequence[bytes]) -> StreamEvent:
    """An entry of a task's stream as a value."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return StreamEvent(entry.decode(), named[b"type"].decode(), msgspec.json.decode(named[b"data"]))


_KINDS = {"t": "tool", "a": "agent", "r": "ray", "s": "spark", "i": "timer", "h": "human"}


def shown(task: str, raw: dict[bytes, bytes]) -> dict[str, Any]:  # Any: JSON
    """A task's hash in words."""
    head = raw.get(b"h", b"").decode().split("\n") + [""] * 10
    view: dict[str, Any] = {
        "task_id": task,
        "status": raw[b"status"].decode(),
        "agent": head[1],
        "created": int(head[4] or 0),
        "steps": int(raw.get(b"steps", b"0")),
    }
    if head[2]:
        view["key"] = head[2]
    if head[9]:
        view["session_id"] = head[9]
    if b"ended" in raw:
        view["ended"] = int(raw[b"ended"])
    if b"d" in raw:
        view["input"] = msgspec.json.decode(raw[b"d"])
    if b"out" in raw:
        final = msgspec.json.decode(raw[b"out"])
        view.update({name: final[name] for name in ("output", "error", "usage", "steps") if name in final})
    waits = [
        {"step": name[2:].decode(), "kind": _KINDS.get(chr(value[8]), "?")}
        for name, value in raw.items()
        if name.startswith(b"m:")
    ]
    if waits:
        view["waits_for"] = sorted(waits, key=lambda wait: wait["step"])
    questions = [
        msgspec.json.decode(value[13:])
        for name, value in raw.items()
        if name.startswith(b"q:") and b"m:" + name[2:] in raw
    ]
    if questions:
        view["questions"] = questions
    return view
