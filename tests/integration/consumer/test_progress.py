"""A process that waits for its broker is not stuck: no probe may restart it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.progress import ProgressWatch
from runtime_core.host.state_manager import StateManagerReplica
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import TrajectoryStore
from tests.contracts.broker import Broker
from tests.servers.process import Server

SECONDS = 60.0
LEASE_SECONDS = 0.6
STALL_SECONDS = 2.0


class Holds:
    """A handler that never ends."""

    def __init__(self) -> None:
        self.holds = asyncio.Event()

    async def handle(self, delivery: Delivery) -> None:
        self.holds.set()
        await asyncio.Event().wait()

    def forget(self) -> None:
        """Nothing to drop."""

    def drain(self) -> None:
        """Its one step has begun."""

    def stop_task(self, task: str) -> None:
        """Nobody cancels."""


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def start_outage(server: Server, how: str) -> None:
    if how == "killed":
        server.kill()
    else:
        server.pause()


def end_outage(server: Server, how: str) -> None:
    if how == "killed":
        server.start()
    else:
        server.resume()


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_handler_that_holds_work_is_healthy_while_the_broker_is_away(
    how: str, own_valkey: Server, namespace: str
) -> None:
    transport = RespTransport(parse_address(own_valkey.url))
    await transport.connect(SECONDS)
    bus = EventBus(transport, Keys(namespace, 0))
    handler, metrics = Holds(), Metrics(CollectorRegistry(), "test")
    consumer = Consumer(
        bus, ["agent"], handler, metrics, service="test", lease_seconds=LEASE_SECONDS, finish_seconds=0.0,
        stall_seconds=STALL_SECONDS,
    )  # fmt: skip
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    await transport.call("HSET", bus.keys.agents, "writer", "agent")
    await Broker("server", bus.keys, None, transport).submit(bus, "t")  # type: ignore[arg-type]  # makes no clients
    async with asyncio.timeout(SECONDS):
        await handler.holds.wait()
    start_outage(own_valkey, how)
    await until(lambda: consumer.silent_seconds > 2 * STALL_SECONDS)
    assert consumer.held == 1
    assert consumer.progress().ok
    end_outage(own_valkey, how)
    await until(lambda: consumer.silent_seconds < LEASE_SECONDS)
    # It holds on and the broker serves: now this is a stall.
    await until(lambda: not consumer.progress().ok)
    await consumer.stop()
    await running
    await transport.close()


async def test_leaders_are_healthy_while_the_broker_is_away(own_valkey: Server, namespace: str, tmp_path: Path) -> None:
    transport = await connect(own_valkey.url)
    keys = await open_namespace(transport, namespace, 1)
    settings = Settings.from_environment({"WEFT_LEASE_SECONDS": f"{LEASE_SECONDS:g}", "WEFT_NAMESPACE": namespace})
    store = await TrajectoryStore.open(f"sqlite:///{tmp_path / 'trajectory.db'}")
    ingress, recorded = await connect(own_valkey.url), await connect(own_valkey.url)
    manager = StateManagerReplica(
        [EventBus(transport, keys[0])], ingress, settings, Metrics(CollectorRegistry(), "state-manager")
    )
    recorder = Recorder(
        [EventBus(recorded, keys[0])], store, Metrics(CollectorRegistry(), "trajectory-recorder"),
        namespace=namespace, lease_seconds=LEASE_SECONDS,
    )  # fmt: skip
    for role in (manager, recorder):
        await role.start()
        # Work that does not end. The roles' own may not say otherwise.
        role._watch.waiting(True)
        role._watch.waiting = lambda waits: None  # type: ignore[method-assign]
    own_valkey.pause()
    watches: list[ProgressWatch] = [manager._watch, recorder._watch]
    await until(lambda: all(role._silent_seconds() > 1 for role in (manager, recorder)))
    before = [watch.stalled_seconds for watch in watches]
    await until(lambda: all(role._silent_seconds() > 2 for role in (manager, recorder)))
    assert [watch.stalled_seconds for watch in watches] == before
    own_valkey.resume()
    await until(lambda: all(watch.stalled_seconds > seconds for watch, seconds in zip(watches, before, strict=True)))
    for role in (manager, recorder):
        await role.stop()
    for opened in (transport, ingress, recorded):
        await opened.close()
