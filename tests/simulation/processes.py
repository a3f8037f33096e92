"""Simulated processes: what a service runs, with its own connections, and how it may end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from runtime_core.actors.actor import Actors
from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.replies import Replies
from runtime_core.consumer.consumer import Consumer, Handler
from runtime_core.errors import BusError
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.relay import Relay
from runtime_core.ingress.scheduler import Scheduler as ScheduleStarter
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.handler import CallHandler
from runtime_core.tools.tool import AbandonedThreads
from tests.simulation.loop import PROCESS, Timer
from tests.simulation.objects import STREAM as OBJECTS
from tests.simulation.objects import AppWithObjects
from tests.simulation.transport import SimTransport

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler

LEASE_SECONDS = 6.0


class Process:
    """Tasks with connections of their own. `dead`: it runs no code any more, and nothing of it reaches the broker."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.dead = False
        self.paused = False
        self.frozen: list[Timer] = []
        """Timers that were due while it was paused."""
        self.transports: list[SimTransport] = []
        self.tasks: list[asyncio.Task[Any]] = []  # Any: results of all types
        self._context = scheduler.context.copy()
        self._context.run(PROCESS.set, self)
        scheduler.processes.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:  # Any: as `tasks`
        """Start a task of this process."""
        task = self.scheduler.loop.create_task(coroutine, context=self._context.copy())
        self.tasks.append(task)
        return task

    def transport(self) -> SimTransport:
        transport = SimTransport(self.scheduler, self, len(self.transports))
        self.transports.append(transport)
        return transport

    def buses(self) -> list[EventBus]:
        """One bus for each partition, each on a connection of its own."""
        scheduler = self.scheduler
        return [EventBus(self.transport(), Keys(scheduler.namespace, number)) for number in range(len(scheduler.bases))]

    @property
    def runs(self) -> bool:
        return not self.dead and not self.paused

    @property
    def serves(self) -> str:
        """The work stream that it serves, if any."""
        return ""

    def kill(self) -> None:
        """SIGKILL: it stops where it stands."""
        self.dead = True
        self.scheduler.loop.take_timers(self)
        for transport in self.transports:
            self.scheduler.active.pop(transport, None)
        for read in [read for read in self.scheduler.reads if read.transport.process is self]:
            self.scheduler.reads.pop(read)

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.paused = True
        self.scheduler.loop.call_later(seconds, self.go_on)

    def go_on(self) -> None:
        if self.paused:
            self.paused = False
            if not self.dead:
                self.scheduler.note(f"{self.name} goes on")
                self.scheduler.loop.put_timers(self.frozen)
            self.frozen = []


class HandlerProcess(Process):
    """An agent-handler or a tool-handler: one consumer per partition."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        stream: str,
        app: App,
        metrics: Metrics,
        finish_seconds: float,
        objects: bool = False,
    ) -> None:
        """`objects`: it runs agents that are objects, too, and reads what their requests are answered with."""
        super().__init__(scheduler, name)
        self._stream = stream
        self._app: App | AppWithObjects = app
        self._actors: Actors | None = None
        self._replies: list[Replies | None] = [None] * len(scheduler.bases)
        streams = [stream]
        if objects:
            self._app = with_objects = AppWithObjects(app)
            self._actors = with_objects.actors
            self._replies = [Replies(bus, name, self.transport()) for bus in self.buses()]
            streams.append(OBJECTS)
        self.consumers: list[Consumer] = []
        self.leaving = False
        for bus in self.buses():
            self.consumers.append(
                Consumer(
                    bus,
                    streams,
                    self._handler(bus, metrics),
                    metrics,
                    service=name,
                    lease_seconds=LEASE_SECONDS,
                    finish_seconds=finish_seconds,
                    cancel_grace_seconds=0.1,
                )
            )
        self.owners = [consumer._bus for consumer in self.consumers]

    def _handler(self, bus: EventBus, metrics: Metrics) -> Handler:
        if self._stream == "agent":
            replies = self._replies[bus.keys.partition]
            return TurnHandler(bus, self._app, metrics, partitions=len(self.scheduler.bases), replies=replies)
        return CallHandler(bus, self._app.tools, _NO_THREADS, AbandonedThreads(), metrics)

    @property
    def serves(self) -> str:
        return "" if self.dead or self.leaving else self._stream

    def start(self) -> None:
        for replies in self._replies:
            if replies is not None:
                self.spawn(self._read_replies(replies))
        for consumer in self.consumers:
            self.spawn(self._run(consumer))

    async def _read_replies(self, replies: Replies) -> None:
        replies.start()

    async def _run(self, consumer: Consumer) -> None:
        while True:
            try:
                await consumer.start()
                break
            except BusError:
                await asyncio.sleep(0.1)
        await consumer.run()

    def leave(self) -> None:
        """SIGTERM: it finishes what it can, hands back the rest, and ends."""
        self.leaving = True
        self.spawn(self._leave())

    async def _leave(self) -> None:
        if self._actors is not None:
            self._actors.stop()
        await asyncio.gather(*(consumer.stop() for consumer in self.consumers))
        self.scheduler.note(f"{self.name} has left")
        self.kill()


class RelayProcess(Process):
    """What of a state-manager carries questions and answers between partitions."""

    def start(self, metrics: Metrics) -> None:
        buses = self.buses()
        edge = self.transport()
        for bus in buses:
            self.spawn(self._relay(bus, buses, edge, metrics))

    async def _relay(self, bus: EventBus, buses: Sequence[EventBus], edge: SimTransport, metrics: Metrics) -> None:
        while True:
            try:
                await Relay(bus, buses, edge, metrics).run()
            except BaseExceptionGroup as group:
                if any(not isinstance(error, BusError) for error in group.exceptions):
                    raise
                # As its leader does: after an error of the broker it begins again.
                await asyncio.sleep(0.5)


class SchedulerProcess(Process):
    """What starts due schedules where no state-manager runs. Nobody leads: several may run side by side."""

    @property
    def serves(self) -> str:
        return "" if self.dead else "schedule"

    def start(self) -> None:
        self.spawn(self._run())

    async def _run(self) -> None:
        buses = self.buses()
        while True:
            try:
                await ScheduleStarter(buses[0], Admission(buses)).run()
            except BusError:
                await asyncio.sleep(0.5)

    def leave(self) -> None:
        """SIGTERM: it holds nothing that it could hand back."""
        self.kill()


_NO_THREADS = ThreadPoolExecutor(1)
"""Never used: all tools are async."""
