"""An owner lives while replies are late. A consumer remembers ended tasks, and since when it remembers all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.heartbeat import ENDED_TASK_KEPT_MS, MAX_UNANSWERED, EndedTasks, Owner
from runtime_core.consumer.leader import Leader
from runtime_core.telemetry.metrics import Metrics

NOW = 1_700_000_000_000
LEASE_SECONDS = 0.06


class FarBus:
    """A broker that gets everything at once. Its replies to the verbs in `late` come when the test lets them."""

    owner = ""
    queued = 0

    def __init__(self, *late: str) -> None:
        self.late = set(late)
        self.beats = asyncio.Semaphore(0)
        self.sent = 0
        self.replies = asyncio.Event()

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        self.sent += 1
        self.beats.release()
        await self._reply("beat" if not first else "first beat")
        return "1", [], 0

    async def lead(self, role: str, floor: int = 0) -> int:
        await self._reply("lead")
        return 0

    async def make_groups(self, streams: object) -> None:
        """They exist."""

    async def recently_stopped(self, offset: int, count: int) -> list[tuple[str, int]]:
        await self._reply("recently_stopped")
        return []

    async def leave(self, unstarted: object) -> None:
        """Nothing is held."""

    async def _reply(self, verb: str) -> None:
        if verb in self.late:
            await self.replies.wait()


def _enter(bus: FarBus) -> Awaitable[object]:
    return Owner(cast(EventBus, bus), "test", LEASE_SECONDS).enter()


def _beat(bus: FarBus) -> Awaitable[object]:
    return Owner(cast(EventBus, bus), "test", LEASE_SECONDS).beat()


async def _lead(bus: FarBus) -> None:
    async def nothing(epoch: int) -> None:
        """Never leads."""

    leader = Leader(cast(EventBus, bus), "record", "recorder", LEASE_SECONDS, nothing)
    await leader.start()
    await bus.replies.wait()
    await leader.stop()


def _start(bus: FarBus) -> Awaitable[object]:
    handler: Any = None  # nothing is delivered
    metrics = Metrics(CollectorRegistry(), "test")
    consumer = Consumer(cast(EventBus, bus), ["tool"], handler, metrics, service="test", lease_seconds=LEASE_SECONDS)
    return consumer.start()


@pytest.mark.parametrize(
    ("late", "what"), [("first beat", _enter), ("beat", _beat), ("lead", _lead), ("recently_stopped", _start)]
)
async def test_heartbeats_do_not_wait_for_a_late_reply(late: str, what: Callable[[FarBus], Awaitable[object]]) -> None:
    """On a slow network each reply may take longer than the lease: the broker would declare the owner dead."""
    bus = FarBus(late)
    waiting = asyncio.ensure_future(what(bus))
    async with asyncio.timeout(60):
        for _ in range(12):
            await bus.beats.acquire()
    bus.replies.set()
    await asyncio.wait_for(waiting, 60)


async def test_a_process_without_replies_stops_its_heartbeats() -> None:
    """Its requests may arrive while no reply does. Others must get its work."""
    bus = FarBus("beat")
    looks = 0

    async def count() -> None:
        nonlocal looks
        while looks < 3 * MAX_UNANSWERED:
            looks += 1
            await asyncio.sleep(LEASE_SECONDS / 6)

    owner = Owner(cast(EventBus, bus), "test", LEASE_SECONDS)
    waiting = asyncio.ensure_future(owner.beat())
    await asyncio.wait_for(count(), 60)
    assert bus.sent == 1 + MAX_UNANSWERED
    bus.replies.set()
    await waiting


async def test_a_broker_that_is_slower_than_the_lease_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    bus = FarBus("beat")
    owner = Owner(cast(EventBus, bus), "test", LEASE_SECONDS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bus.replies.clear()
            waiting = asyncio.ensure_future(owner.beat())
            for _ in range(12):
                await asyncio.wait_for(bus.beats.acquire(), 60)
            bus.replies.set()
            await waiting
    [record] = caplog.records
    assert "longer than the lease of 0.06 s" in record.getMessage()


async def test_a_blocked_event_loop_is_not_reported_as_a_slow_broker(caplog: pytest.LogCaptureFixture) -> None:
    bus = FarBus("beat")
    owner = Owner(cast(EventBus, bus), "test", LEASE_SECONDS)
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.ensure_future(owner.beat())
        await asyncio.wait_for(bus.beats.acquire(), 60)
        bus.replies.set()
        until = time.monotonic() + 2 * LEASE_SECONDS
        while time.monotonic() < until:
            pass
        await waiting
    assert caplog.records == []


def test_a_task_is_known_until_it_is_forgotten() -> None:
    ended = EndedTasks()
    ended.add_remembered([("a", NOW - 5)], NOW)
    ended.add_reported(["b"], NOW + 1, NOW)
    assert "a" in ended.ended_ms
    assert "b" in ended.ended_ms
    ended.forget("a")
    ended.forget("never heard of")
    assert "a" not in ended.ended_ms


def test_the_oldest_entries_are_dropped_and_their_time_is_no_longer_covered() -> None:
    ended = EndedTasks(most=2)
    ended.add_remembered([("a", NOW - 30), ("b", NOW - 20)], NOW)
    assert ended.since_ms == NOW - ENDED_TASK_KEPT_MS, "the broker has forgotten older ones"
    ended.add_reported(["c"], NOW, NOW - 10)
    assert [task in ended.ended_ms for task in "abc"] == [False, True, True]
    assert ended.since_ms == NOW - 30
    ended.add_reported(["b"], NOW + 1, NOW)
    ended.add_reported(["d"], NOW + 2, NOW + 1)
    assert [task in ended.ended_ms for task in "bcd"] == [True, False, True], "a second report counts as new"


def test_old_ones_are_dropped() -> None:
    ended = EndedTasks()
    ended.add_reported(["a"], NOW, NOW - 1)
    ended.add_reported([], NOW + ENDED_TASK_KEPT_MS - 1, NOW + ENDED_TASK_KEPT_MS - 2)
    assert "a" in ended.ended_ms
    ended.add_reported([], NOW + ENDED_TASK_KEPT_MS, NOW + ENDED_TASK_KEPT_MS - 1)
    assert "a" not in ended.ended_ms
    assert ended.since_ms == NOW


def test_a_silence_that_is_longer_than_the_brokers_memory_leaves_a_gap() -> None:
    ended = EndedTasks()
    ended.add_remembered([], NOW)
    later = NOW + 3 * ENDED_TASK_KEPT_MS
    ended.add_reported(["a"], later, NOW)
    assert "a" in ended.ended_ms
    assert ended.since_ms == later - ENDED_TASK_KEPT_MS
