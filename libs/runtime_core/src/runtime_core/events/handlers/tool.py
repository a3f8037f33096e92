"""Calls tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput, ToolError
from runtime_core.events.constants import Constants, TopicType
from runtime_core.events.errors import UnknownReceiver
from runtime_core.events.handler import Handler
from runtime_core.events.message import Message


class DefaultToolHandler(Handler):
    """Calls the tool `receiver` with the payload (an object) as arguments, or at once all tools that the payload lists.

    A call in a list is `{"tool": name, "arguments": {…}}`; AWorld's `tool_name` and `params` are understood too. Where
    a callback is registered for the tool (category `tool_callback`, topic: the tool), it sees the result first.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        calls = calls_of(message)
        results = await self.ctx.gather(*(self.call(tool, arguments) for tool, arguments in calls))
        tool = message.receiver or calls[0][0]
        if isinstance(message.payload, list):
            result: object = results
        else:
            result = results[0]
            if self.events.subscribers(Constants.TOOL_CALLBACK, tool):
                yield Message(
                    category=Constants.TOOL_CALLBACK,
                    topic=tool,
                    payload={"arguments": calls[0][1], "result": result},
                    sender=message.sender,
                    caller=message.caller,
                    headers=message.headers,
                )
                return
        for following in self.answers(message, result, sender=tool, topic=TopicType.TOOL_RESULT):
            yield following

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> object:  # Any: the tool's own JSON
        """What the tool returns. Raises ToolError, or UnknownReceiver where no app has such a tool."""
        try:
            result: object = await self.ctx.tool(tool, **arguments)
        except ToolError as error:
            if error.type == "UnknownName":
                raise UnknownReceiver("receiver", error.message) from error
            raise
        return result


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:  # Any: the tools' own JSON
    """The calls that a message asks for. Raises InvalidInput, field `message.payload`, or UnknownReceiver."""
    if not isinstance(message.payload, list):
        return [_call(message.receiver, message.payload or {})]
    if not message.payload:
        raise InvalidInput("message.payload", "lists no tool to call")
    calls = []
    for at, call in enumerate(message.payload):
        if not isinstance(call, Mapping):
            raise InvalidInput(f"message.payload.{at}", f"{quoted(call)} is not an object with `tool` and `arguments`")
        name = call.get("tool") or call.get("tool_name") or message.receiver
        calls.append(_call(name, call.get("arguments") or call.get("params") or {}))
    return calls


def _call(name: object, arguments: object) -> tuple[str, dict[str, Any]]:  # Any: the tool's own JSON
    if not isinstance(name, str) or not name:
        raise UnknownReceiver("receiver", "is empty in a message of category tool: name the tool")
    if not isinstance(arguments, Mapping):
        raise InvalidInput("message.payload", f"{quoted(arguments)} is not an object of arguments for tool {name!r}")
    return name, dict(arguments)
