"""The role: leads admission and schedules for the namespace, and relay and housekeeping for each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.topics import Topics
from runtime_core.config.settings import Settings
from runtime_core.consumer.leader import Leader, Leaders
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.admitter import Admitter
from runtime_core.ingress.relay import Relay
from runtime_core.ingress.scheduler import Scheduler
from runtime_core.maintenance.blob_sweeper import BlobSweeper
from runtime_core.maintenance.ends import Ends
from runtime_core.maintenance.keeper import Keeper
from runtime_core.maintenance.measures import Measures
from runtime_core.maintenance.sweeps import LetterKeeper
from runtime_core.periodic import Periodic
from runtime_core.telemetry.metrics import Metrics

SERVICE = "state-manager"


class StateManager(Leaders):
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
        self._ingress = ingress
        self._connect = connect
        self._settings = settings
        roles = ["admit", *["keep"] * (len(buses) - 1)]
        super().__init__(buses, roles, SERVICE, settings.lease_seconds, metrics)
        # In a Cluster the ingress may live on another server than any partition.
        self._asking_ingress = Periodic("ask the ingress", settings.lease_seconds / 6, self._ask_ingress)

    async def start(self) -> None:
        await super().start()
        self._asking_ingress.start()

    async def stop(self) -> None:
        await self._asking_ingress.stop()
        await super().stop()

    async def _ask_ingress(self) -> None:
        self._watch.asks_broker("ingress")
        await self._ingress.call("PING")
        self._watch.broker_answered("ingress")

    async def _lead(self, bus: EventBus, leader: Leader, epoch: int) -> None:
        relay = Relay(bus, self._buses, self._ingress, self._metrics)
        measures = Measures(bus, self._metrics.measured, lambda: leader.leads, self._ingress)
        settings = self._settings
        letters = LetterKeeper(
            bus, settings.dead_max_bytes, settings.dead_retention_seconds, partitions=len(self._buses)
        )
        keeper = Keeper(
            bus,
            letters,
            retention_seconds=settings.retention_seconds,
            follow_record=Ends(bus, self._metrics).follow,
            measure=measures.look,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(relay.run(), name="relay")
            group.create_task(keeper.run(), name="housekeeper")
            if bus is self._buses[0]:
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
                    self._settings.blob_url,
                )
                group.create_task(admitter.run(str(epoch)), name="admitter")
                group.create_task(Scheduler(bus, admission).run(str(epoch)), name="scheduler")
