"""The default handlers, which work only through the run's context."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping
from typing import Any

from runtime_core.aworld.events.manager import NOTHING, Handler
from runtime_core.aworld.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    Constants,
    EventOutcome,
    GroupMessage,
    HumanMessage,
    MemoryEventMessage,
    Message,
    TaskMessage,
    TopicType,
    UnknownReceiver,
)
from runtime_core.codec import quoted
from runtime_core.errors import AgentError, InvalidInput, ToolError


class DefaultAgentHandler(Handler):
    """Calls the agent `receiver` with the payload as its input, in a child run, on any process that has the agent."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        result = await self.ask(message)
        for following in self.answers(message, result, sender=message.receiver, topic=TopicType.AGENT_RESULT):
            yield following

    async def ask(self, message: Message) -> object:
        """Call the agent and return its answer. Raises AgentError, or UnknownReceiver if no app has this agent."""
        if not message.receiver:
            raise UnknownReceiver("receiver", "is empty in a message of category agent: name the agent")
        try:
            answer: object = await self.ctx.agent(
                message.receiver, message.payload, key=str(message.headers.get("key", ""))
            )
        except AgentError as error:
            if error.type == "UnknownName":
                raise UnknownReceiver("receiver", error.message) from error
            raise
        return answer


_COMPLETE = (TopicType.BACKGROUND_TASK_COMPLETE, TopicType.BACKGROUND_TOOL_COMPLETE)


class DefaultBackgroundTaskHandler(Handler):
    """Starts the agent `receiver` as a separate durable task. If the topic says that such a task is complete, the
    payload becomes the input of the agent `receiver`.
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


class DefaultContextHandler(Handler):
    """Adds the members of the payload to `events.context`, for this run's handlers, and to `ctx.context`, for the
    agents that are called later. A later message overrides an earlier one.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message.payload, Mapping):
            raise InvalidInput("message.payload", f"{quoted(message.payload)} is not an object of context members")
        self.events.context.update(message.payload)
        for name, value in message.payload.items():
            self.ctx.context.put(name, value)
        for following in NOTHING:
            yield following


_TERMS = ("prompt", "data", "timeout", "default")


class DefaultHumanHandler(Handler):
    """Asks a human with `ctx.human`, which needs no process while it waits. The answer goes to the asking agent.

    The payload is the prompt, or `{"prompt", "data", "timeout" (seconds), "default"}`.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        answer = message.payload if message.category == Constants.HUMAN_RESPONSE else await self.ask(message)
        for following in self.answers(message, answer, sender="human", topic=Constants.HUMAN_RESPONSE):
            yield following

    async def ask(self, message: Message) -> object:
        """Return the human's answer, or the default. Raises HumanTimeout."""
        terms = question_of(message)
        prompt = terms.pop("prompt")
        answer: object = await self.ctx.human(str(prompt), **terms)
        return answer


def question_of(message: Message) -> dict[str, Any]:  # Any: what ctx.human takes
    """Return the arguments of `ctx.human`. Raises InvalidInput (`message.payload`)."""
    payload = message.payload
    if isinstance(payload, str):
        return {"prompt": payload}
    if not isinstance(payload, Mapping) or not isinstance(payload.get("prompt"), str):
        raise InvalidInput("message.payload", f"{quoted(payload)} is neither a prompt nor an object with `prompt`")
    unknown = sorted(set(payload) - set(_TERMS))
    if unknown:
        raise InvalidInput(f"message.payload.{unknown[0]}", f"unknown; known are {', '.join(_TERMS)}")
    return dict(payload)


MEMORY = "memory"
"""The key of the memory in the state of the run's instance: `{agent: [item, …]}`."""


class DefaultMemoryHandler(Handler):
    """Appends an item to an agent's memory, in `ctx.state["memory"]`, which is durable if the run's agent has a key.

    An item is `{"type", "content", "message_id"}`.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        agent, kind = message.receiver or message.sender, "message"
        if isinstance(message, MemoryEventMessage):
            agent, kind = message.agent or agent, message.memory_event_type
        items = self.ctx.state.setdefault(MEMORY, {}).setdefault(agent, [])
        items.append({"type": kind, "content": message.payload, "message_id": message.id})
        for following in NOTHING:
            yield following


class DefaultOutputHandler(Handler):
    """Appends the payload (text or any JSON) to the client's stream; that of a `chunk` as a piece of output."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        await self.ctx.emit(message.payload, chunk=message.category == Constants.CHUNK)
        for following in NOTHING:
            yield following


class DefaultTaskHandler(Handler):
    """Acts by topic: finished, error, cancel and interrupt end the task; output goes to the client's stream; start
    and rerun emit the messages in the payload; human_confirm asks a human. Tools and agents need no subscription.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        match message.topic:
            case TopicType.FINISHED | TopicType.TASK_RESPONSE:
                self.end(message, "completed")
            case TopicType.ERROR:
                self.end(message, "failed")
            case TopicType.CANCEL:
                self.end(message, "cancelled")
            case TopicType.INTERRUPT:
                self.end(message, "interrupted")
            case TopicType.OUTPUT:
                await self.ctx.emit(message.payload)
            case TopicType.START | TopicType.RERUN:
                for following in messages_in(message):
                    yield following
            case TopicType.HUMAN_CONFIRM:
                yield HumanMessage(payload=message.payload, sender=message.sender, caller=message.caller)
            case TopicType.SUBSCRIBE_TOOL | TopicType.SUBSCRIBE_AGENT:
                pass  # declared agents and tools of all apps are found by name
            case topic:
                raise UnknownReceiver(
                    "topic", f"is {quoted(topic)}, which the task's handler does not know: register a function for it"
                )

    def end(self, message: Message, status: str) -> None:
        """End the run with this message."""
        error = None if status == "completed" else _error_of(message, status)
        answer = message.payload if status == "completed" else None
        self.events.outcome = EventOutcome(status=status, answer=answer, error=error, message=message)


def messages_in(message: Message) -> list[Message]:
    """Return the messages in a payload: one, a list, or none. Raises InvalidInput for anything else."""
    parts = message.payload if isinstance(message.payload, list) else [message.payload]
    if parts == [None]:
        return []
    found = []
    for part in parts:
        if not Message.is_message(part):
            raise InvalidInput("message.payload", f"{quoted(part)} is not a message: send its `to_dict()`")
        # A new message with its own id.
        found.append(Message.from_dict({name: value for name, value in part.items() if name not in _OF_EMISSION}))
    return found


_OF_EMISSION = ("id", "timestamp", "task_id")


def _error_of(message: Message, status: str) -> dict[str, str]:
    payload = message.payload
    if isinstance(payload, Mapping) and "message" in payload:
        return {"type": str(payload.get("type", status.capitalize())), "message": str(payload["message"])}
    text = payload if isinstance(payload, str) else "" if payload is None else quoted(payload)
    return {"type": status.capitalize(), "message": text or f"{Constants.TASK} {status}"}


class DefaultToolHandler(Handler):
    """Calls the tool `receiver` with the payload (an object) as arguments, or all listed tools concurrently.

    A call in a list is `{"tool": name, "arguments": {…}}`; AWorld's `tool_name` and `params` also work. A callback for
    the tool (category `tool_callback`, topic: the tool) gets the result first.
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
        """Call the tool and return its result. Raises ToolError, or UnknownReceiver if no app has this tool."""
        try:
            result: object = await self.ctx.tool(tool, **arguments)
        except ToolError as error:
            if error.type == "UnknownName":
                raise UnknownReceiver("receiver", error.message) from error
            raise
        return result


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:  # Any: the tools' own JSON
    """Return the calls that a message requests. Raises InvalidInput (`message.payload`) or UnknownReceiver."""
    if not isinstance(message.payload, list):
        return [_call(message.receiver, message.payload or {})]
    if not message.payload:
        raise InvalidInput("message.payload", "is an empty list: list at least one call")
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


class DefaultGroupHandler(Handler):
    """Calls all members concurrently and passes on their results together, in the order of the payload.

    Members are messages of the categories agent and tool. If one fails, the handler waits for the others; then the
    first failure in order ends the task. With topic `group_results` the payload goes to the receiver unchanged.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        if message.topic == TopicType.GROUP_RESULTS:
            if message.receiver:
                yield AgentMessage(payload=message.payload, sender=message.sender, receiver=message.receiver)
            else:
                yield TaskMessage(payload=message.payload, topic=TopicType.FINISHED)
            return
        members = messages_in(message)
        if not members:
            raise InvalidInput("message.payload", "a group has no members: list messages to agents and tools")
        results = await self.ctx.gather(*(self.member(member) for member in members))
        yield GroupMessage(
            payload=results,
            topic=TopicType.GROUP_RESULTS,
            sender=message.receiver,
            receiver=message.caller or message.sender,
            headers=message.headers,
        )

    async def member(self, member: Message) -> object:
        """Return one member's result. Raises InvalidInput for a category without results."""
        if member.category == Constants.AGENT:
            agents = self.events.handler(Constants.AGENT)
            if isinstance(agents, DefaultAgentHandler):
                return await agents.ask(member)
            return await DefaultAgentHandler(self.events).ask(member)
        if member.category == Constants.TOOL:
            tools = self.events.handler(Constants.TOOL)
            if not isinstance(tools, DefaultToolHandler):
                tools = DefaultToolHandler(self.events)
            tool, arguments = calls_of(member)[0]
            return await tools.call(tool, arguments)
        raise InvalidInput(
            "message.payload", f"a {member.category} message has no result: members are agents and tools"
        )


class ToolCallbackHandler(Handler):
    """Passes a tool's result to its registered callbacks, and then on.

    The payload is `{"arguments", "result"}`. A value that a callback returns replaces the result; None keeps it.
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
