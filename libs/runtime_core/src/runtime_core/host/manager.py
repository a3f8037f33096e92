"""The state-manager: leads admission and schedules of the namespace, and relay and housekeeping of each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, server_info
from runtime_core.bus.topics import Topics
from runtime_core.config.settings import Settings
from runtime_core.consumer.leader import Leader, Leaders
from runtime_core.consumer.owner import Owner
from runtime_core.errors import Fenced
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.admitter import Admitter
from runtime_core.ingress.relay import Relay
from runtime_core.ingress.scheduler import Scheduler
from runtime_core.maintenance.ends import Ends
from runtime_core.maintenance.engines import LOOK_SECONDS, EngineWatch
from runtime_core.maintenance.keeper import Keeper
from runtime_core.maintenance.measures import Measures
from runtime_core.maintenance.sweeps import BlobSweeper, LetterKeeper
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


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a state-manager. Raises ConfigurationError in one line."""
    limits = {
        "retention": max(1, int(settings.retention_seconds)),
        "dedupe_max": settings.dedupe_max,
        "mailbox_max": settings.mailbox_max,
        "stream_max": settings.stream_max,
        "ready_max": settings.ready_max,
        "record_max": settings.record_max,
        "output_max": settings.output_max_bytes,
        "request_timeout_ms": max(1, int(settings.request_timeout_seconds * 1000)),
    }
    host = service_host(settings, metrics)
    buses = await open_partitions(host, settings, limits, durability=settings.durability)
    for bus in buses:
        await bus.check_durability()
    ingress = await host.connect()
    # A connection follows one key's server at a time: in a Cluster each publisher's stream may live on another one.
    clustered = (await server_info(ingress)).get("redis_mode") == "cluster"
    of_publisher = partial(connect, settings.redis_url or "") if clustered else None
    host.carry(StateManager(buses, ingress, settings, metrics, of_publisher))
    return host


def carry_small_services(host: Host, bus: EventBus) -> None:
    """Start due schedules of a namespace with one partition, and end steps of engines that no gateway serves."""
    # The broker lets only an owner that lives end a step.
    owned = EventBus(bus.transport, bus.keys)
    owner = Owner(owned, "engine-watch", 3 * LOOK_SECONDS)
    engines = EngineWatch(owned, anyone_may_come=False)

    async def look() -> None:
        try:
            await owner.beat()
        except Fenced:  # at the first look, and where the loop was held for longer than the lease
            await owner.enter()
        await engines.look()

    watch = Periodic("watch engines", LOOK_SECONDS, look)

    async def begin() -> None:
        watch.start()

    host.add(start=begin, stop=watch.stop)
    host.add(run=Scheduler(bus, Admission([bus])).run)
