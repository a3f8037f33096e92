"""The event loop of a durable run: messages are handled, round by round, until one ends the task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime_core.aworld.events.manager import EventManager, HandlerTable
from runtime_core.aworld.events.message import EventOutcome, HandlerError, Message, Priority, TaskMessage, TopicType
from runtime_core.errors import InvalidInput, LimitExceeded, Outcome
from runtime_core.runs.failure import clean

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

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
