"""Messages of an event-driven run: categories, fields and outcome, and queries over running and recorded ones."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from runtime_core.errors import InvalidInput, LimitExceeded, StepError, TaskCancelled
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import decoded
from runtime_core.wire.codec import quoted
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import Status, Step, place

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore


class Constants:
    """Categories, which select the handler of a message. You may use any other text as your own category."""

    AGENT = "agent"
    TOOL = "tool"
    TASK = "task"
    PLAN = "plan"
    OUTPUT = "output"
    TOOL_CALLBACK = "tool_callback"
    AGENT_CALLBACK = "agent_callback"
    GROUP = "group"
    HUMAN = "human"
    HUMAN_RESPONSE = "human_response"
    MEMORY = "memory"
    CONTEXT = "context"
    CONTEXT_RESPONSE = "context_response"
    CHUNK = "chunk"
    BACKGROUND_TASK = "background_task"


class TopicType:
    """Topics, which tell the handler what to do. You may use any other text as your own topic."""

    START = "__start"
    FINISHED = "__finished"
    OUTPUT = "__output"
    ERROR = "__error"
    RERUN = "__rerun"
    HUMAN_CONFIRM = "__human_confirm"
    CANCEL = "__cancel"
    INTERRUPT = "__interrupt"
    SUBSCRIBE_TOOL = "__subscribe_tool"
    SUBSCRIBE_AGENT = "__subscribe_agent"
    GROUP_ACTIONS = "__group_actions"
    GROUP_RESULTS = "__group_results"
    AGENT_RESULT = "__agent_result"
    SYSTEM_PROMPT = "__system_prompt"
    TOOL_RESULT = "__tool_result"
    TASK_RESPONSE = "__task_response"
    BACKGROUND_TOOL_COMPLETE = "__background_tool_complete"
    BACKGROUND_TASK_COMPLETE = "__background_task_complete"
    PEER_BROADCAST = "__peer_broadcast"


class Priority:
    """Lower numbers are handled first; equal ones in the order of emission."""

    ERROR = -10
    CANCEL = -5
    MEMORY = -2
    HUMAN = -1
    NORMAL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `id`, `task_id`, `session_id` and `timestamp` are set when it is emitted.

    `category` selects the handler, and `topic` tells it what to do. `caller` is the agent that waits for the result.
    `id` is `<task>/<run>/<step>`, the same at each replay of the run.
    """

    category: str = Constants.TASK
    payload: Any = None  # Any: JSON of the sender's choice
    sender: str = ""
    receiver: str = ""
    caller: str = ""
    topic: str = ""
    priority: int = Priority.NORMAL
    """Lower numbers are handled first."""
    headers: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    session_id: str = ""
    task_id: str = ""
    id: str = ""
    timestamp: float = 0.0
    """Epoch seconds: the run's own time when it emitted the message."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the category, the payload and all fields that are set."""
        written: dict[str, Any] = {"category": self.category}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            if value or part.name == "payload":
                written[part.name] = value
        return written

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:  # Any: JSON
        """Return the message that `to_dict` wrote, in the class of its category. Raises InvalidInput (`message…`)."""
        kind = _class_of(data)
        known = {part.name for part in dataclasses.fields(kind)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise InvalidInput(
                f"message.{unknown[0]}", f"is not a field of {kind.__name__}; choose from {', '.join(sorted(known))}"
            )
        return kind(**data)._checked()

    @staticmethod
    def is_message(value: object) -> bool:
        """Whether JSON is a message: an object with `category`, `payload` and only fields of messages."""
        if not isinstance(value, Mapping) or not isinstance(value.get("category"), str) or "payload" not in value:
            return False
        return set(value) <= {part.name for part in dataclasses.fields(_class_of(value))}

    def replace(self, **changes: Any) -> Self:  # Any: values of fields
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)

    def _checked(self) -> Self:
        for name in ("category", "sender", "receiver", "caller", "topic", "session_id", "task_id", "id"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"message.{name}", f"{quoted(getattr(self, name))} is not text")
        if not self.category:
            raise InvalidInput("message.category", "is empty: use one of Constants, or your own text")
        if not isinstance(self.priority, int):
            raise InvalidInput("message.priority", f"{quoted(self.priority)} is not a whole number")
        if not isinstance(self.headers, Mapping):
            raise InvalidInput("message.headers", f"{quoted(self.headers)} is not an object")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMessage(Message):
    """Calls the agent `receiver`; `headers["key"]` names its instance."""

    category: str = Constants.AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMessage(Message):
    """Calls the tool `receiver` with the payload as arguments, or a list of `{"tool", "arguments"}`."""

    category: str = Constants.TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage(Message):
    """A message about the task itself. `topic` says what: it is finished, failed, cancelled, or has an output."""

    category: str = Constants.TASK


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMessage(TaskMessage):
    """Cancels the task ahead of other waiting messages; the payload is the reason."""

    topic: str = TopicType.CANCEL
    priority: int = Priority.CANCEL


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMessage(Message):
    """Calls several agents and tools concurrently: a list of messages. The results arrive together, in order."""

    category: str = Constants.GROUP
    topic: str = TopicType.GROUP_ACTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanMessage(Message):
    """Asks a human: the payload is the prompt, or `{"prompt", "data", "timeout", "default"}`."""

    category: str = Constants.HUMAN
    topic: str = TopicType.HUMAN_CONFIRM
    priority: int = Priority.HUMAN


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEventMessage(Message):
    """Adds the payload to the memory of `agent`."""

    category: str = Constants.MEMORY
    priority: int = Priority.MEMORY
    agent: str = ""
    memory_event_type: str = "message"
    """The kind of memory, such as `system`, `human`, `ai`, `tool` or `summary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMessage(Message):
    """Adds the members of the payload (an object) to the context that the run's handlers share."""

    category: str = Constants.CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMessage(Message):
    """A piece of output for the client's stream."""

    category: str = Constants.CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundTaskMessage(Message):
    """Starts the agent `receiver` in the background, or carries the result of such a task (topic: complete)."""

    category: str = Constants.BACKGROUND_TASK
    background_task_id: str = ""


_CLASSES: dict[str, type[Message]] = {
    Constants.AGENT: AgentMessage,
    Constants.TOOL: ToolMessage,
    Constants.TASK: TaskMessage,
    Constants.GROUP: GroupMessage,
    Constants.HUMAN: HumanMessage,
    Constants.MEMORY: MemoryEventMessage,
    Constants.CONTEXT: ContextMessage,
    Constants.CHUNK: ChunkMessage,
    Constants.BACKGROUND_TASK: BackgroundTaskMessage,
}


def _class_of(data: Mapping[str, Any]) -> type[Message]:  # Any: JSON
    category = data.get("category")
    if category == Constants.TASK and data.get("topic") == TopicType.CANCEL:
        return CancelMessage
    return _CLASSES.get(category, Message) if isinstance(category, str) else Message


class MessageQuestions(ABC):
    """Queries for messages, in the order of their emission within each task."""

    @abstractmethod
    def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        """Yield all messages, or those of one task."""

    async def messages_by_task_id(self, task_id: str) -> list[Message]:
        """Return the messages of a task."""
        return [message async for message in self._all(task_id)] if task_id else []

    async def messages_by_key(self, key: str) -> list[Message]:
        """Return the messages of a task: a message's key is its task."""
        return await self.messages_by_task_id(key)

    async def messages_by_session_id(self, session_id: str) -> list[Message]:
        """Return the messages of all tasks of a session."""
        return [message async for message in self._all() if message.session_id == session_id]

    async def messages_by_sender(self, sender: str, key: str = "") -> list[Message]:
        """Return the messages with this sender, of all tasks or of the task `key`."""
        return [message async for message in self._all(key) if message.sender == sender]

    async def messages_by_topic(self, topic: str, key: str = "") -> list[Message]:
        """Return the messages with this topic, of all tasks or of the task `key`."""
        return [message async for message in self._all(key) if message.topic == topic]

    async def messages_by_caller(self, caller: str, key: str = "") -> list[Message]:
        """Return the messages with this caller, of all tasks or of the task `key`."""
        return [message async for message in self._all(key) if message.caller == caller]


class UnknownReceiver(InvalidInput):
    """Nothing handles a message: no handler has its category, or none knows its topic. It ends the task."""


class HandlerError(StepError):
    """A handler failed. `type` and `message` are those of its error. The run is not retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOutcome:
    """The result of `run_events`. `value()` returns the answer or raises the error."""

    status: str
    """`completed`, `failed`, `cancelled` or `interrupted`."""
    answer: Any = None  # Any: the payload of the message that ended the run
    error: dict[str, str] | None = None
    """`type` and `message`, if it did not complete."""
    message: Message | None = None
    """The message that ended the run."""
    unhandled: Sequence[Message] = field(default_factory=tuple)
    """Messages that were still waiting when the run ended. They are recorded like all others."""
    handled: int = 0
    cause: Exception | None = None
    """The handler's own exception, in the process that raised it."""

    def value(self) -> Any:  # Any: as answer
        """Return the answer. Raises HandlerError, TaskCancelled, or the StepError that a handler raised."""
        if self.status == Status.COMPLETED:
            return self.answer
        # Another attempt would fail in the same way.
        if isinstance(self.cause, StepError | InvalidInput | LimitExceeded):
            raise self.cause
        error = self.error or {}
        if self.status in (Status.CANCELLED, "interrupted"):
            raise TaskCancelled(error.get("type", self.status), error.get("message", ""))
        raise HandlerError(error.get("type", self.status), error.get("message", "")) from self.cause


def message_id(task: str, run: str, step: str) -> str:
    """Return the id of the message that a step emitted."""
    return f"{task}/{run}/{step}"


_decode = msgspec.json.Decoder(dict[str, Any]).decode  # Any: JSON


class Recorded:
    """The source of recorded messages: a trajectory store, and the namespace in it."""

    def __init__(self, store: TrajectoryStore, namespace: str = "weft") -> None:
        self.store = store
        self.namespace = namespace


class EventHistory(MessageQuestions):
    """Queries for recorded messages in the trajectory store, without a limit."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    async def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        """Yield messages page by page; those of a task in the order of emission."""
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
    """Return a task's messages in the order of emission. If it emitted none, return one message for each step.

    Such a message has the step's input as its payload, and its `status` and `result` or `error` as headers.
    """
    emitted = [(trajectory.task, step) for step in trajectory.steps if step.kind == "message"]
    if emitted:
        return in_order(emitted)
    steps = [step for step in trajectory.steps if step.kind in _CATEGORY and (step.run != ROOT_RUN or step.step)]
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
    """Return the messages of a task's rows: runs by their first message, and each run's in the order of emission."""
    begun: dict[str, float] = {}
    for _, step in rows:
        begun[step.run] = min(begun.get(step.run, step.started), step.started)
    rows.sort(key=lambda row: (begun[row[1].run], place(row[1].run, row[1].step)))
    return [message_of(task, step) for task, step in rows]


def message_of(task: str, step: Step) -> Message:
    message = Message.from_dict(_decode(bytes(step.input)))
    return message.replace(id=message.id or message_id(task, step.run, step.step), task_id=task)
