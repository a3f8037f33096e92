"""Simulated processes: what a service runs, with its own connections, and how it may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from runtime_core.app.app import App
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.replies import Replies
from runtime_core.calls.tool_handler import CallHandler
from runtime_core.consumer.in_flight import DeliveryHandler
from runtime_core.declare.tool import AbandonedThreads
from runtime_core.errors import BusError
from runtime_core.host.host import Host, Role
from runtime_core.runs.turn import TurnHandler
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.relay import Relay
from runtime_core.state_manager.scheduler import Scheduler as ScheduleStarter
from runtime_core.telemetry.metrics import Metrics
from tests.simulation.ledger import LEDGER
from tests.simulation.loop import PROCESS, Timer
from tests.simulation.objects import STREAM as OBJECTS
from tests.simulation.objects import AppWithObjects
from tests.simulation.transport import SimTransport

if TYPE_CHECKING:
    from tests.simulation.scheduler import Scheduler

LEASE_SECONDS = 6.0
RESTART_SECONDS = 0.5
"""How long a process is away that ended by an error."""


class Process:
    """Tasks with their own connections. Once `dead`, it runs no more code, and nothing of it reaches the broker."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.dead = False
        self.paused = False
        self.release = scheduler.release
        """Which release of the code it runs."""
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

    def enter(self, function: Callable[[], object]) -> None:
        """Call a function as code of this process."""
        self._context.copy().run(function)

    def transport(self) -> SimTransport:
        transport = SimTransport(self.scheduler, self, len(self.transports))
        self.transports.append(transport)
        return transport

    @property
    def partitions(self) -> list[Keys]:
        return [Keys(self.scheduler.namespace, number) for number in range(len(self.scheduler.bases))]

    def buses(self) -> list[EventBus]:
        """One bus for each partition, each on a separate connection."""
        buses = []
        for keys in self.partitions:
            transport = self.transport()
            transport.base = keys.base
            buses.append(EventBus(transport, keys))
        return buses

    @property
    def runs(self) -> bool:
        return not self.dead and not self.paused

    @property
    def serves(self) -> str:
        """The work stream that it serves, if any."""
        return ""

    def kill(self) -> None:
        """SIGKILL: it stops where it is."""
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


class RoleProcess(Process):
    """Runs a role as a service's process does: start, run, and stop after SIGTERM, within `stop_seconds`.

    If the role fails because of the broker, a new one starts in its place, as a supervisor sees to.
    """

    def __init__(self, scheduler: Scheduler, name: str, serves: str, stop_seconds: float) -> None:
        super().__init__(scheduler, name)
        self._serves = serves
        self._stop_seconds = stop_seconds
        self._role: Role | None = None
        self._starting: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self.leaving = False

    async def build(self) -> Role:
        """Wire the role."""
        raise NotImplementedError

    @property
    def serves(self) -> str:
        return "" if self.dead or self.leaving else self._serves

    def start(self) -> None:
        self._living = self.spawn(self._live())

    async def _live(self) -> None:
        while not self.leaving:
            role = self._role = await self.build()
            self._starting = asyncio.ensure_future(role.start())
            await asyncio.wait((self._starting,))
            if self._starting.cancelled():
                return
            try:
                self._starting.result()
                await role.run()
                return
            except BusError as error:
                if self.leaving:
                    return
                self.scheduler.note(f"{self.name} ends: {error}; it starts again")
            except Exception as error:
                if not self.dead:
                    LEDGER.get().broken.append(("process error", f"{self.name} ended with {error!r}"))
            self._role = None
            with suppress(BusError):
                await role.stop()
            await asyncio.sleep(RESTART_SECONDS)

    def leave(self) -> None:
        """SIGTERM: it finishes what it can, hands back the rest, and ends."""
        self.leaving = True
        self.spawn(self._leave())

    async def _leave(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        how = "has left"
        try:
            async with asyncio.timeout(self._stop_seconds):
                if self._role is not None:
                    await self._role.stop()
                    if self._living is not None:
                        await self._living
        except (TimeoutError, BusError) as error:
            how = f"ends without having left: {error!r}"
        self.scheduler.note(f"{self.name} {how}")
        self.kill()


class HandlerProcess(RoleProcess):
    """An agent-handler or a tool-handler: one consumer per partition."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        stream: str,
        app: App,
        metrics: Metrics,
        stop_seconds: float,
        objects: bool = False,
    ) -> None:
        """`objects`: it runs agents that are objects, too, and reads what their requests are answered with."""
        super().__init__(scheduler, name, stream, stop_seconds)
        self._app = app
        self._metrics = metrics
        self._objects = objects
        self._host: Host | None = None

    async def build(self) -> Role:
        host = self._host = self.host(self._metrics)
        await self.wire(host, await host.open(self.partitions))
        return host

    def host(self, metrics: Metrics) -> Host:
        """A host whose connections belong to this process."""
        return Host(self._connect, metrics, lease_seconds=LEASE_SECONDS, shutdown_seconds=self._stop_seconds)

    async def _connect(self) -> Transport:
        return self.transport()

    async def wire(self, host: Host, buses: list[EventBus]) -> None:
        """Add what this process does."""
        if self._serves == "tool":
            host.consume(buses, ["tool"], self._calls, service=self.name)
            return
        app: App | AppWithObjects = self._app
        streams = ["agent"]
        replies: list[Replies | None] = [None] * len(buses)
        if self._objects:
            app = AppWithObjects(self._app)
            started = [Replies(bus, self.name, await host.connect()) for bus in await host.open(self.partitions)]
            for each in started:
                each.start()
            replies = [*started]
            streams.append(OBJECTS)

        def turns(bus: EventBus) -> DeliveryHandler:
            return TurnHandler(bus, app, host.metrics, partitions=len(buses), replies=replies[bus.keys.partition])

        host.consume(buses, streams, turns, service=self.name)
        if isinstance(app, AppWithObjects):
            host.add(stop=app.stop)

    def _calls(self, bus: EventBus) -> DeliveryHandler:
        return CallHandler(bus, self._app.tools, _NO_THREADS, AbandonedThreads(), self._metrics)

    @property
    def owners(self) -> list[EventBus]:
        """The buses whose owners hold its deliveries."""
        return [consumer._bus for consumer in self._host.consumers] if self._host is not None else []


class RelayProcess(Process):
    """The part of a state-manager that relays requests and answers between partitions."""

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
    """Starts due schedules if no state-manager runs. Nobody leads: several may run side by side."""

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
