"""A state-manager that waits for one of its servers is not stuck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.host.state_manager import StateManagerReplica
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from tests.servers.process import Server
from tests.servers.proxy import Proxy

SECONDS = 60.0
LEASE_SECONDS = 0.6


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("away", ["ingress", "partition"])
async def test_a_state_manager_is_healthy_while_one_of_its_servers_is_away(
    away: str, valkey: Server, namespace: str
) -> None:
    """In a Cluster the ingress may be on a server without partitions."""
    transport = await connect(valkey.url)
    keys = await open_namespace(transport, namespace, 1)
    settings = Settings.from_environment({"WEFT_LEASE_SECONDS": f"{LEASE_SECONDS:g}", "WEFT_NAMESPACE": namespace})
    async with Proxy(valkey.url) as proxy:
        others = await connect(proxy.url)
        of_partition, ingress = (transport, others) if away == "ingress" else (others, transport)
        manager = StateManagerReplica(
            [EventBus(of_partition, keys[0])], ingress, settings, Metrics(CollectorRegistry(), "state-manager")
        )
        await manager.start()
        watch = manager._watch
        watch.waiting(True)
        watch.waiting = lambda waits: None  # type: ignore[method-assign]
        proxy.freeze()
        await until(lambda: bool(watch._asked))
        started, before = time.monotonic(), watch.stalled_seconds

        def stands() -> bool:
            nonlocal started, before
            if watch.stalled_seconds != before:
                started, before = time.monotonic(), watch.stalled_seconds
            return time.monotonic() - started > 2

        await until(stands)
        assert (manager._silent_seconds() < 2) is (away == "ingress")
        proxy.heal()
        await until(lambda: watch.stalled_seconds > before)
        await manager.stop()
        for opened in (transport, others):
            await opened.close()
