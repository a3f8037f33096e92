"""The handlers of messages: their base class, the defaults, and the table of a run.

The default handlers work only through the run's context.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from runtime_core.errors import AgentError, ConfigurationError, InvalidInput, ToolError
from runtime_core.integrations.aworld.events.message import (
    AgentMessage,
    BackgroundTaskMessage,
    Constants,
    EventOutcome,
    GroupMessage,
    HumanMessage,
    MemoryEventMessage,
    Message,
    MessageQuestions,
    TaskMessage,
    TopicType,
    UnknownReceiver,
)
from runtime_core.wire.codec import quoted
from runtime_core.wire.step import Status

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

NOTHING: tuple[Message, ...] = ()
"""For handlers that yield nothing: without a `yield`, `handle` would not be an async generator."""

Subscriber: TypeAlias = Callable[[Message], Any]
"""Takes a message. Returns None, one or several messages, or an awaitable or async iterator of them. (Any: these.)"""


class Events(MessageQuestions):
    """The part of a run's EventManager that its handlers use."""

    ctx: AgentContext
    context: dict[str, Any]
    """Values that the handlers of this run share. (Any: JSON.)"""
    outcome: EventOutcome | None
    """Set by the handler that ends the run."""

    @abstractmethod
    async def emit_message(self, message: Message) -> Message:
        """Record a message and queue it. Return it with its id. Raises InvalidInput for a payload that is not JSON."""

    @abstractmethod
    def subscribers(self, event_type: str, *topics: str) -> list[Subscriber]:
        """Return the subscribers of the first of these topics that has any, or else of the whole category."""

    @abstractmethod
    def handler(self, category: str) -> Handler:
        """Return this run's handler of a category."""


class Handler(ABC):
    """Handles the messages of a category. Each run has its own instance; messages of equal priority run concurrently.

    `handle` is an async generator: Weft emits each message that it yields immediately, in order. It must work only
    through `self.ctx`, so that a replay does the same. An exception ends the task with that error, except for Retry,
    which retries the run. To extend a handler, subclass it: `async for following in super().handle(message): yield
    following`.
    """

    def __init__(self, events: Events) -> None:
        self.events = events

    @property
    def ctx(self) -> AgentContext:
        return self.events.ctx

    @abstractmethod
    def handle(self, message: Message) -> AsyncIterator[Message]:
        """Yield the messages that follow from this one."""

    def answers(self, message: Message, result: object, *, sender: str, topic: str) -> list[Message]:
        """Return the messages that follow from a result. It goes to the waiting agent, or else ends the task.

        A result that is itself a message or a list of messages (see `Message.is_message`) is emitted instead.
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
        raise InvalidInput(f"message.payload.{unknown[0]}", f"unknown; choose from {', '.join(_TERMS)}")
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
                self.end(message, Status.COMPLETED)
            case TopicType.ERROR:
                self.end(message, Status.FAILED)
            case TopicType.CANCEL:
                self.end(message, Status.CANCELLED)
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
        error = None if status == Status.COMPLETED else _error_of(message, status)
        answer = message.payload if status == Status.COMPLETED else None
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


HandlerClass: TypeAlias = type[Handler]

DEFAULTS: Mapping[str, HandlerClass] = {
    Constants.AGENT: DefaultAgentHandler,
    Constants.TOOL: DefaultToolHandler,
    Constants.TOOL_CALLBACK: ToolCallbackHandler,
    Constants.TASK: DefaultTaskHandler,
    Constants.GROUP: DefaultGroupHandler,
    Constants.HUMAN: DefaultHumanHandler,
    Constants.HUMAN_RESPONSE: DefaultHumanHandler,
    Constants.OUTPUT: DefaultOutputHandler,
    Constants.CHUNK: DefaultOutputHandler,
    Constants.MEMORY: DefaultMemoryHandler,
    Constants.CONTEXT: DefaultContextHandler,
    Constants.BACKGROUND_TASK: DefaultBackgroundTaskHandler,
}
"""Category → class."""


class HandlerTable(MutableMapping[str, HandlerClass]):
    """Category → handler class: the defaults, overridden by the app and then by the task."""

    def __init__(self, changes: Mapping[str, HandlerClass] | None = None) -> None:
        self._changes: dict[str, HandlerClass] = {}
        for category, handler in (changes or {}).items():
            self[category] = handler

    @classmethod
    def of(cls, ctx: AgentContext, chosen: Mapping[str, str] | None = None) -> HandlerTable:
        """Return the table of a run: the app's `handlers`, and the choices of the task's `conf.handlers`.

        `chosen` maps a category to a name in `app.handlers`. Raises InvalidInput for an unknown name.
        """
        known = ctx.handlers
        table = cls({name: handler for name, handler in known.items() if name in DEFAULTS})
        for category, name in (chosen or {}).items():
            handler = known.get(name)
            if handler is None:
                names = ", ".join(known) or "none"
                raise InvalidInput(
                    f"conf.handlers.{category}", f"this app has no handler {quoted(name)}; app.handlers has {names}"
                )
            table[category] = handler
        # The user's own categories, unless the task chose a handler for them.
        for name, handler in known.items():
            table._changes.setdefault(name, handler)
        return table

    def __getitem__(self, category: str) -> HandlerClass:
        return self._changes[category] if category in self._changes else DEFAULTS[category]

    def __setitem__(self, category: str, handler: HandlerClass) -> None:
        if not (isinstance(handler, type) and issubclass(handler, Handler)):
            raise ConfigurationError(f"handlers[{category!r}] = {handler!r}: assign a subclass of weft.aworld.Handler")
        self._changes[category] = handler

    def __delitem__(self, category: str) -> None:
        """Restore the default."""
        del self._changes[category]

    def __iter__(self) -> Iterator[str]:
        return iter({**DEFAULTS, **self._changes})

    def __len__(self) -> int:
        return len({**DEFAULTS, **self._changes})

    def __contains__(self, category: object) -> bool:
        return category in self._changes or category in DEFAULTS
