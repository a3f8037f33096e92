"""Lets callbacks see the results of tools."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

from runtime_core.events.constants import Constants, TopicType
from runtime_core.events.handler import Handler
from runtime_core.events.message import Message


class ToolCallbackHandler(Handler):
    """Gives a tool's result to the functions that are registered for it, and hands it on.

    The payload is `{"arguments", "result"}`. A callback that returns something puts it in the result's place; None
    leaves the result as it was.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        result = message.payload["result"]
        for callback in self.events.subscribers(Constants.TOOL_CALLBACK, message.topic):
            changed = callback(message.replace(payload={**message.payload, "result": result}))
            if inspect.isawaitable(changed):
                changed = await changed
            if changed is not None:
                result = changed
        for following in self.answers(message, result, sender=message.topic, topic=TopicType.TOOL_RESULT):
            yield following
