"""Keeps what agents shall remember."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime_core.events.handler import NOTHING, Handler
from runtime_core.events.message import MemoryEventMessage, Message

MEMORY = "memory"
"""Where the memory is in the state of the run's instance: `{agent: [item, …]}`."""


class DefaultMemoryHandler(Handler):
    """Appends an item to the memory of an agent, in `ctx.state["memory"]`: durable where the run's agent has a key.

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
