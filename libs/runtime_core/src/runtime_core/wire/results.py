"""What a client gets of a task: how it ended, the events on its stream, and which of them a reader wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import msgspec

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.record.usage import MODELS

STEP_RECORDED = "weft.step.recorded"
_OUTPUT_DELTA = "weft.output.delta"


class StreamingMode(Enum):
    """A reader's choice. The final event and questions to humans are in every one of them."""

    CORE = "core"
    """Steps of agents, tools, tasks and groups, as they are committed."""
    CHUNK = "chunk"
    """Pieces of output as they come: what agents emit, and the progress of calls."""
    OUTPUT = "output"
    """What agents say (`ctx.emit`), without the progress of calls."""
    CHUNK_OUTPUT = "chunk_output"
    """All pieces of output."""
    ALL = "all"
    """Steps and all pieces of output."""

    @property
    def steps(self) -> bool:
        """Whether the task has to show its steps."""
        return self in (StreamingMode.CORE, StreamingMode.ALL)

    def shows(self, type: str, data: Mapping[str, Any]) -> bool:  # Any: JSON of the event
        """Whether an event of the stream is wanted."""
        if type == STEP_RECORDED:
            return self.steps
        if type == _OUTPUT_DELTA:
            return self is not StreamingMode.CORE and not (self is StreamingMode.OUTPUT and data.get("progress"))
        return True


def streaming_mode(field: str, value: object) -> StreamingMode:
    """A mode by its value, as the wire has it. Raises InvalidInput."""
    try:
        return StreamingMode(value)
    except ValueError:
        known = ", ".join(mode.value for mode in StreamingMode)
        raise InvalidInput(field, f"{quoted(value)} is no streaming mode; known are {known}") from None


ENDED = ("completed", "failed", "cancelled")


class TaskFailed(WeftError):
    """A task that ended `failed` or `cancelled`, raised by `TaskResponse.value()`."""


_STATUSES = {"success": "completed", "finished": "completed", "timeout": "failed", "interrupted": "cancelled"}
"""What other runtimes call an end → what it is called here."""


@dataclass(frozen=True, slots=True, init=False)
class TaskResponse:
    """How a task ended. A runner makes one to say so: `TaskResponse(task_id=…, content=…, status="success")`."""

    task_id: str
    status: str
    """`completed`, `failed` or `cancelled`."""
    output: Any  # Any: the agent's own result, from JSON
    error: dict[str, str] | None
    """`type` and `message`, where it did not complete."""
    usage: dict[str, float]
    """What the whole task has used: names (`tokens`, `requests`, `cost`, …) to sums."""
    steps: int
    trajectory: str
    models: dict[str, dict[str, float]]
    """The same by model, for what was spent with a model's name."""
    time_cost: float
    """Seconds from submit to end as its client saw them; 0: not measured."""

    def __init__(
        self,
        task_id: str = "",
        status: str = "",
        output: Any = None,  # Any: see the field
        error: dict[str, str] | None = None,
        usage: dict[str, float] | None = None,
        steps: int = 0,
        trajectory: str = "",
        models: dict[str, dict[str, float]] | None = None,
        time_cost: float = 0.0,
        *,
        id: str = "",
        content: Any = None,  # Any: as output
        answer: Any = None,  # Any: as output
        msg: str = "",
        success: bool | None = None,
    ) -> None:
        """`id` is `task_id`; `content` and `answer` are `output`; `msg` is the error's message; `success` the status.

        `status` may also be `success`, `finished`, `timeout` or `interrupted`; with none, `success` or `error` says it.
        """
        if not status:
            status = "completed" if success or (success is None and error is None and not msg) else "failed"
        status = _STATUSES.get(status, status)
        if status not in ENDED:
            raise InvalidInput("status", f"{status!r} is not one of {', '.join((*ENDED, *_STATUSES))}")
        given = next((value for value in (output, content, answer) if value is not None), None)
        if status != "completed" and error is None:
            kind = "Cancelled" if status == "cancelled" else "TaskFailed"
            error = {"type": kind, "message": msg or (given if isinstance(given, str) else "")}
        values = (task_id or id, status, given, error, usage or {}, steps, trajectory, models or {}, time_cost)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def id(self) -> str:
        """The task's id."""
        return self.task_id

    @property
    def answer(self) -> Any:  # Any: as output
        """The output."""
        return self.output

    @property
    def content(self) -> Any:  # Any: as output
        """The output."""
        return self.output

    @property
    def success(self) -> bool:
        """Whether it completed."""
        return self.status == "completed"

    @property
    def msg(self) -> str:
        """The error's message; empty where it completed."""
        return (self.error or {}).get("message", "")

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

    @property
    def response(self) -> TaskResponse | None:
        """How the task ended, where this is its final event; else None."""
        return _response(self.data) if self.type.removeprefix("weft.task.") in ENDED else None


def response_of(final: bytes) -> TaskResponse:
    """The final event's data as a value."""
    return _response(msgspec.json.decode(final))


def _response(data: dict[str, Any]) -> TaskResponse:  # Any: JSON
    usage = dict(data.get("usage") or {})
    models = usage.pop(MODELS, {})
    return TaskResponse(
        data["task_id"],
        data["status"],
        data.get("output"),
        data.get("error"),
        usage,
        data.get("steps", 0),
        data.get("trajectory", ""),
        models,
    )


def stream_event(entry: bytes, fields: Sequence[bytes]) -> StreamEvent:
    """An entry of a task's stream as a value."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return StreamEvent(entry.decode(), named[b"type"].decode(), msgspec.json.decode(named[b"data"]))


STEP_KINDS = {"t": "tool", "a": "agent", "r": "ray", "s": "spark", "i": "timer", "h": "human"}


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
    if b"us" in raw:
        view["usage"] = msgspec.json.decode(raw[b"us"])
    if b"lim" in raw:
        view["limits"] = {f"max_{name}": limit for name, limit in msgspec.json.decode(raw[b"lim"]).items()}
    if b"ended" in raw:
        view["ended"] = int(raw[b"ended"])
    if b"d" in raw:
        view["input"] = msgspec.json.decode(raw[b"d"])
    if b"out" in raw:
        final = msgspec.json.decode(raw[b"out"])
        view.update({name: final[name] for name in ("output", "error", "usage", "steps") if name in final})
    if b"from" in raw:
        view["forked_from"] = msgspec.json.decode(raw[b"from"])
    waits = [
        {"step": name[2:].decode(), "kind": STEP_KINDS.get(chr(value[8]), "?")}
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
