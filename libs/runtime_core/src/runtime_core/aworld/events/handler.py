"""What a handler is, and a function that an app subscribes to messages of its runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from runtime_core.aworld.events.message import AgentMessage, Constants, Message, TaskMessage, TopicType

if TYPE_CHECKING:
    from runtime_core.aworld.events.manager import EventManager
    from runtime_core.runs.context import AgentContext


NOTHING: tuple[Message, ...] = ()
"""What a handler yields from that has nothing to say: without a `yield` it would be no async generator."""


class Handler(ABC):
    """Takes the messages of a category. One instance serves one run; messages of equal priority come at once.

    `handle` is an async generator: what it yields is emitted at once, in order. It works through `self.ctx` only, so
    that a replay gives the same. What it raises ends the task with that error, but for Retry (another attempt of the
    run). A subclass goes on with its base by `async for message in super().handle(message): yield message`.
    """

    def __init__(self, events: EventManager) -> None:
        self.events = events

    @property
    def ctx(self) -> AgentContext:
        return self.events.ctx

    @abstractmethod
    def handle(self, message: Message) -> AsyncIterator[Message]:
        """What follows from a message."""

    def answers(self, message: Message, result: object, *, sender: str, topic: str) -> list[Message]:
        """What follows from a result: it goes to who waits for it, and without such a one it ends the task.

        A result that is a message itself, or a list of them (see `Message.is_message`), says what comes next.
        """
        if Message.is_message(result):
            assert isinstance(result, dict)  # is_message says so
            return [_from(result, sender)]
        if isinstance(result, list) and result and all(Message.is_message(part) for part in result):
            return [_from(part, sender) for part in result]
        receiver = message.caller or (message.sender if message.category != Constants.AGENT else "")
        if receiver:
            return [
                AgentMessage(payload=result, sender=sender, receiver=receiver, topic=topic, headers=message.headers)
            ]
        return [TaskMessage(payload=result, sender=sender, topic=TopicType.FINISHED, headers=message.headers)]


def _from(data: dict[str, object], sender: str) -> Message:
    message = Message.from_dict(data)
    return message if message.sender else message.replace(sender=sender)
