"""A leader logs why its work failed, but not several times a second, and knows whether it leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.leader import Leader
from runtime_core.errors import StoreUnavailable


class Bus:
    """A broker without another leader."""

    owner = ""
    keys = SimpleNamespace(partition=0)

    async def beat(self, *_: Any) -> tuple[str, list[str], int]:  # Any: what it is told does not matter
        return "1", [], 0

    async def lead(self, role: str, floor: int = 0) -> int:
        return 1

    async def leave(self, unstarted: Sequence[object]) -> None:
        """Holds nothing."""


async def test_the_same_reason_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tries, goes_on = 0, asyncio.Event()

    async def work(epoch: int) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise StoreUnavailable("the disk is full")
        if tries == 4:
            raise StoreUnavailable("the disk is gone")
        goes_on.set()
        await asyncio.Event().wait()

    caplog.set_level(logging.INFO)
    leader = Leader(cast(EventBus, Bus()), "record", "recorder", 0.05, work)
    await leader.start()
    await asyncio.wait_for(goes_on.wait(), 60)
    await leader.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "leads record of partition 0 (epoch 1)",
        "record: the disk is full; restarting",
        "record: the disk is gone; restarting",
    ]
    assert not any(record.exc_info for record in caplog.records)


async def test_a_leader_leads_only_while_its_heartbeats_arrive() -> None:
    """Another process may lead by now."""
    begun = asyncio.Event()

    async def work(epoch: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    leader = Leader(cast(EventBus, Bus()), "record", "recorder", 60, work)
    assert not leader.leads
    await leader.start()
    await asyncio.wait_for(begun.wait(), 60)
    assert leader.leads
    leader._owner._heard -= 60
    assert not leader.leads
    await leader.stop()
