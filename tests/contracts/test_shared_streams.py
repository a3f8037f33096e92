"""Several owners read one work stream: each event goes to one owner, and stays until its effects are stored."""

from __future__ import annotations

from typing import cast

from runtime_core.bus.connection import Reply
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, complete, group

EVENTS = 300


async def test_two_owners_of_a_stream_never_take_the_same_event(broker: Broker, bus: EventBus, other: EventBus) -> None:
    for number in range(EVENTS):
        await broker.submit(bus, f"t{number}")
    owners = (bus, other)
    taken: dict[str, list[Delivery]] = {owner.owner: [] for owner in owners}
    while len([task for tasks in taken.values() for task in tasks]) < EVENTS:
        for owner in owners:
            deliveries, malformed = await owner.read(["agent"], 10, 5)
            assert not malformed
            taken[owner.owner] += deliveries
    tasks = [delivery.task for owner in owners for delivery in taken[owner.owner]]
    assert len(tasks) == len(set(tasks)) == EVENTS
    assert all(taken.values()), "one owner was given everything"

    # Taken is not gone: who dies now has lost nothing.
    pending = cast(list[Reply], await broker.call("XPENDING", broker.keys.stream("agent"), group("agent")))
    assert pending[0] == len(await broker.entries("agent")) == EVENTS
    for owner in owners:
        for delivery in taken[owner.owner]:
            assert await complete(owner, delivery)
    await broker.idle()
