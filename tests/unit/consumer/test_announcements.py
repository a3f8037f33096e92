"""What apps announce: names in an order that no submit can meet half-way, and manifests cached for a short time."""

from __future__ import annotations

from typing import cast

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.consumer import announcements
from runtime_core.consumer.announcements import ManifestCache, announce
from runtime_core.declare.manifest import AgentEntry, EngineFunctionEntry, Manifest, ToolEntry


class Broker:
    """The part of a bus that holds manifests."""

    def __init__(self) -> None:
        self.keys = Keys("x", 0)
        self.transport = self
        self.values: list[bytes] = []
        self.reads = 0

    async def call(self, *args: object) -> list[bytes]:
        assert args == ("HVALS", self.keys.manifests)
        self.reads += 1
        return list(self.values)


class Clock:
    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


async def test_manifests_are_read_once_in_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, broker = Clock(), Broker()
    monkeypatch.setattr(announcements, "time", clock)
    one, two = (Manifest(app=name, version="1").to_json() for name in ("one", "two"))
    broker.values = [two, b"not of this release", one]
    cache = ManifestCache(cast(EventBus, broker))
    first = await cache.manifests()
    assert [each.app for each in first] == ["one", "two"], "an unreadable manifest hides no other"
    broker.values = [one]
    clock.seconds += announcements.MANIFESTS_FRESH_SECONDS - 0.1
    assert await cache.manifests() is first
    assert broker.reads == 1
    clock.seconds += 0.1
    assert [each.app for each in await cache.manifests()] == ["one"]


async def test_unchanged_manifests_are_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MANIFESTS_FRESH_SECONDS", 0.0)
    broker = Broker()
    broker.values = [Manifest(app=name, version="1").to_json() for name in ("one", "two")]
    cache = ManifestCache(cast(EventBus, broker))
    first = await cache.manifests()
    broker.values.reverse()
    assert await cache.manifests() is first
    assert broker.reads == 2


class Announced:
    """The part of a bus that gets names."""

    def __init__(self) -> None:
        self.keys = Keys("x", 0)
        self.transport = self
        self.calls: list[tuple[object, ...]] = []

    async def call(self, *args: object) -> int:
        self.calls.append(args)
        return 1


async def test_the_names_of_agents_are_announced_last_and_at_once() -> None:
    """A submit that met only some of them would be refused, since its agent would be unknown."""
    broker = Announced()
    manifest = Manifest(
        "desk", "1", agents={"writer": AgentEntry(), "editor": AgentEntry(pool="big", interleave=True)},
        tools={"search": ToolEntry(), "draw": ToolEntry(pool="gpu")},
        engine_functions={"rank@2": EngineFunctionEntry(version="2")},
    )  # fmt: skip
    await announce([cast(EventBus, broker)], manifest)
    keys = broker.keys
    assert broker.calls[-1] == ("HSET", keys.agents, "writer", "agent", "editor", "agent:big")
    assert [call[:2] for call in broker.calls[:-1]] == [
        ("HSET", keys.manifests),
        ("HSET", keys.interleaved),
        ("HDEL", keys.end_hooks),
        ("HSET", keys.tools),
        ("HSET", keys.engine_functions),
        ("HSETNX", keys.engine_functions),
    ]
    assert ("HSET", keys.tools, "search", "tool", "draw", "tool:gpu") in broker.calls
