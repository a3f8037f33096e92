"""Repeats of a submit start one task, within the dedupe window."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Submitted
from runtime_core.errors import Rejected
from tests.contracts.broker import Broker, complete


async def window(broker: Broker) -> tuple[int, int]:
    """Return how many ids are remembered, and how many wait to be forgotten."""
    queued = await broker.call("LLEN", broker.keys.base + "seen_order")
    assert isinstance(queued, int)
    return len(await broker.hash("seen")), queued


async def test_an_equal_submit_starts_nothing(broker: Broker, bus: EventBus) -> None:
    """The answer names the first submit's task and its current status."""
    assert await broker.submit(bus, "t") == Submitted("t", "accepted", True)
    before = await broker.snapshot()
    assert await broker.submit(bus, "t") == Submitted("t", "accepted", False)
    assert await broker.snapshot() == before
    assert await complete(bus, await broker.take(bus))
    assert await broker.submit(bus, "t") == Submitted("t", "completed", False)
    await broker.idle()


async def test_an_equal_submit_may_name_another_task(broker: Broker, bus: EventBus) -> None:
    """Source and id decide, so a new task id starts nothing."""
    await broker.submit(bus, "t")
    again = await broker.submit(bus, "other", event_id="event-t", digest="digest-t")
    assert again == Submitted("t", "accepted", False)
    assert await broker.status("other") == ""


async def test_the_window_keeps_no_long_ids(broker: Broker, bus: EventBus) -> None:
    """Otherwise a publisher could fill the broker with ids of kilobytes, since only their number is bounded."""
    source, event_id = "s" * 4096, "i" * 4096
    await broker.submit(bus, "t", event_id=event_id, source=source)
    assert not (await broker.submit(bus, "t", event_id=event_id, source=source)).started
    with pytest.raises(Rejected, match="used before with different content"):
        await broker.submit(bus, "u", event_id=event_id, source=source, digest="other")
    assert (await broker.submit(bus, "v", event_id=event_id + "i", source=source)).started
    assert await complete(bus, await broker.take(bus))
    repeated = await broker.submit(bus, "t", event_id=event_id, source=source)
    assert repeated == Submitted("t", "completed", False)
    ordered = await broker.call("LRANGE", broker.keys.base + "seen_order", 0, -1)
    assert isinstance(ordered, list)
    lines = [line.decode() for line in ordered if isinstance(line, bytes)]
    assert len(lines) == 2
    assert max(map(len, [*await broker.hash("seen"), *lines])) <= 13 + 1 + 256


async def test_the_same_id_with_other_content_is_rejected(broker: Broker, bus: EventBus) -> None:
    """The error names the field of the id, and nothing changes."""
    await broker.submit(bus, "t")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="used before with different content") as error:
        await broker.submit(bus, "u", event_id="event-t", digest="other")
    assert error.value.field == "id"
    assert await broker.snapshot() == before


async def test_the_same_id_of_another_source_is_another_submit(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert (await broker.submit(bus, "u", event_id="event-t", source="elsewhere")).started


async def test_a_second_event_starts_an_existing_task_only_if_it_is_equal(broker: Broker, bus: EventBus) -> None:
    """Equal content means that task. Other content is refused, field `task_id`."""
    await broker.submit(bus, "t")
    equal = await broker.submit(bus, "t", event_id="e2", digest="digest-t")
    assert equal == Submitted("t", "accepted", False)
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="a task t with different content exists") as error:
        await broker.submit(bus, "t", event_id="e3", digest="other")
    assert error.value.field == "task_id"
    assert await broker.snapshot() == before
    assert len(await broker.entries("agent")) == 1


async def test_a_random_id_needs_no_place_in_the_window(broker: Broker, bus: EventBus) -> None:
    """Only its own repeats have it, and they find the task, even after its end."""
    await broker.submit(bus, "t", epoch="-")
    assert await window(broker) == (0, 0)
    assert await broker.submit(bus, "t", epoch="-") == Submitted("t", "accepted", False)
    assert await complete(bus, await broker.take(bus))
    assert await broker.submit(bus, "t", epoch="-") == Submitted("t", "completed", False)
    assert await broker.submit(bus, "t") == Submitted("t", "completed", False)
    with pytest.raises(Rejected, match="a task t with different content exists"):
        await broker.submit(bus, "t", epoch="-", digest="other")
    assert await window(broker) == (0, 0)
    await broker.idle()


@pytest.mark.parametrize(
    ("retention", "claims"), [(599, ""), (3600, "|")], ids=["ended tasks are kept too short", "several partitions"]
)
async def test_a_random_id_has_a_place_where_its_task_would_not_show_it(
    broker: Broker, bus: EventBus, retention: int, claims: str
) -> None:
    await broker.call("HSET", broker.keys.meta, "retention", retention)
    await broker.submit(bus, "t", epoch="-", claims=claims)
    assert await window(broker) == (1, 1)
    assert await complete(bus, await broker.take(bus))
    await broker.call("DEL", broker.keys.task("t"))
    assert await broker.submit(bus, "t", epoch="-", claims=claims) == Submitted("t", "completed", False)


@pytest.mark.parametrize("ends", ["completed", "cancelled"])
async def test_the_window_outlives_the_task(broker: Broker, bus: EventBus, ends: str) -> None:
    """The answer is still known when the task's own fields have expired."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    if ends == "completed":
        assert await complete(bus, turn)
    else:
        await bus.cancel("t", "not wanted")
        assert not await complete(bus, turn)
    ttl = await broker.call("TTL", broker.keys.task("t"))
    assert isinstance(ttl, int)
    assert ttl > 0
    await broker.call("DEL", broker.keys.task("t"))
    assert await broker.submit(bus, "t") == Submitted("t", ends, False)
    await broker.call("HSET", broker.keys.meta, "overload", "memory is at 85 %")
    assert await broker.submit(bus, "t") == Submitted("t", ends, False), "where new tasks are refused too"
    with pytest.raises(Rejected):
        await broker.submit(bus, "t", digest="other")
    assert await broker.entries("agent") == []


async def test_the_window_is_bounded(broker: Broker, bus: EventBus) -> None:
    """The oldest ids are forgotten, the newest are not."""
    await broker.call("HSET", broker.keys.meta, "dedupe_max", 4)
    for number in range(12):
        assert (await broker.submit(bus, f"t{number}")).started
        seen, queued = await window(broker)
        assert seen == queued <= 4
    for number in (9, 10, 11):
        assert not (await broker.submit(bus, f"t{number}")).started
    with pytest.raises(Rejected):
        await broker.submit(bus, "t11", digest="other")
    # A forgotten id is new where the task is forgotten too.
    assert (await broker.submit(bus, "fresh", event_id="event-t0", digest="other")).started


async def test_an_end_does_not_bring_back_a_forgotten_id(broker: Broker, bus: EventBus) -> None:
    """A task may outlive its place in the window."""
    await broker.call("HSET", broker.keys.meta, "dedupe_max", 2)
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    for task in ("u", "v"):
        await broker.submit(bus, task)
    assert await complete(bus, turn)
    assert await window(broker) == (1, 1)


async def test_a_lower_limit_shrinks_the_window(broker: Broker, bus: EventBus) -> None:
    """Memory stays bounded, even if the limit is lowered on a full window."""
    for number in range(12):
        await broker.submit(bus, f"t{number}")
    await broker.call("HSET", broker.keys.meta, "dedupe_max", 4)
    for number in range(12, 24):
        await broker.submit(bus, f"t{number}")
    seen, queued = await window(broker)
    assert seen == queued <= 4


async def test_a_rejected_submit_does_not_use_up_its_id(broker: Broker, bus: EventBus) -> None:
    """The same event is accepted once the cause is fixed."""
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="no agent is named poet") as error:
        await broker.submit(bus, "t", "poet")
    assert error.value.field == "data.agent"
    await broker.call("HSET", broker.keys.meta, "overload", "the broker is full")
    with pytest.raises(Rejected, match="the broker is full") as error:
        await broker.submit(bus, "t")
    assert error.value.retry_after_seconds
    await broker.call("HDEL", broker.keys.meta, "overload")
    assert await broker.snapshot() == before
    assert await broker.submit(bus, "t") == Submitted("t", "accepted", True)


async def test_before_the_first_manifest_a_submit_waits(broker: Broker, bus: EventBus) -> None:
    """A handler that starts later than its clients rejects nothing; the id stays free."""
    await broker.call("DEL", broker.keys.agents)
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="no agent-handler has published"):
        await broker.submit(bus, "t")
    assert await broker.snapshot() == before


async def test_two_clients_send_the_same_event_at_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """One submit starts the task, and both get its id."""
    answers = await asyncio.gather(*(broker.submit(owner, "t") for owner in (bus, other) * 5))
    assert sorted(answer.started for answer in answers) == [False] * 9 + [True]
    assert len(await broker.entries("agent")) == 1
