"""Messages: what the handlers of an event-driven run give each other. JSON, in memory as on the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.events.constants import Constants, Priority, TopicType


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. It gets `id`, `task_id`, `session_id` and `timestamp` when it is emitted.

    `category` says which handler takes it, `topic` what is wanted, `receiver` who it is for, `sender` who it is from,
    and `caller` who waits for what comes of it. `id` is `<task>/<run>/<step>`: the same at each replay of the run.
    """

    category: str = Constants.TASK
    payload: Any = None  # Any: JSON of the sender's choice
    sender: str = ""
    receiver: str = ""
    caller: str = ""
    topic: str = ""
    priority: int = Priority.NORMAL
    """Lower numbers go first."""
    headers: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    session_id: str = ""
    task_id: str = ""
    id: str = ""
    timestamp: float = 0.0
    """Epoch seconds: the time that the run had seen when it emitted the message."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """All that is not at its default, and the category."""
        told: dict[str, Any] = {"category": self.category}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            if value or part.name == "payload":
                told[part.name] = value
        return told

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:  # Any: JSON
        """The message that `to_dict` has told, of the class of its category. Raises InvalidInput, field `message`."""
        kind = _class_of(data)
        known = {part.name for part in dataclasses.fields(kind)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise InvalidInput(
                f"message.{unknown[0]}", f"is no field of a {kind.__name__}; known are {', '.join(sorted(known))}"
            )
        return kind(**data)._checked()

    @staticmethod
    def is_message(value: object) -> bool:
        """Whether JSON is a message: an object with `category` and only fields of messages."""
        if not isinstance(value, Mapping) or not isinstance(value.get("category"), str) or "payload" not in value:
            return False
        return set(value) <= {part.name for part in dataclasses.fields(_class_of(value))}

    def replace(self, **changes: Any) -> Self:  # Any: values of fields
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def _checked(self) -> Self:
        for name in ("category", "sender", "receiver", "caller", "topic", "session_id", "task_id", "id"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"message.{name}", f"{quoted(getattr(self, name))} is not text")
        if not self.category:
            raise InvalidInput("message.category", "is empty; give one of Constants, or a text of your own")
        if not isinstance(self.priority, int):
            raise InvalidInput("message.priority", f"{quoted(self.priority)} is not a whole number")
        if not isinstance(self.headers, Mapping):
            raise InvalidInput("message.headers", f"{quoted(self.headers)} is not an object")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMessage(Message):
    """Asks the agent `receiver`; `headers["key"]` names its instance."""

    category: str = Constants.AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMessage(Message):
    """Calls the tool `receiver` with the payload as arguments, or several tools: a list of `{"tool", "arguments"}`."""

    category: str = Constants.TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage(Message):
    """Tells the task itself, as `topic` says: that it is finished, failed, cancelled, has an output."""

    category: str = Constants.TASK


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelMessage(TaskMessage):
    """Ends the task as cancelled, before what else waits; the payload is the reason."""

    topic: str = TopicType.CANCEL
    priority: int = Priority.CANCEL


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMessage(Message):
    """Several agents and tools at once: the payload is a list of messages, the results go on together, in order."""

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
    """What kind of memory it is, such as `system`, `human`, `ai`, `tool` or `summary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMessage(Message):
    """Puts the members of the payload (an object) into the context that the run's handlers share."""

    category: str = Constants.CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMessage(Message):
    """A piece of output for the client's stream."""

    category: str = Constants.CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundTaskMessage(Message):
    """Starts the agent `receiver` beside the task, or brings what such a task gave (topic: it is complete)."""

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
