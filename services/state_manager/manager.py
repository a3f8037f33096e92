"""The role: leads admission and schedules for the namespace, and relay and housekeeping for each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.topics import Topics
from runtime_core.config.settings import Settings
from runtime_core.consumer.leader import Leader
from runtime_core.consumer.progress import Health, ProgressWatch
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.scheduler import Scheduler
from runtime_core.maintenance.measures import Measures
from runtime_core.maintenance.sweeps import LetterKeeper
from runtime_core.periodic import Periodic
from runtime_core.telemetry.metrics import Metrics
from services.state_manager.admitter import Admitter
from services.state_manager.blob_sweeper import BlobSweeper
from services.state_manager.housekeeper import Housekeeper
from services.state_manager.relay import Relay

SERVICE = "state-manager"


class StateManager:
    """One replica of the state-manager. `ingress` is a connection of its own for the blocking read."""

    def __init__(
        self,
        buses: Sequence[EventBus],
        ingress: Transport,
        settings: Settings,
        metrics: Metrics,
        connect: Callable[[], Awaitable[Transport]] | None = None,
    ) -> None:
        """`connect` opens a connection for one publisher's stream, where those may live on other servers."""
        self._buses = buses
        self._ingress = ingress
        self._connect = connect
        self._settings = settings
        self._metrics = metrics
        self._stop = asyncio.Event()
        self._watch = ProgressWatch(limit_seconds=max(30.0, 10 * settings.lease_seconds))
        self._leaders = [
            Leader(
                bus,
                "admit" if number == 0 else "keep",
                SERVICE,
                settings.lease_seconds,
                self._work_of(bus, number),
                self._watch,
            )
            for number, bus in enumerate(buses)
        ]
        # In a Cluster the ingress may live on another server than any partition.
        self._asking_ingress = Periodic("ask the ingress", settings.lease_seconds / 6, self._ask_ingress)
        metrics.show_owner(self._silent_seconds, settings.lease_seconds)
        metrics.stalled.set_function(lambda: self._watch.stalled_seconds)
        for bus, leader in zip(buses, self._leaders, strict=True):
            metrics.show_lead(bus.keys.partition, leader)

    async def start(self) -> None:
        for bus in self._buses:
            await bus.make_groups(())
        for leader in self._leaders:
            await leader.start()
        self._asking_ingress.start()

    async def run(self) -> None:
        await self._stop.wait()

    async def stop(self) -> None:
        self._stop.set()
        await self._asking_ingress.stop()
        for leader in self._leaders:
            await leader.stop()
        for transport in (self._ingress, *(bus.transport for bus in self._buses)):
            await transport.close()

    def ready(self) -> bool:
        return self._silent_seconds() < self._settings.lease_seconds

    def _silent_seconds(self) -> float:
        return max(leader.silent_seconds for leader in self._leaders)

    def progress(self) -> Health:
        return self._watch.health()

    async def _ask_ingress(self) -> None:
        self._watch.asks_broker("ingress")
        await self._ingress.call("PING")
        self._watch.broker_answered("ingress")

    def _work_of(self, bus: EventBus, number: int) -> Callable[[int], Awaitable[None]]:
        async def work(epoch: int) -> None:
            relay = Relay(bus, self._buses, self._ingress, self._metrics)
            leader = self._leaders[number]
            measures = Measures(bus, self._metrics.measured, lambda: leader.leads, self._ingress)
            settings = self._settings
            letters = LetterKeeper(
                bus, settings.dead_max_bytes, settings.dead_retention_seconds, partitions=len(self._buses)
            )
            keeper = Housekeeper(bus, self._metrics, settings.retention_seconds, measures, letters)
            async with asyncio.TaskGroup() as group:
                group.create_task(relay.run(), name="relay")
                group.create_task(keeper.run(), name="housekeeper")
                if number == 0:
                    group.create_task(BlobSweeper(self._settings).run(), name="blob sweeper")
                    admission = Admission(self._buses)
                    admitter = Admitter(
                        self._ingress,
                        admission,
                        bus,
                        Topics(self._buses),
                        self._settings.namespace,
                        self._metrics,
                        self._watch,
                        self._connect,
                    )
                    group.create_task(admitter.run(str(epoch)), name="admitter")
                    group.create_task(Scheduler(bus, admission).run(str(epoch)), name="scheduler")

        return work
