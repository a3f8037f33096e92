"""What Weft sends to clients: facts as envelopes, and how a client reads them. Requests are in `commands.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import msgspec

from runtime_core.errors import InvalidInput, Rejected, WeftError
from runtime_core.wire.codec import quoted
from runtime_core.wire.envelope import Envelope, rfc3339
from runtime_core.wire.ids import RunField, RunHeader, event_id, fingerprint
from runtime_core.wire.step import ENDED, USAGE_BY_MODEL, Status

ACCEPTED = "weft.task.accepted"
REJECTED = "weft.task.rejected"
COMPLETED = "weft.task.completed"
FAILED = "weft.task.failed"
CANCELLED = "weft.task.cancelled"
OUTPUT_DELTA = "weft.output.delta"
HUMAN_REQUESTED = "weft.human.requested"
STEP_RECORDED = "weft.step.recorded"

FACT_SOURCE = "weft"
"""The source of every fact."""
STEP_KINDS = {
    "t": "tool",
    "a": "agent",
    "r": "ray",
    "s": "spark",
    "i": "timer",
    "h": "human",
    "m": "receive",
    "k": "acquire",
}
_STATUSES = {
    "success": Status.COMPLETED,
    "finished": Status.COMPLETED,
    "timeout": Status.FAILED,
    "interrupted": Status.CANCELLED,
}
"""The status of an ended task in other runtimes → its status in Weft."""


class _Request(msgspec.Struct, frozen=True):
    """The part of a question's data that its event id derives from."""

    request_id: str


def accepted(task_id: str, *, at_ms: float, cause: str = "", trace: str = "") -> Envelope:
    """Return a `weft.task.accepted`: the task will be handled, and is as durable as WEFT_DURABILITY says."""
    return _fact(ACCEPTED, event_id(task_id, "accepted"), {"task_id": task_id}, at_ms, task_id, cause, trace=trace)


def rejected(entry_id: str, error: InvalidInput, *, at_ms: float, task_id: str = "", cause: str = "") -> Envelope:
    """Return a `weft.task.rejected`: the command on ingress entry `entry_id` starts or changes nothing.

    `cause` is the command's event id, if it is readable. A Rejected also names its task and when to try again.
    """
    known = error if isinstance(error, Rejected) else None
    task_id = task_id or (known.task_id if known else "")
    data: dict[str, object] = {"task_id": task_id} if task_id else {}
    data |= {"field": error.field, "message": error.message}
    if known and known.retry_after_seconds is not None:
        data["retry_after_seconds"] = known.retry_after_seconds
    # A client may send a rejected submit again under the same id, so the entry distinguishes its rejections.
    id = event_id("rejected", fingerprint(entry_id, cause, error.field, error.message))
    return _fact(REJECTED, id, data, at_ms, task_id, cause)


def final(task_id: str, status: str, data: bytes, *, at_ms: float, cause: str = "", trace: str = "") -> Envelope:
    """Return the final event with data (JSON) that is already written. A task and a status give one id."""
    return _fact(
        f"weft.task.{status}", event_id(task_id, status), msgspec.Raw(data), at_ms, task_id, cause, trace=trace
    )


def question(task_id: str, data: bytes, *, at_ms: float, trace: str = "") -> Envelope:
    """Return a `weft.human.requested` with data (JSON) that is already written."""
    request = msgspec.json.decode(data, type=_Request).request_id
    id = event_id(task_id, "human", request)
    return _fact(HUMAN_REQUESTED, id, msgspec.Raw(data), at_ms, task_id, trace=trace)


def _fact(
    type: str,
    id: str,
    data: object,
    at_ms: float,
    task_id: str,
    cause: str = "",
    trace: str = "",
) -> Envelope:
    return Envelope(
        id=id,
        source=FACT_SOURCE,
        type=type,
        time=rfc3339(at_ms),
        taskid=task_id,
        causationid=cause,
        traceparent=trace,
        # The parts are JSON already or come from Weft, so they need no check.
        data=msgspec.json.encode(data),
    )


class StreamingMode(Enum):
    """Which events of a task a reader gets. Every mode includes the final event and questions to humans."""

    CORE = "core"
    """Steps of agents, tools, tasks and groups, as they are committed."""
    CHUNK = "chunk"
    """Pieces as they come: of a model's answer, of `ctx.emit(…, chunk=True)`, and the progress of calls."""
    OUTPUT = "output"
    """What a user reads: each `ctx.emit`, whole."""
    CHUNK_OUTPUT = "chunk_output"
    """Both of these."""
    ALL = "all"
    """Steps, pieces and output."""

    @property
    def steps(self) -> bool:
        """Whether the task has to stream its steps."""
        return self in (StreamingMode.CORE, StreamingMode.ALL)

    def shows(self, type: str, data: Mapping[str, Any]) -> bool:  # Any: JSON of the event
        """Return whether the mode includes an event of the stream."""
        if type == STEP_RECORDED:
            return self.steps
        if type == OUTPUT_DELTA and self is not StreamingMode.ALL:
            if data.get("restart"):
                return self is not StreamingMode.CORE
            piece = data.get("chunk") or data.get("progress")
            own = StreamingMode.CHUNK if piece else StreamingMode.OUTPUT
            return self in (own, StreamingMode.CHUNK_OUTPUT)
        return True


def streaming_mode(field: str, value: object) -> StreamingMode:
    """Return a mode by its value on the wire. Raises InvalidInput."""
    try:
        return StreamingMode(value)
    except ValueError:
        known = ", ".join(mode.value for mode in StreamingMode)
        raise InvalidInput(field, f"{quoted(value)} is not a streaming mode; choose from {known}") from None


class TaskFailed(WeftError):
    """The task failed or was cancelled; raised by `TaskResponse.value()`."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What the record of a task says; see the properties of TaskResponse."""

    trajectory: list[Any] = field(default_factory=list)  # Any: TrajectoryItem
    llm_calls: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    context: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    trace_id: str = ""


_NO_RECORD = TaskRecord()


@dataclass(frozen=True, slots=True, init=False)
class TaskResponse:
    """The outcome of a task. A runner may create one: `TaskResponse(task_id=…, content=…, status="success")`."""

    task_id: str
    status: str
    """`completed`, `failed` or `cancelled`."""
    output: Any  # Any: the agent's own result, from JSON
    error: dict[str, str] | None
    """`type` and `message`, if it did not complete."""
    usage: dict[str, float]
    """The usage of the whole task: names (`tokens`, `requests`, `cost`, …) to sums."""
    steps: int
    record: TaskRecord | None
    """What Runners have read from the task's record; None elsewhere."""
    models: dict[str, dict[str, float]]
    """The usage by model, as far as it was reported with a model's name."""
    time_cost: float
    """Seconds from submit to end, measured by the client; 0: not measured."""

    def __init__(
        self,
        task_id: str = "",
        status: str = "",
        output: Any = None,  # Any: see the field
        error: dict[str, str] | None = None,
        usage: dict[str, float] | None = None,
        steps: int = 0,
        record: TaskRecord | None = None,
        models: dict[str, dict[str, float]] | None = None,
        time_cost: float = 0.0,
        *,
        id: str = "",
        content: Any = None,  # Any: as output
        answer: Any = None,  # Any: as output
        msg: str = "",
        success: bool | None = None,
    ) -> None:
        """Accept the names of other runtimes too.

        `id` stands for `task_id`, `content` and `answer` for `output`, `msg` for the error's message. `status` may also
        be `success`, `finished`, `timeout` or `interrupted`. Without it, `success` or `error` determines the status.
        """
        if not status:
            status = Status.COMPLETED if success or (success is None and error is None and not msg) else Status.FAILED
        late = status == "timeout"
        status = _STATUSES.get(status, status)
        if status not in ENDED:
            raise InvalidInput("status", f"{status!r} is not one of {', '.join((*ENDED, *_STATUSES))}")
        given = output if output is not None else content if content is not None else answer
        if status != Status.COMPLETED and error is None:
            kind = "Cancelled" if status == Status.CANCELLED else "TimeLimit" if late else "TaskFailed"
            error = {"type": kind, "message": msg or (given if isinstance(given, str) else "")}
        put = object.__setattr__
        put(self, "task_id", task_id or id)
        put(self, "status", status)
        put(self, "output", given)
        put(self, "error", error)
        put(self, "usage", usage or {})
        put(self, "steps", steps)
        put(self, "record", record)
        put(self, "models", models or {})
        put(self, "time_cost", time_cost)

    @property
    def id(self) -> str:
        """The task's id."""
        return self.task_id

    @property
    def trajectory(self) -> list[Any]:
        """The task's decisions, as TrajectoryItems. Runners read them from the record; empty elsewhere."""
        return (self.record or _NO_RECORD).trajectory

    @property
    def llm_calls(self) -> list[dict[str, Any]]:  # Any: JSON
        """The task's model calls in order: `agent`, `run_id`, `model`, `messages`, `content`, `tool_calls`, `usage`,
        `duration_ms` and `error`. Runners read them from the record; empty elsewhere."""
        return (self.record or _NO_RECORD).llm_calls

    @property
    def context(self) -> dict[str, Any]:  # Any: JSON
        """The values of the task's context at its end. Runners read them from the record; empty elsewhere."""
        return (self.record or _NO_RECORD).context

    @property
    def trace_id(self) -> str:
        """The trace of the task, 32 hexadecimal digits. Runners set it; empty elsewhere."""
        return (self.record or _NO_RECORD).trace_id

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
        return self.status == Status.COMPLETED

    @property
    def msg(self) -> str:
        """The error's message; empty if the task completed."""
        return (self.error or {}).get("message", "")

    def value(self) -> Any:  # Any: as output
        """Return the output. Raises TaskFailed if the task did not complete."""
        if self.status != Status.COMPLETED:
            error = self.error or {}
            raise TaskFailed(f"task {self.task_id} {self.status}: {error.get('type', '')}: {error.get('message', '')}")
        return self.output


Answerer = Callable[[str, Any], Awaitable[None]]
"""Answers the question with this id with a value (any JSON)."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a task's stream. Pass `entry_id` to `stream(after=…)` to continue after it."""

    entry_id: str
    type: str
    data: dict[str, Any]  # Any: JSON, as docs/wire.md describes it per type
    answerer: Answerer | None = field(default=None, repr=False, compare=False)
    """The way back to the task, if the event comes from a stream."""
    ended: TaskResponse | None = field(default=None, repr=False, compare=False)
    """The response of a final event, if Runners have completed it."""

    @property
    def text(self) -> str:
        """The text of a delta, else empty."""
        return cast(str, self.data.get("text", ""))

    @property
    def request_id(self) -> str:
        """The id of the question if this is one, else empty."""
        return cast(str, self.data.get("request_id", "")) if self.type == HUMAN_REQUESTED else ""

    async def answer(self, value: Any) -> None:  # Any: JSON
        """Answer the question of this event.

        Raises InvalidInput if the event is not a question, is not open, or expects another value.
        """
        if not self.request_id or self.answerer is None:
            raise InvalidInput("event", f"{self.type} is not a question: only {HUMAN_REQUESTED} events can be answered")
        await self.answerer(self.request_id, value)

    @property
    def response(self) -> TaskResponse | None:
        """The outcome of the task if this is its final event, else None."""
        if self.ended is not None:
            return self.ended
        return _response(self.data) if self.type.removeprefix("weft.task.") in ENDED else None


class TaskOutput:
    """Collects the output in the events of a task's stream.

        output = TaskOutput()
        async for event in task.stream(mode=StreamingMode.CHUNK):
            if output.add(event):
                show(output.text)

    It drops the pieces of an attempt when a higher one of the same run begins, and pieces that it has already, so you
    may add events of a stream that you read again. Progress reports are not output. It holds all pieces in memory, at
    most `WEFT_OUTPUT_MAX_BYTES` of a task.
    """

    __slots__ = ("_attempts", "_pieces", "_runs")

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        """The latest attempt by run."""
        self._pieces: dict[int, Any] = {}  # Any: JSON
        """By their number in the task."""
        self._runs: dict[str, list[int]] = {}
        """The numbers of each run's pieces."""

    def add(self, event: StreamEvent) -> bool:
        """Add an event of the stream. Return whether it has changed the output."""
        data = event.data
        if event.type != OUTPUT_DELTA or data.get("progress"):
            return False
        run, attempt, number = data["run_id"], data["attempt"], data["seq"]
        latest = self._attempts.setdefault(run, attempt)
        if attempt < latest:
            return False
        dropped = []
        if attempt > latest:
            self._attempts[run] = attempt
            dropped = self._runs.pop(run, [])
            for old in dropped:
                del self._pieces[old]
        if data.get("restart"):
            return bool(dropped)
        if number in self._pieces:
            return False
        self._pieces[number] = data["text"] if "text" in data else data["value"]
        self._runs.setdefault(run, []).append(number)
        return True

    @property
    def pieces(self) -> list[Any]:  # Any: JSON
        """All pieces, in the order of the stream."""
        return [self._pieces[number] for number in sorted(self._pieces)]

    @property
    def text(self) -> str:
        """The pieces that are text, one after the other."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))


def response_of(final: bytes) -> TaskResponse:
    """Return the data of a final event as a TaskResponse."""
    return _response(msgspec.json.decode(final))


def _response(data: dict[str, Any]) -> TaskResponse:  # Any: JSON
    usage = dict(data.get("usage") or {})
    models = usage.pop(USAGE_BY_MODEL, {})
    error = dict(data["error"]) if data.get("error") else None
    output = data.get("output") if error is None else error.pop("output", None)
    return TaskResponse(
        data["task_id"],
        data["status"],
        output,
        error,
        usage,
        data.get("steps", 0),
        models=models,
    )


def stream_event(entry: bytes, fields: Sequence[bytes], answerer: Answerer | None = None) -> StreamEvent:
    """Return an entry of a task's stream as a StreamEvent."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return StreamEvent(entry.decode(), named[b"type"].decode(), msgspec.json.decode(named[b"data"]), answerer)


def describe_task(task: str, raw: dict[bytes, bytes]) -> dict[str, Any]:  # Any: JSON
    """Return a task's hash on the broker as JSON for people."""
    header = RunHeader.of(raw)
    view: dict[str, Any] = {
        "task_id": task,
        "status": raw[b"status"].decode(),
        "agent": header.agent,
        "created": header.created_ms,
        "steps": int(raw.get(b"steps", b"0")),
    }
    if header.key:
        view["key"] = header.key
    if header.session:
        view["session_id"] = header.session
    if RunField.VERSION in raw:
        view["version"] = raw[RunField.VERSION].decode()
    if RunField.USAGE in raw:
        view["usage"] = msgspec.json.decode(raw[RunField.USAGE])
    if RunField.LIMITS in raw:
        view["limits"] = {f"max_{name}": limit for name, limit in msgspec.json.decode(raw[RunField.LIMITS]).items()}
    if b"ended" in raw:
        view["ended"] = int(raw[b"ended"])
    if RunField.INPUT in raw:
        view["input"] = msgspec.json.decode(raw[RunField.INPUT])
    if RunField.FINAL in raw:
        final = msgspec.json.decode(raw[RunField.FINAL])
        view.update({name: final[name] for name in ("output", "error", "usage", "steps") if name in final})
    if b"from" in raw:
        view["forked_from"] = msgspec.json.decode(raw[b"from"])
    waits = [
        {"step": name[2:].decode(), "kind": STEP_KINDS.get(chr(value[8]), "?")}
        for name, value in raw.items()
        if name.startswith(RunField.MISSING)
    ]
    if waits:
        view["waits_for"] = sorted(waits, key=lambda wait: wait["step"])
    questions = [
        msgspec.json.decode(value[13:])
        for name, value in raw.items()
        if name.startswith(b"q:") and RunField.MISSING + name[2:] in raw
    ]
    if questions:
        view["questions"] = questions
    return view
