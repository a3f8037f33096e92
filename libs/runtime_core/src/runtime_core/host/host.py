"""A host starts, runs and stops the roles of a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runtime_core.base.lazy import needs_extra
from runtime_core.base.periodic import Periodic
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.in_flight import DeliveryHandler
from runtime_core.consumer.progress import HEALTHY, Health
from runtime_core.errors import ConfigurationError, ServerError
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

FINISH_SHARE = 0.7
"""Share of the shutdown time in which running deliveries may finish; the rest is for handing them back."""
CANCEL_SHARE = 0.1
"""Share in which cancelled deliveries may then end."""
ANNOUNCE_SECONDS = 5.0
"""How often the manifest is published again, so that it returns after a flush of the broker."""
PARTITION_IN_FLIGHT = 256
"""Deliveries of one partition that are held at once."""

Step = Callable[[], Awaitable[object]]


class Role(Protocol):
    """A long-running part of a process. `stop` is called once, even if `start` failed or was interrupted."""

    async def start(self) -> None:
        """Connect and check; return when `run` can begin. A WeftError ends the process with one line and status 1."""
        ...

    async def run(self) -> None:
        """Work until `stop` is called. Returning earlier ends the process, and the supervisor restarts it."""
        ...

    async def stop(self) -> None:
        """Stop reading, finish or hand back held deliveries, settle them and deregister. Then `run` returns."""
        ...

    def ready(self) -> bool:
        """Return whether the role is reading now; False, for example, while the broker is unavailable."""
        ...

    def progress(self) -> Health:
        """Return whether the role makes progress. Must not block."""
        ...


@dataclass(eq=False, slots=True)
class _Part:
    """Steps that start, run and stop together."""

    start: Sequence[Step]
    run: Sequence[Step]
    stop: Sequence[Step]
    """Called concurrently; if there are none, the running tasks are cancelled."""


class Host:
    """A role that combines others. A service process runs one; `LocalApp` and `Runtime` start one in their process.

        start    parts in the order in which they are added ─> announce ─> run
        stop     stop announcing ─> parts in reverse ─> connections

    A part is a role or a dependency of a role. Add a dependency first, so that it outlives the role.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Transport]],
        metrics: Metrics,
        *,
        lease_seconds: float = 3.0,
        shutdown_seconds: float | None = None,
    ) -> None:
        """`connect` opens a connection to the broker. `shutdown_seconds`: None waits until every delivery has ended."""
        self.metrics = metrics
        self._connect = connect
        self._lease = lease_seconds
        self._shutdown = shutdown_seconds
        self._transports: list[Transport] = []
        self._parts: list[_Part] = []
        self._begun: list[_Part] = []
        self._running: dict[_Part, list[asyncio.Task[object]]] = {}
        self._roles: list[Role] = []
        self.consumers: list[Consumer] = []
        """The consumers that `consume` has added."""
        self._announced: list[Step] = []
        self._announcing = Periodic("announce", ANNOUNCE_SECONDS, self._announce)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- parts --------------------------------------------------------------------------------------------------

    async def connect(self) -> Transport:
        """Open a connection that stays open until this host stops."""
        transport = await self._connect()
        self._transports.append(transport)
        return transport

    async def open(self, partitions: Sequence[Keys]) -> list[EventBus]:
        """Open one connection per partition: in a Cluster, partitions may live on different servers."""
        return [EventBus(await self.connect(), keys) for keys in partitions]

    def add(self, *, start: Step | None = None, run: Step | None = None, stop: Step | None = None) -> None:
        """Add a part. `run` must not return; if it raises, the host ends. Without `stop`, `run` is cancelled."""
        self._parts.append(_Part([start] if start else [], [run] if run else [], [stop] if stop else []))

    def add_roles(self, *roles: Role) -> None:
        """Add roles that start in order and stop together."""
        self._roles += roles
        self._parts.append(
            _Part([role.start for role in roles], [role.run for role in roles], [role.stop for role in roles])
        )

    def consume(
        self,
        buses: Sequence[EventBus],
        streams: Sequence[str],
        handler: Callable[[EventBus], DeliveryHandler],
        *,
        service: str,
        in_flight: int | None = None,
        finish_share: float = FINISH_SHARE,
        cancel_share: float | None = CANCEL_SHARE,
        work_seconds: float = 0.0,
    ) -> None:
        """Add a consumer for each partition.

        Args:
            in_flight: Deliveries held at once by all partitions together; None: 256 per partition.
            finish_share: The share of the shutdown time in which running deliveries may finish.
            cancel_share: The share in which cancelled deliveries may then end; None: as long as they need.
            work_seconds: The longest time limit of the work. Only beyond it, the health check counts a stall.
        """
        consumers = [
            Consumer(
                bus,
                streams,
                handler(bus),
                self.metrics,
                service=service,
                lease_seconds=self._lease,
                in_flight=PARTITION_IN_FLIGHT if in_flight is None else max(1, in_flight // len(buses)),
                finish_seconds=self._share_of_stop(finish_share),
                cancel_grace_seconds=self._share_of_stop(cancel_share),
                work_seconds=work_seconds,
            )
            for bus in buses
        ]
        if not self.consumers:
            # Computed at each scrape: two writes per delivery would cost throughput.
            self.metrics.in_flight.set_function(lambda: sum(consumer.held for consumer in self.consumers))
            self.metrics.show_owner(lambda: max(consumer.silent_seconds for consumer in self.consumers), self._lease)
            self.metrics.stalled.set_function(lambda: max(consumer.stalled_seconds for consumer in self.consumers))
            self.metrics.quarantine.set_function(lambda: max(consumer.alone_seconds for consumer in self.consumers))
        self.consumers += consumers
        self.add_roles(*consumers)

    async def beat_beside(self, lasts: Callable[[], bool]) -> None:
        """Keep all consumers alive from the loop of another thread while `lasts` returns True: this loop is blocked."""
        await asyncio.gather(*(consumer.beat_beside(self._connect, lasts) for consumer in self.consumers))

    def _share_of_stop(self, part: float | None) -> float | None:
        return None if part is None or self._shutdown is None else part * self._shutdown

    def announce(self, publish: Step) -> None:
        """Call `publish` at the start, every 5 seconds, and on `announce_now`."""
        self._announced.append(publish)

    def announce_now(self) -> None:
        """Publish announcements now."""
        self._announcing.trigger()

    # -- life cycle -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all parts, then run them. If one fails to start, `stop` ends those that have started."""
        await self._begin()
        if self._announced:
            await self._announce()
            self._announcing.start()
        self._run()

    async def join(self) -> None:
        """Start parts that were added while the host runs."""
        await self._begin()
        self._run()

    async def _begin(self) -> None:
        for part in self._parts[len(self._begun) :]:
            self._begun.append(part)
            for start in part.start:
                await start()

    def _run(self) -> None:
        for part in self._begun:
            if part not in self._running:
                tasks = self._running[part] = [asyncio.ensure_future(run()) for run in part.run]
                for task in tasks:
                    task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[object]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def run(self) -> None:
        """Wait until `stop`, or until a part ends. Raises the error that ended it."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Stop all started parts, the last one first, and close the connections."""
        await self._announcing.stop()
        failures: list[Exception] = []
        while self._begun:
            try:
                await self._end(self._begun.pop())
            except Exception as error:  # the other parts must end nevertheless
                failures.append(error)
        for transport in self._transports:
            await transport.close()
        if not self._ended.done():
            self._ended.set_result(None)
        if failures:
            raise failures[0]

    async def _end(self, part: _Part) -> None:
        running = self._running.pop(part, [])
        if not part.stop:
            for task in running:
                task.cancel()
        await asyncio.gather(*(stop() for stop in part.stop))
        if running:
            await asyncio.wait(running)

    def ready(self) -> bool:
        return all(role.ready() for role in self._roles)

    def progress(self) -> Health:
        return next((health for role in self._roles if not (health := role.progress()).ok), HEALTHY)

    async def _announce(self) -> None:
        for publish in self._announced:
            try:
                await publish()
            except ServerError as error:
                if not str(error).startswith("OOM"):
                    raise
                # The last announcement still stands, and finishing work frees memory.
                logger.warning("the broker's memory is full: this app is announced again when memory is free")


def service_host(settings: Settings, metrics: Metrics) -> Host:
    """Return the host of a service. Raises ConfigurationError if the settings name no broker."""
    if settings.redis_url is None:
        raise ConfigurationError("WEFT_REDIS_URL is not set: name a broker, or use `weft up`, which starts one")
    return Host(
        partial(connect, settings.redis_url),
        metrics,
        lease_seconds=settings.lease_seconds,
        shutdown_seconds=settings.shutdown_seconds,
    )


async def open_partitions(
    host: Host, settings: Settings, limits: Mapping[str, int] | None = None, *, durability: str = ""
) -> list[EventBus]:
    """Open all partitions of the settings' namespace. `open_namespace` documents the checks and `limits`."""
    buses = []
    for number in range(settings.partitions):
        transport = await host.connect()
        keys = await open_namespace(transport, settings.namespace, settings.partitions, limits)
        buses.append(EventBus(transport, keys[number], durability=durability))
    return buses


# -- services that run no app and lead nothing -------------------------------------------------------------------


async def build_gateway(settings: Settings, metrics: Metrics) -> Host:
    """Wire a gateway. Raises ConfigurationError."""
    from runtime_core.client.client import Client

    try:
        from runtime_core.gateway.server import Gateway  # here: the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(needs_extra("the gateway", "gateway", error))) from None
    host = service_host(settings, metrics)
    client = Client.connect(settings.redis_url, namespace=settings.namespace, partitions=settings.partitions)
    host.add_roles(Gateway(settings, client))
    return host


async def build_recorder(settings: Settings, metrics: Metrics) -> Host:
    """Wire a trajectory-recorder. Raises ConfigurationError."""
    from runtime_core.trajectory.recorder import Recorder  # here: the gateway needs no database
    from runtime_core.trajectory.store import TrajectoryStore

    host = service_host(settings, metrics)
    if settings.trajectory_url.startswith("sqlite"):
        settings.make_data_dir()
    buses = await open_partitions(host, settings)
    store = await TrajectoryStore.open(settings.trajectory_url)
    host.add_roles(Recorder(buses, store, metrics, namespace=settings.namespace, lease_seconds=settings.lease_seconds))
    return host
