"""Starts work that the task does not wait for, and takes in what it gave."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_core.events.constants import TopicType
from runtime_core.events.errors import UnknownReceiver
from runtime_core.events.handler import Handler
from runtime_core.events.message import AgentMessage, BackgroundTaskMessage, Message

_COMPLETE = (TopicType.BACKGROUND_TASK_COMPLETE, TopicType.BACKGROUND_TOOL_COMPLETE)


class DefaultBackgroundTaskHandler(Handler):
    """Starts the agent `receiver` as a durable task of its own. With a topic that says it is complete, the payload
    goes to the agent `receiver` as its next input.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        if not message.receiver:
            raise UnknownReceiver("receiver", "is empty in a message of category background_task: name the agent")
        if message.topic in _COMPLETE:
            headers = dict(message.headers)
            if isinstance(message, BackgroundTaskMessage) and message.background_task_id:
                headers["background_task_id"] = message.background_task_id
            yield AgentMessage(
                payload=message.payload,
                sender=message.sender,
                receiver=message.receiver,
                topic=message.topic,
                headers=headers,
            )
            return
        await self.ctx.send(message.receiver, message.payload, key=str(message.headers.get("key", "")))
