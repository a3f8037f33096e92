"""The event loop of a durable run: dispatches messages to handlers, round by round, until one ends the task."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from runtime_core.consumer.settle import error_text
from runtime_core.errors import InvalidInput, LimitExceeded, Outcome
from runtime_core.integrations.aworld.events.handlers import Events, Handler, HandlerTable, Subscriber
from runtime_core.integrations.aworld.events.message import (
    Constants,
    EventHistory,
    EventOutcome,
    HandlerError,
    Message,
    Priority,
    Recorded,
    TaskMessage,
    TopicType,
    UnknownReceiver,
    message_id,
)
from runtime_core.wire.codec import quoted
from runtime_core.wire.step import Status, place

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

Transformer: TypeAlias = Callable[[Message], Message | Awaitable[Message]]

_decode = msgspec.json.Decoder(dict[str, Any]).decode  # Any: JSON

ANY = ""
"""The topic of subscribers to all topics of a category."""


class EventManager(Events):
    """Dispatches the messages of one run by priority; messages of equal priority are first in, first out.

    It is part of the run: a replay emits the same messages in the same order. Each message is a row of kind `message`
    in the task's trajectory; `EventManager.of(Recorded(store))` reads them later.
    """

    def __init__(self, ctx: AgentContext, table: HandlerTable | None = None) -> None:
        self.ctx = ctx
        self.table = HandlerTable.of(ctx) if table is None else table
        self.context = {}
        self.outcome = None
        self._waiting: list[tuple[int, str, Message]] = []
        self._kept: list[tuple[str, Message]] = []
        self._subscribers: dict[tuple[str, str], list[tuple[int, Subscriber]]] = {}
        self._transformers: dict[tuple[str, str], list[tuple[int, Transformer]]] = {}
        self._handlers: dict[str, Handler] = {}
        for each in ctx.functions.subscribers:
            self._add(each.category, each.topic, each.function, each.transformer, each.order)

    @staticmethod
    def of(recorded: Recorded) -> EventHistory:
        """Return the recorded messages of tasks, with the same `messages_by_…` queries."""
        return EventHistory(recorded)

    # ---- emitting ----------------------------------------------------------------------------------------

    async def emit_message(self, message: Message) -> Message:
        if not isinstance(message, Message):
            raise InvalidInput("message", f"{quoted(message)} is not a Message")
        ctx = self.ctx
        if message.task_id:  # emitted before: now it becomes a new message
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
        # Decode the recorded bytes: handlers get what the record holds, and share no object with the sender.
        message = Message.from_dict(_decode(note.data))
        message = message.replace(id=message.id or message_id(ctx.task_id, ctx.run_id, note.id))
        # The step's place in the program: the order of emission, even among concurrent handlers.
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
        """Emit a message with these fields."""
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

    # ---- subscribers ------------------------------------------------------------------------------------

    async def register(
        self,
        event_type: str,
        topic: str,
        handler: Subscriber | Transformer,
        *,
        transformer: bool = False,
        order: int = 0,
    ) -> None:
        """Register a function for the messages of a category, instead of its handler. A lower `order` runs first.

        `topic` matches a message's topic or receiver; an empty one matches all messages of the category. A
        `transformer` returns the message that replaces the given one.
        """
        if not callable(handler):
            raise InvalidInput("handler", f"{handler!r} is not callable: pass a function that takes a message")
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
        """Remove a registration. Raises InvalidInput if there is none."""
        table = self._table(transformer)
        taken = table.get((event_type, topic), [])
        kept = [each for each in taken if each[1] != handler]
        if len(kept) == len(taken):
            raise InvalidInput("handler", f"{handler!r} is not registered for {event_type!r}, topic {topic!r}")
        taken[:] = kept

    def subscribers(self, event_type: str, *topics: str) -> list[Subscriber]:
        for topic in (*(topic for topic in topics if topic), ANY):
            if taken := self._subscribers.get((event_type, topic)):
                return [subscriber for _, subscriber in taken]
        return []

    def _table(self, transformer: bool) -> Mapping[tuple[str, str], list[tuple[int, Any]]]:  # Any: either kind
        return self._transformers if transformer else self._subscribers

    # ---- dispatching -------------------------------------------------------------------------------------

    def take(self, limit: int) -> list[Message]:
        """Remove and return the next messages that may run concurrently: those of the highest priority, in order.

        A message of category `task` runs alone, after all messages that were emitted before it.
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
        """The messages that are not handled yet, in the order of handling."""
        return [message for _, _, message in sorted(self._waiting, key=lambda each: each[:2])]

    async def dispatch(self, message: Message) -> None:
        """Pass a message to its subscribers or handler, and emit what follows. Raises UnknownReceiver."""
        for transform in self._transformers_of(message):
            changed = transform(message)
            given: object = await changed if inspect.isawaitable(changed) else changed
            if not isinstance(given, Message):
                raise InvalidInput(
                    "message", f"a transformer returned {quoted(given)}: return the Message that replaces the given one"
                )
            message = given
        if message.category != Constants.TOOL_CALLBACK and (
            subscribers := self.subscribers(message.category, message.topic, message.receiver)
        ):
            for subscriber in subscribers:
                async for following in messages_from(subscriber(message)):
                    await self.emit_message(following)
            return
        if message.category not in self.table:
            raise UnknownReceiver(
                "category",
                f"nothing handles {quoted(message.category)} (receiver {quoted(message.receiver)}, topic "
                f"{quoted(message.topic)}): register a function for it, or add a handler to the app",
            )
        async for following in self.handler(message.category).handle(message):
            await self.emit_message(following)

    def handler(self, category: str) -> Handler:
        handler = self._handlers.get(category)
        if handler is None:
            handler = self._handlers[category] = self.table[category](self)
        return handler

    def _transformers_of(self, message: Message) -> list[Transformer]:
        found: list[tuple[int, Transformer]] = []
        for topic in dict.fromkeys((message.topic, message.receiver, ANY)):
            found += self._transformers.get((message.category, topic), [])
        return [transformer for _, transformer in sorted(found, key=lambda each: each[0])]

    # ---- emitted messages --------------------------------------------------------------------------------

    @property
    def messages(self) -> list[Message]:
        """All messages that this run has emitted, in order."""
        return [message for _, message in sorted(self._kept, key=lambda each: each[0])]

    async def _all(self, task_id: str = "") -> AsyncIterator[Message]:
        for message in self.messages:
            if task_id in ("", message.task_id):
                yield message


async def messages_from(given: object) -> AsyncIterator[Message]:
    """Yield the messages that a subscriber returned. Raises InvalidInput for anything else."""
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
        raise InvalidInput("message", f"a subscriber returned {quoted(given)}: return a Message, several, or None")


MAX_STEPS = 100
"""How many messages a run handles by default."""


async def run_events(
    ctx: AgentContext,
    first_messages: Iterable[Message],
    table: HandlerTable | None = None,
    *,
    manager: EventManager | None = None,
    max_steps: int = MAX_STEPS,
) -> EventOutcome:
    """Emit the first messages and handle all that follow, until a message ends the task.

    Each round handles the messages of the highest priority concurrently, through `ctx.gather`, and the next round
    starts when all are done. An exception of a handler becomes a message with topic `TopicType.ERROR`, which ends the
    task with that error; only Retry and Reject, which concern this attempt, propagate. More than `max_steps` messages,
    or none left, also end the task with an error. `table` is used only if there is no `manager`.
    """
    return await EventLoop(manager or EventManager(ctx, table), max_steps=max_steps).run(first_messages)


class EventLoop:
    """Drives one EventManager."""

    def __init__(self, manager: EventManager, *, max_steps: int = MAX_STEPS) -> None:
        if max_steps < 1:
            raise InvalidInput("max_steps", f"{max_steps} is not a whole number of at least 1")
        self.manager = manager
        self.max_steps = max_steps
        self.handled = 0

    async def run(self, first_messages: Iterable[Message]) -> EventOutcome:
        manager = self.manager
        for message in first_messages:
            await manager.emit_message(message)
        while manager.outcome is None:
            batch = manager.take(self.max_steps - self.handled)
            if batch:
                self.handled += len(batch)
                await self._round(batch)
            elif manager.waiting:
                await self._end_by(LimitExceeded(f"the task needs more than max_steps={self.max_steps} messages"))
            else:
                await self._end_by(
                    HandlerError(
                        "NoMessageLeft",
                        "no message is left and none ended the task: let a handler yield a TaskMessage with topic "
                        "TopicType.FINISHED",
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
        # Choose the first in order, not in time, so that a replay chooses the same.
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
        """Pass the error to the task's handler. It ends the task, or continues with other messages."""
        if message.topic == TopicType.ERROR:
            self._outcome(message, failure)
            return
        await self.manager.emit_message(_error_message(message, failure))
        emitted = self.manager.take(1)[0]
        if (again := await self._handle(emitted)) is not None:
            self._outcome(emitted, again)
        elif self.manager.outcome is not None and self.manager.outcome.status == Status.FAILED:
            self._outcome(emitted, failure)

    async def _end_by(self, failure: Exception) -> None:
        message = await self.manager.emit_message(_error_message(None, failure))
        self.manager.take(1)
        self._outcome(message, failure)

    def _outcome(self, message: Message, failure: Exception) -> None:
        self.manager.outcome = EventOutcome(
            status=Status.FAILED, error=_error_of(failure), message=message, answer=None, cause=failure
        )


def _error_message(message: Message | None, failure: Exception) -> TaskMessage:
    cause = {} if message is None else {"message_id": message.id}
    return TaskMessage(
        topic=TopicType.ERROR,
        priority=Priority.ERROR,
        payload=_error_of(failure),
        sender="" if message is None else (message.receiver or message.category),
        headers=cause,
    )


def _error_of(failure: Exception) -> dict[str, str]:
    kind = getattr(failure, "type", "") or type(failure).__name__
    text = getattr(failure, "message", "") or str(failure)
    return {"type": str(kind), "message": error_text(str(text))}
