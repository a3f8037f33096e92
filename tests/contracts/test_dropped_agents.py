"""An agent of runtimes is forgotten in one step, or not at all while a process runs it."""

from __future__ import annotations

from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.topics import TopicSubscription
from tests.contracts.broker import Broker, complete

SILENT_MS = 60_000
KEPT = [TopicSubscription("news", "editor"), TopicSubscription("n", "editor", prefix=True)]


async def known(broker: Broker, bus: EventBus) -> None:
    """`writer` runs nowhere, and `editor` has the same subscriptions."""
    for agent in ("writer", "editor"):
        await bus.note_agent(agent)
        await bus.subscribe(TopicSubscription("news", agent))
        await bus.subscribe(TopicSubscription("n", agent, prefix=True))
    await bus.subscribe(TopicSubscription("own", "writer"))
    await broker.call("HSET", broker.keys.manifests, "actor.writer", "{}")
    await broker.call("HSET", broker.keys.interleaved, "writer", "1")


async def drop(bus: EventBus) -> list[object]:
    return cast(list[object], await bus.call("drop_agent", "writer", "actor.writer", "agent", SILENT_MS))


async def test_an_agent_is_dropped_with_its_subscriptions_and_its_stream(broker: Broker, bus: EventBus) -> None:
    await known(broker, bus)
    await broker.submit(bus, "t")
    assert (await drop(bus))[0] == b"dropped"
    assert sorted(await bus.subscriptions(), key=lambda each: each.prefix) == KEPT
    assert not await bus.knows_subscriber("writer")
    assert await bus.knows_subscriber("editor")
    for key in (broker.keys.agents, broker.keys.manifests, broker.keys.interleaved):
        assert b"writer" not in b"".join(cast(list[bytes], await broker.call("HKEYS", key)))
    assert await broker.entries("agent") == []


async def test_an_agent_that_a_process_runs_stays(broker: Broker, bus: EventBus) -> None:
    await known(broker, bus)
    await bus.join("agent")
    before = await broker.snapshot()
    assert await drop(bus) == [b"runs", 1]
    assert await broker.snapshot() == before
    other = await broker.owner()
    await broker.silence(bus)
    assert await broker.alive(other)
    assert (await drop(other))[0] == b"dropped"


async def test_an_agent_is_dropped_after_a_long_silence_of_its_processes(broker: Broker, bus: EventBus) -> None:
    """Nobody is left to remove the dead readers of its stream."""
    await known(broker, bus)
    await broker.nothing(bus)  # reads the stream
    beat_at = int(cast(bytes, await broker.call("HGET", broker.keys.meta, "beat_at")))
    await broker.call("HSET", broker.keys.meta, "beat_at", beat_at - SILENT_MS - 1)
    assert (await drop(bus))[0] == b"dropped"


async def test_an_instance_is_freed_of_ended_tasks_alone(broker: Broker, bus: EventBus) -> None:
    for task in ("t", "next"):
        await broker.submit(bus, task, key="k")
    turn = await broker.take(bus)
    assert await bus.call("free_instance", "writer/k") == b"OK"
    await broker.nothing(bus)
    await bus.cancel("t", "dropped")
    await broker.nothing(bus)
    assert await bus.call("free_instance", "writer/k") == b"OK"
    following = await broker.take(bus)
    assert following.task == "next"
    assert not await complete(bus, turn)
    assert (await broker.hash("inst:writer/k"))["busy"] == "next|r"
    assert await complete(bus, following)
    await broker.idle()
