"""Watches the server's memory: submits are refused before it is full."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import server_memory

MEMORY_LIMIT = 0.8
"""Of `maxmemory`: above it submits are answered with `overloaded`, while commits go on."""


async def watch_memory(bus: EventBus) -> None:
    """Say in the partition's `meta` that the broker is over its limit, or that it is no more."""
    memory = await server_memory(bus.transport)
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    over = limit > 0 and used > limit * MEMORY_LIMIT
    text = f"the broker uses {used} of {limit} bytes of maxmemory" if over else ""
    await bus.transport.call("HSET", bus.keys.meta, "overload", text)
