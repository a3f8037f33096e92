"""Sends output to the client while the task goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_core.events.handler import NOTHING, Handler
from runtime_core.events.message import Message


class DefaultOutputHandler(Handler):
    """Appends the payload (text or any JSON) to the client's stream."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        await self.ctx.emit(message.payload)
        for following in NOTHING:
            yield following
