"""The event loop of a durable run: which handler takes which message, round by round, until one ends the task."""

from __future__ import annotations

import heapq
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from runtime_core.aworld.events.message import (
    AgentMessage,
    Constants,
    EventHistory,
    EventOutcome,
    HandlerError,
    Message,
    MessageQuestions,
    Priority,
    Recorded,
    TaskMessage,
    TopicType,
    UnknownReceiver,
    message_id,
)
from runtime_core.codec import quoted
from runtime_core.errors import ConfigurationError, InvalidInput, LimitExceeded, Outcome
from runtime_core.record.step import place
from runtime_core.runs.failure import clean

if TYPE_CHECKING:
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


HandlerClass: TypeAlias = type[Handler]

DEFAULTS: Mapping[str, str] = {
    Constants.AGENT: "DefaultAgentHandler",
    Constants.TOOL: "DefaultToolHandler",
    Constants.TOOL_CALLBACK: "ToolCallbackHandler",
    Constants.TASK: "DefaultTaskHandler",
    Constants.GROUP: "DefaultGroupHandler",
    Constants.HUMAN: "DefaultHumanHandler",
    Constants.HUMAN_RESPONSE: "DefaultHumanHandler",
    Constants.OUTPUT: "DefaultOutputHandler",
    Constants.CHUNK: "DefaultOutputHandler",
    Constants.MEMORY: "DefaultMemoryHandler",
    Constants.CONTEXT: "DefaultContextHandler",
    Constants.BACKGROUND_TASK: "DefaultBackgroundTaskHandler",
}
"""Category → class in `runtime_core.aworld.events.handlers`, which is loaded when a run needs it."""


class HandlerTable(MutableMapping[str, HandlerClass]):
    """Category → handler class: the defaults, and over them what the app and the task say."""

    def __init__(self, changes: Mapping[str, HandlerClass] | None = None) -> None:
        self._changes: dict[str, HandlerClass] = {}
        for category, handler in (changes or {}).items():
            self[category] = handler

    @classmethod
    def of(cls, ctx: AgentContext, chosen: Mapping[str, str] | None = None) -> HandlerTable:
        """The table of a run: the app's `handlers`, and what the task's `conf.handlers` chooses among them by name.

        `chosen` maps a category to a name in `app.handlers`. Raises InvalidInput for a name that is not there.
        """
        known = ctx.handlers
        table = cls({name: handler for name, handler in known.items() if name in DEFAULTS})
        for category, name in (chosen or {}).items():
            handler = known.get(name)
            if handler is None:
                names = ", ".join(known) or "none"
                raise InvalidInput(
                    f"conf.handlers.{category}", f"{quoted(name)} is no handler of this app; app.handlers has {names}"
                )
            table[category] = handler
        # Categories of the user's own, where no name was chosen for them.
        for name, handler in known.items():
            table._changes.setdefault(name, handler)
        return table

    def __getitem__(self, category: str) -> HandlerClass:
        found = self._changes.get(category)
        if found is None:
            found = getattr(importlib.import_module("runtime_core.aworld.events.handlers"), DEFAULTS[category])
            self._changes[category] = found
        return found

    def __setitem__(self, category: str, handler: HandlerClass) -> None:
        if not (isinstance(handler, type) and issubclass(handler, Handler)):
            raise ConfigurationError(f"handlers[{category!r}] = {handler!r}: give a subclass of events.Handler")
        self._changes[category] = handler

    def __delitem__(self, category: str) -> None:
        """Back to the default."""
        del self._changes[category]

    def __iter__(self) -> Iterator[str]:
        return iter({**DEFAULTS, **self._changes})

    def __len__(self) -> int:
        return len({**DEFAULTS, **self._changes})

    def __contains__(self, category: object) -> bool:
        return category in self._changes or category in DEFAULTS


Subscriber: TypeAlias = Callable[[Message], Any]
"""Takes a message; gives None, a message, several, or an awaitable or async iterator of them. (Any: one of these.)"""
Transformer: TypeAlias = Callable[[Message], Message | Awaitable[Message]]

_decode = msgspec.json.Decoder(dict[str, Any]).decode  # Any: JSON

ANY = ""
"""The topic of subscribers that take a category's messages of all topics."""


class EventManager(MessageQuestions):
    """Dispatches the messages of one run, first in, first out among those of equal priority.

    It lives in the run: a replay emits the same messages in the same order. Each is a row of kind `message` in the
    task's trajectory, where `EventManager.of(store)` finds it later.
    """

    def __init__(self, ctx: AgentContext, table: HandlerTable | None = None) -> None:
        self.ctx = ctx
        self.table = HandlerTable.of(ctx) if table is None else table
        self.context: dict[str, Any] = {}
        """What handlers share in this run. (Any: JSON.)"""
        self.outcome: EventOutcome | None = None
        """Set by the handler that ends the run."""
        self._waiting: list[tuple[int, str, Message]] = []
        self._kept: list[tuple[str, Message]] = []
        self._subscribers: dict[tuple[str, str], list[tuple[int, Subscriber]]] = {}
        self._transformers: dict[tuple[str, str], list[tuple[int, Transformer]]] = {}
        self._handlers: dict[str, Handler] = {}
        for each in ctx.functions.subscribers:
            self._add(each.category, each.topic, each.function, each.transformer, each.order)

    @staticmethod
    def of(recorded: Recorded) -> EventHistory:
        """The messages of tasks that were recorded, with the same questions: `messages_by_…`."""
        return EventHistory(recorded)

    # ---- emitting ----------------------------------------------------------------------------------------

    async def emit_message(self, message: Message) -> Message:
        """Keep a message and put it in the line; returns it with its id. Raises InvalidInput for what is not JSON."""
        if not isinstance(message, Message):
            raise InvalidInput("message", f"{quoted(message)} is not a Message")
        ctx = self.ctx
        if message.task_id:  # emitted before, and changed or not: this is another message
            message = message.replace(id="", timestamp=0.0)
        message = message._checked().replace(
            task_id=ctx.task_id,
            session_id=message.session_id or ctx.session_id,
            timestamp=message.timestamp or ctx.now().timestamp(),
        )
        try:
            note = ctx.note(message.category, message.to_dict())
        except InvalidInput as error:
            raise InvalidInput("message.payload", error.message) from None
        await note
        # Read back: what handlers get is what the record holds, and nobody else's object.
        message = Message.from_dict(_decode(note.data))
        message = message.replace(id=message.id or message_id(ctx.task_id, ctx.run_id, note.id))
        # The place in the program, which is the order of emission also among handlers that run at once.
        where = place("", note.id)
        self._kept.append((where, message))
        heapq.heappush(self._waiting, (message.priority, where, message))
        return message

    async def emit(
        self,
        data: object,
        sender: str,
        receiver: str = "",
        topic: str = "",
        session_id: str = "",
        event_type: str = Constants.TASK,
    ) -> Message:
        """Emit a message of these parts."""
        return await self.emit_message(
            Message.from_dict(
                {
                    "category": event_type,
                    "payload": data,
                    "sender": sender,
                    "receiver": receiver,
                    "topic": topic,
                    "session_id": session_id,
                }
            )
        )

    # ---- who takes what ----------------------------------------------------------------------------------

    async def register(
        self,
        event_type: str,
        topic: str,
        handler: Subscriber | Transformer,
        *,
        transformer: bool = False,
        order: int = 0,
    ) -> None:
        """Let a function take the messages of a category, in place of its handler; a lower `order` goes first.

        `topic` is a message's topic or its receiver; empty: all of the category. With `transformer` the function
        gives the message that goes on in the place of the one it was given.
        """
        if not callable(handler):
            raise InvalidInput("handler", f"{handler!r} cannot be called; give a function of a message")
        self._add(event_type, topic, handler, transformer, order)

    def _add(
        self, event_type: str, topic: str, handler: Subscriber | Transformer, transformer: bool, order: int
    ) -> None:
        table = cast("dict[tuple[str, str], list[tuple[int, Any]]]", self._table(transformer))  # Any: either kind
        taken = table.setdefault((event_type, topic), [])
        taken.append((order, handler))
        taken.sort(key=lambda each: each[0])

    async def unregister(
        self, event_type: str, topic: str, handler: Subscriber | Transformer, *, transformer: bool = False
    ) -> None:
        """Take back a registration. Raises InvalidInput where there is none."""
        table = self._table(transformer)
        taken = table.get((event_type, topic), [])
        kept = [each for each in taken if each[1] != handler]
        if len(kept) == len(taken):
            raise InvalidInput("handler", f"{handler!r} is not registered for {event_type!r}, topic {topic!r}")
        taken[:] = kept

    def subscribers(self, event_type: str, *topics: str) -> list[Subscriber]:
        """Who takes messages of a category with one of these topics: those of the first topic that has any."""
        for topic in (*(topic for topic in topics if topic), ANY):
            if taken := self._subscribers.get((event_type, topic)):
                return [subscriber for _, subscriber in taken]
        return []

    def _table(self, transformer: bool) -> Mapping[tuple[str, str], list[tuple[int, Any]]]:  # Any: either kind
        return self._transformers if transformer else self._subscribers

    # ---- dispatching -------------------------------------------------------------------------------------

    def take(self, limit: int) -> list[Message]:
        """The next messages that may be handled at once: those of the highest priority that waits, in order.

        A message about the task itself is handled alone, after what was emitted before it.
        """
        batch: list[Message] = []
        while self._waiting and len(batch) < limit:
            priority, _, message = self._waiting[0]
            if batch and (priority != batch[0].priority or message.category == Constants.TASK):
                break
            heapq.heappop(self._waiting)
            batch.append(message)
            if message.category == Constants.TASK:
                break
        return batch

    @property
    def waiting(self) -> list[Message]:
        """What is not handled yet, in the order in which it will be."""
        return [message for _, _, message in sorted(self._waiting, key=lambda each: each[:2])]

    async def dispatch(self, message: Message) -> None:
        """Hand a message to who takes it, and emit what follows. Raises UnknownReceiver where nobody does."""
        for transform in self._transformers_of(message):
            changed = transform(message)
            given: object = await changed if inspect.isawaitable(changed) else changed
            if not isinstance(given, Message):
                raise InvalidInput("message", f"a transformer gave {quoted(given)}: give the Message that goes on")
            message = given
        if message.category != Constants.TOOL_CALLBACK and (
            subscribers := self.subscribers(message.category, message.topic, message.receiver)
        ):
            for subscriber in subscribers:
                async for following in _messages(subscriber(message)):
                    await self.emit_message(following)
            return
        if message.category not in self.table:
            raise UnknownReceiver(
                "category",
                f"nobody takes {quoted(message.category)} (receiver {quoted(message.receiver)}, topic "
                f"{quoted(message.topic)}): register a function for it, or give the app a handler",
            )
        async for following in self.handler(message.category).handle(message):
            await self.emit_message(following)

    def handler(self, category: str) -> Handler:
        """This run's handler of a category."""
        handler = self._handlers.get(category)
        if handler is None:
            handler = self._handlers[category] = self.table[category](self)
        return handler

    def _transformers_of(self, message: Message) -> list[Transformer]:
        found: list[tuple[int, Transformer]] = []
        for topic in dict.fromkeys((message.topic, message.receiver, ANY)):
            found += self._transformers.get((message.category, topic), [])
        return [transformer for _, transformer in sorted(found, key=lambda each: each[0])]

    # ---- what was emitted --------------------------------------------------------------------------------

    @property
    def messages(self) -> list[Message]:
        """All messages of this run so far, in the order of emission."""
        return [message for _, message in sorted(self._kept, key=lambda each: each[0])]

    async def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        for message in self.messages:
            if task_id in ("", message.task_id):
                yield message


async def _messages(given: object) -> AsyncIterator[Message]:
    """What a subscriber gave, as messages. Raises InvalidInput for anything else."""
    if inspect.isawaitable(given):
        given = await given
    if given is None:
        return
    if isinstance(given, Message):
        yield given
    elif isinstance(given, AsyncIterator):
        async for message in given:
            yield message
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        for message in given:
            yield message
    else:
        raise InvalidInput("message", f"a subscriber gave {quoted(given)}: give a Message, several, or None")


MAX_STEPS = 100
"""How many messages a run handles where nothing else is said."""


async def run_events(
    ctx: AgentContext,
    first_messages: Iterable[Message],
    table: HandlerTable | None = None,
    *,
    manager: EventManager | None = None,
    max_steps: int = MAX_STEPS,
) -> EventOutcome:
    """Emit the first messages and handle what follows, until a message ends the task.

    In each round the messages of the highest priority are handled at once, through `ctx.gather`; the next round
    begins when all are done. What a handler raises (but for Retry and Reject, which are about this attempt) becomes
    a message with topic `TopicType.ERROR`, which ends the task with that error. So do more than `max_steps` messages,
    and a round after which no message is left. `table` is for a manager that is made here.
    """
    return await EventLoop(manager or EventManager(ctx, table), max_steps=max_steps).run(first_messages)


class EventLoop:
    """Drives one EventManager."""

    def __init__(self, manager: EventManager, *, max_steps: int = MAX_STEPS) -> None:
        if max_steps < 1:
            raise InvalidInput("max_steps", f"{max_steps} is below 1: not even one message would be handled")
        self.manager = manager
        self.max_steps = max_steps
        self.handled = 0

    async def run(self, first_messages: Iterable[Message]) -> EventOutcome:
        """See `run_events`."""
        manager = self.manager
        for message in first_messages:
            await manager.emit_message(message)
        while manager.outcome is None:
            batch = manager.take(self.max_steps - self.handled)
            if batch:
                self.handled += len(batch)
                await self._round(batch)
            elif manager.waiting:
                await self._end_by(
                    LimitExceeded(f"the task would handle more than max_steps={self.max_steps} messages")
                )
            else:
                await self._end_by(
                    HandlerError(
                        "NoMessageLeft",
                        "no message is left and none has ended the task: let a handler yield a TaskMessage with "
                        "topic TopicType.FINISHED",
                    )
                )
        outcome = manager.outcome
        return EventOutcome(
            status=outcome.status,
            answer=outcome.answer,
            error=outcome.error,
            message=outcome.message,
            unhandled=tuple(manager.waiting),
            handled=self.handled,
            cause=outcome.cause,
        )

    async def _round(self, batch: list[Message]) -> None:
        if len(batch) == 1:
            failures = [await self._handle(batch[0])]
        else:
            failures = await self.manager.ctx.gather(*(self._handle(message) for message in batch))
        # The first in order, not in time: a replay must choose the same.
        for message, failure in zip(batch, failures, strict=True):
            if failure is not None and self.manager.outcome is None:
                await self._fail(message, failure)
                return

    async def _handle(self, message: Message) -> Exception | None:
        try:
            await self.manager.dispatch(message)
        except Outcome:
            raise
        except Exception as error:
            return error
        return None

    async def _fail(self, message: Message, failure: Exception) -> None:
        """Let the task's handler end the task with this error; it may also go on, by other messages."""
        if message.topic == TopicType.ERROR:
            self._outcome(message, failure)
            return
        await self.manager.emit_message(_error_message(message, failure))
        told = self.manager.take(1)[0]
        if (again := await self._handle(told)) is not None:
            self._outcome(told, again)
        elif self.manager.outcome is not None and self.manager.outcome.status == "failed":
            self._outcome(told, failure)

    async def _end_by(self, failure: Exception) -> None:
        message = await self.manager.emit_message(_error_message(None, failure))
        self.manager.take(1)
        self._outcome(message, failure)

    def _outcome(self, message: Message, failure: Exception) -> None:
        self.manager.outcome = EventOutcome(
            status="failed", error=_told(failure), message=message, answer=None, cause=failure
        )


def _error_message(message: Message | None, failure: Exception) -> TaskMessage:
    cause = {} if message is None else {"message_id": message.id}
    return TaskMessage(
        topic=TopicType.ERROR,
        priority=Priority.ERROR,
        payload=_told(failure),
        sender="" if message is None else (message.receiver or message.category),
        headers=cause,
    )


def _told(failure: Exception) -> dict[str, str]:
    kind = getattr(failure, "type", "") or type(failure).__name__
    text = getattr(failure, "message", "") or str(failure)
    return {"type": str(kind), "message": clean(str(text))}
