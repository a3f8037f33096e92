"""Keeps the context that a run's handlers share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.events.handler import NOTHING, Handler
from runtime_core.events.message import Message


class DefaultContextHandler(Handler):
    """Puts the members of the payload into `events.context`, for this run's handlers, and into `ctx.context`, for the
    agents that are asked from here on. Of two messages the later one wins.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        if not isinstance(message.payload, Mapping):
            raise InvalidInput("message.payload", f"{quoted(message.payload)} is not an object of context members")
        self.events.context.update(message.payload)
        for name, value in message.payload.items():
            self.ctx.context.put(name, value)
        for following in NOTHING:
            yield following
