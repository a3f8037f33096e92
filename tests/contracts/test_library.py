"""The functions fit into one script: Lua allows 200 local names at a time at its top."""

from __future__ import annotations

from runtime_core.bus.library import library
from tests.contracts.broker import Broker

ROOM = 10
"""How many names more must fit, so that a new function does not fail in what adds a few, such as the simulation."""


async def test_the_library_has_room_for_more_names(broker: Broker) -> None:
    real = library()
    head, _, body = real.source.replace(real.name.encode(), b"weft_room").partition(b"\n")
    names = ", ".join(f"name_{number}" for number in range(ROOM))
    await broker.call("FUNCTION", "LOAD", head + b"\nlocal " + names.encode() + b"\n" + body)
    await broker.call("FUNCTION", "DELETE", "weft_room")
