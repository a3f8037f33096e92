"""Instances that handle events concurrently: they have no mailbox, and the last commit's state wins."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, answer, ask, complete, suspend


@pytest.fixture(autouse=True)
async def interleaved(broker: Broker) -> None:
    await broker.call("HSET", broker.keys.interleaved, "writer", "1")


async def test_events_of_one_instance_are_in_flight_together(broker: Broker, bus: EventBus) -> None:
    for task in ("a", "b", "c"):
        await broker.submit(bus, task, key="k")
    turns = [await broker.take(bus) for _ in range(3)]
    assert [turn.task for turn in turns] == ["a", "b", "c"]
    for turn in (turns[1], turns[0], turns[2]):
        assert await complete(bus, turn)
    await broker.idle()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_state_of_the_later_commit_stays(broker: Broker, bus: EventBus, order: tuple[int, int]) -> None:
    await broker.submit(bus, "a", key="k")
    await broker.submit(bus, "b", key="k")
    turns = [await broker.take(bus), await broker.take(bus)]
    for at in order:
        assert await complete(bus, turns[at], state=b'{"by":%d}' % at)
        assert json.loads((await broker.hash("inst:writer/k"))["state"]) == {"by": at}
    await broker.submit(bus, "c", key="k")
    fields = await bus.load(await broker.take(bus))
    assert fields is not None
    assert fields.state == b'{"by":%d}' % order[-1]


async def test_a_waiting_run_continues_while_another_runs(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "a", key="k")
    await suspend(bus, await broker.take(bus), ask("1"))
    await broker.submit(bus, "b", key="k")
    other = await broker.take(bus)
    await answer(bus, await broker.take(bus, "tool"))
    resumed = await broker.take(bus)
    assert (resumed.task, resumed.kind) == ("a", "resume")
    assert await complete(bus, resumed)
    assert await complete(bus, other)
    await broker.idle()


@pytest.mark.parametrize("first", [0, 1])
async def test_an_event_frees_its_own_place(broker: Broker, bus: EventBus, first: int) -> None:
    await broker.submit(bus, "a", key="k")
    await broker.submit(bus, "b", key="k")
    turns = [await broker.take(bus), await broker.take(bus)]
    assert await complete(bus, turns[first])
    left = turns[1 - first]
    assert (await broker.hash("inst:writer/k"))["busy"] == f"{left.task}|r"
    assert await complete(bus, left)
    await broker.idle()


async def test_other_agents_keep_their_mailboxes(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "a", "editor", key="k")
    await broker.submit(bus, "b", "editor", key="k")
    await complete(bus, await broker.take(bus))
    assert (await broker.take(bus)).task == "b"


async def test_a_repeated_event_begins_with_the_same_state(broker: Broker, bus: EventBus) -> None:
    """Otherwise its journal could not be replayed."""
    for task in ("a", "b"):
        await broker.submit(bus, task, key="k")
    first, second = await broker.take(bus), await broker.take(bus)
    assert await complete(bus, first, state=b'{"n":1}')
    fields = await bus.load(second)
    assert fields is not None
    assert fields.state == b""
