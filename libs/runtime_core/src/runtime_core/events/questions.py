"""What may be asked of messages that were emitted, wherever they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from runtime_core.events.message import Message


class MessageQuestions(ABC):
    """Finds messages, in the order of their emission; of several tasks, those of each in order."""

    @abstractmethod
    def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        """All messages, or those of one task."""

    async def messages_by_task_id(self, task_id: str) -> list[Message]:
        """What a task has emitted."""
        return [message async for message in self._all(task_id)] if task_id else []

    async def messages_by_key(self, key: str) -> list[Message]:
        """The same: a message's key is its task."""
        return await self.messages_by_task_id(key)

    async def messages_by_session_id(self, session_id: str) -> list[Message]:
        """What all tasks of a session have emitted."""
        return [message async for message in self._all() if message.session_id == session_id]

    async def messages_by_sender(self, sender: str, key: str = "") -> list[Message]:
        """Of all tasks, or of the task `key`."""
        return [message async for message in self._all(key) if message.sender == sender]

    async def messages_by_topic(self, topic: str, key: str = "") -> list[Message]:
        """Of all tasks, or of the task `key`."""
        return [message async for message in self._all(key) if message.topic == topic]

    async def messages_by_caller(self, caller: str, key: str = "") -> list[Message]:
        """Of all tasks, or of the task `key`."""
        return [message async for message in self._all(key) if message.caller == caller]
