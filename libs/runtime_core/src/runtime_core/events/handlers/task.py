"""Follows what is said of the task itself: above all, how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.events.constants import Constants, TopicType
from runtime_core.events.errors import UnknownReceiver
from runtime_core.events.handler import Handler
from runtime_core.events.message import HumanMessage, Message
from runtime_core.events.outcome import EventOutcome


class DefaultTaskHandler(Handler):
    """By topic: finished, error, cancel and interrupt end the task; output goes to the client's stream; start and
    rerun emit the messages of the payload; human_confirm asks a human. Tools and agents need no subscription.
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
                pass  # whatever any app has declared is found by its name
            case topic:
                raise UnknownReceiver(
                    "topic", f"the task's handler knows no topic {quoted(topic)}: register a function for it"
                )

    def end(self, message: Message, status: str) -> None:
        """End the run with this message."""
        error = None if status == "completed" else _error_of(message, status)
        answer = message.payload if status == "completed" else None
        self.events.outcome = EventOutcome(status=status, answer=answer, error=error, message=message)


def messages_in(message: Message) -> list[Message]:
    """The messages in a payload: one, or a list. Raises InvalidInput for anything else; none is none."""
    parts = message.payload if isinstance(message.payload, list) else [message.payload]
    if parts == [None]:
        return []
    found = []
    for part in parts:
        if not Message.is_message(part):
            raise InvalidInput("message.payload", f"{quoted(part)} is not a message: give its `to_dict()`")
        # As a new message: it gets an id of its own.
        found.append(Message.from_dict({name: value for name, value in part.items() if name not in _OF_EMISSION}))
    return found


_OF_EMISSION = ("id", "timestamp", "task_id")


def _error_of(message: Message, status: str) -> dict[str, str]:
    payload = message.payload
    if isinstance(payload, Mapping) and "message" in payload:
        return {"type": str(payload.get("type", status.capitalize())), "message": str(payload["message"])}
    text = payload if isinstance(payload, str) else "" if payload is None else quoted(payload)
    return {"type": status.capitalize(), "message": text or f"{Constants.TASK} {status}"}
