"""Where a task is: in the partition that its id says, or in another, which the partition of its id has noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.identifiers import partition_of


def home_of(buses: Sequence[EventBus], task: str) -> EventBus:
    """The partition that a task's id says."""
    return buses[partition_of(task, len(buses))]


async def find_place(buses: Sequence[EventBus], task: str) -> EventBus:
    """The partition of a task that was submitted to this namespace."""
    home = home_of(buses, task)
    if len(buses) == 1:
        return home
    noted = await home.transport.call("HGET", home.keys.places, task)
    return buses[int(cast(bytes, noted))] if noted is not None else home


async def forget_place(buses: Sequence[EventBus], task: str) -> None:
    """Forget what was noted of a task that is no more."""
    if len(buses) > 1:
        home = home_of(buses, task)
        await home.transport.call("HDEL", home.keys.places, task)
