"""The state-manager: one replica leads admission and schedules, and the relay and housekeeping of each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from runtime_core.base.periodic import Periodic
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.namespace import connect, is_cluster, server_info
from runtime_core.consumer.heartbeat import Owner
from runtime_core.consumer.leader import Leader, Leaders
from runtime_core.errors import Fenced
from runtime_core.host.host import Host, open_partitions, service_host
from runtime_core.settings import Settings
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.admitter import Admitter
from runtime_core.state_manager.keeper import BlobSweeper, Keeper, LetterSweeper, RecordFollower
from runtime_core.state_manager.measures import Measures
from runtime_core.state_manager.relay import AnswerBounds, Relay
from runtime_core.state_manager.scheduler import Scheduler
from runtime_core.state_manager.schedules import ScheduleBounds
from runtime_core.state_manager.stuck import CHECK_SECONDS, EngineWatch
from runtime_core.telemetry.metrics import Metrics


class StateManagerReplica(Leaders):
    """One replica of the state-manager. `ingress` is a separate connection for the blocking read."""

    def __init__(
        self,
        buses: Sequence[EventBus],
        ingress: Transport,
        settings: Settings,
        metrics: Metrics,
        connect: Callable[[], Awaitable[Transport]] | None = None,
        edge: Transport | None = None,
    ) -> None:
        """For a Cluster, `connect` opens a connection per publisher's stream, and `edge` writes the answers; None: all
        share `ingress`.
        """
        self._ingress = ingress
        self._edge = edge or ingress
        self._connect = connect
        self._settings = settings
        roles = ["admit", *["keep"] * (len(buses) - 1)]
        super().__init__(buses, roles, STATE_MANAGER, settings.lease_seconds, metrics)
        # In a Cluster the ingress stream may live on a server without partitions.
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
        bounds = AnswerBounds(self._settings.answers_max_bytes, self._settings.answers_retention_seconds)
        relay = Relay(bus, self._buses, self._edge, self._metrics, bounds)
        measures = Measures(bus, self._metrics.measured, lambda: leader.leads, self._edge)
        settings = self._settings
        letters = LetterSweeper(
            bus, settings.dead_max_bytes, settings.dead_retention_seconds, partitions=len(self._buses)
        )
        keeper = Keeper(
            bus,
            letters,
            retention_seconds=settings.retention_seconds,
            follow_record=RecordFollower(bus, self._metrics).follow,
            measure=measures.refresh,
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
                    self._buses,
                    self._metrics,
                    self._watch,
                    self._connect,
                    self._settings.blob_url,
                    self._edge,
                    bounds,
                    ScheduleBounds(settings.tenant_schedules_max, settings.tenant_schedules_max_bytes),
                )
                group.create_task(admitter.run(str(epoch)), name="admitter")
                group.create_task(Scheduler(bus, admission).run(str(epoch)), name="scheduler")


async def build(settings: Settings, metrics: Metrics) -> Host:
    """Wire a state-manager. Raises ConfigurationError."""
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
    # A connection reaches one server. In a Cluster, publishers' streams may live on several.
    clustered = is_cluster(await server_info(ingress))
    of_publisher = partial(connect, settings.redis_url or "") if clustered else None
    # Otherwise each answer to a server other than the ingress stream's would cost two reconnects.
    edge = await host.connect() if clustered else None
    host.add_roles(StateManagerReplica(buses, ingress, settings, metrics, of_publisher, edge))
    return host


def add_housekeeping(host: Host, bus: EventBus) -> None:
    """Start due schedules in a namespace with one partition, and end engine steps that no gateway serves."""
    # The broker accepts the end of a step only from a live owner.
    owned = EventBus(bus.transport, bus.keys)
    owner = Owner(owned, "engine-watch", 3 * CHECK_SECONDS)
    engines = EngineWatch(owned, gateways_may_start=False)

    async def look() -> None:
        try:
            await owner.beat()
        except Fenced:  # at the first check, and after the loop was blocked for longer than the lease
            await owner.enter()
        await engines.check()

    watch = Periodic("watch engines", CHECK_SECONDS, look)

    async def begin() -> None:
        watch.start()

    host.add(start=begin, stop=watch.stop)
    host.add(run=Scheduler(bus, Admission([bus])).run)
