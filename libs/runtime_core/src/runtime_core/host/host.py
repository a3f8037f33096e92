"""A host: the roles that a process carries, from their start to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Consumer, Handler
from runtime_core.consumer.progress import HEALTHY, Health
from runtime_core.errors import ConfigurationError, ServerError
from runtime_core.periodic import Periodic
from runtime_core.telemetry.metrics import Metrics


class Role(Protocol):
    """Work of a process. `stop` is called once, also after a start that failed or was interrupted."""

    async def start(self) -> None:
        """Connect, check, and return when `run` can begin. WeftError: one line, and exit status 1."""
        ...

    async def run(self) -> None:
        """Work until `stop` is called. Returning earlier ends the process, to be started again."""
        ...

    async def stop(self) -> None:
        """Stop reading, finish or hand back what is in hand, settle, leave. `run` returns then."""
        ...

    def ready(self) -> bool:
        """Whether it is reading now; False while the broker is away, for instance."""
        ...

    def progress(self) -> Health:
        """Whether it gets anywhere; must not wait."""
        ...


logger = logging.getLogger(__name__)

FINISH_PART = 0.7
"""Of the time to stop, in which what runs may still end; the rest is for handing back."""
LET_GO_PART = 0.1
"""In which what is cancelled then may end."""
ANNOUNCE_SECONDS = 5.0
"""How often the manifest is published again: a flushed server gets it back by itself."""
IN_FLIGHT = 256
"""Deliveries of one partition that are in hand at once."""

Step = Callable[[], Awaitable[object]]


@dataclass(eq=False, slots=True)
class _Part:
    """What starts, runs and stops together."""

    start: Sequence[Step]
    run: Sequence[Step]
    stop: Sequence[Step]
    """At the same time; without any, what runs is cancelled."""


class Host:
    """A role that is made of others. A service serves one; `LocalApp` and `Runtime` start one in their process.

        start    parts in the order in which they were added ─> announce ─> run
        stop     stop announcing ─> parts in reverse ─> connections

    A part is a role, or something that a role depends on: add that first, so that it outlives the role.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Transport]],
        metrics: Metrics,
        *,
        lease_seconds: float = 3.0,
        shutdown_seconds: float | None = None,
    ) -> None:
        """`connect` opens a connection to the broker; `shutdown_seconds`: None waits until each delivery has ended."""
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
        """What `consume` has made."""
        self._announced: list[Step] = []
        self._announcing = Periodic("announce", ANNOUNCE_SECONDS, self._announce)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- what it carries ---------------------------------------------------------------------------------------

    async def connect(self) -> Transport:
        """Open a connection that lives as long as this host."""
        transport = await self._connect()
        self._transports.append(transport)
        return transport

    async def open(self, partitions: Sequence[Keys]) -> list[EventBus]:
        """Open a connection for each partition: in a Cluster each may live on another server."""
        return [EventBus(await self.connect(), keys) for keys in partitions]

    def add(self, *, start: Step | None = None, run: Step | None = None, stop: Step | None = None) -> None:
        """Add a part. `run` may end only by an error, which ends the host; without `stop` it is cancelled."""
        self._parts.append(_Part([start] if start else [], [run] if run else [], [stop] if stop else []))

    def carry(self, *roles: Role) -> None:
        """Add roles that stop at the same time."""
        self._roles += roles
        self._parts.append(
            _Part([role.start for role in roles], [role.run for role in roles], [role.stop for role in roles])
        )

    def consume(
        self,
        buses: Sequence[EventBus],
        streams: Sequence[str],
        handler: Callable[[EventBus], Handler],
        *,
        service: str,
        in_flight: int | None = None,
        finish_part: float = FINISH_PART,
        let_go_part: float | None = LET_GO_PART,
        stall_seconds: float | None = None,
    ) -> None:
        """Carry a consumer for each partition.

        `in_flight` is of all partitions together; None: 256 of each. `finish_part` and `let_go_part` are of the time to
        stop: see Consumer for them and for `stall_seconds`.
        """
        consumers = [
            Consumer(
                bus,
                streams,
                handler(bus),
                self.metrics,
                service=service,
                lease_seconds=self._lease,
                in_flight=IN_FLIGHT if in_flight is None else max(1, in_flight // len(buses)),
                finish_seconds=self._part_of_stop(finish_part),
                let_go_seconds=self._part_of_stop(let_go_part),
                stall_seconds=stall_seconds,
            )
            for bus in buses
        ]
        if not self.consumers:
            # Read at each scrape: two writes for each delivery would be felt.
            self.metrics.in_flight.set_function(lambda: sum(consumer.held for consumer in self.consumers))
            self.metrics.show_owner(lambda: max(consumer.silent_seconds for consumer in self.consumers), self._lease)
            self.metrics.stalled.set_function(lambda: max(consumer.stalled_seconds for consumer in self.consumers))
        self.consumers += consumers
        self.carry(*consumers)

    def _part_of_stop(self, part: float | None) -> float | None:
        return None if part is None or self._shutdown is None else part * self._shutdown

    def announce(self, publish: Step) -> None:
        """Publish something at the start, every few seconds, and whenever `announce_now` is called."""
        self._announced.append(publish)

    def announce_now(self) -> None:
        """Do not wait for the next time."""
        self._announcing.trigger()

    # -- its life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all parts, and run them. Where one fails, `stop` ends those that have begun."""
        await self._begin()
        if self._announced:
            await self._announce()
            self._announcing.start()
        self._run()

    async def join(self) -> None:
        """Start what was added to a host that works."""
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
        if self._ended.done() or task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def run(self) -> None:
        """Wait until `stop`, or until a part ends by itself. Raises what ended it."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Stop all parts that have begun, the last one first, and close the connections."""
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
                # What was announced before is there, and work for it ends, which makes room.
                logger.warning("the broker's memory is full: what this app offers is announced when it has room")


def service_host(settings: Settings, metrics: Metrics) -> Host:
    """Make the host of a service. Raises ConfigurationError where the settings name no broker."""
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
    """Open all partitions of the settings' namespace: see `open_namespace` for what is checked and for `limits`."""
    buses = []
    for number in range(settings.partitions):
        transport = await host.connect()
        keys = await open_namespace(transport, settings.namespace, settings.partitions, limits)
        buses.append(EventBus(transport, keys[number], durability=durability))
    return buses
