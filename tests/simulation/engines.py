"""Clusters that run the compute steps of gateways, and what stands in for a gateway's driver process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.calls.engine_gateway import RAY, SPARK, EngineGateway, ServedEngine
from runtime_core.engines.driver.driver import Driver, RunningCall
from runtime_core.engines.protocol import (
    Cancel,
    ConnectionState,
    Error,
    Forget,
    Outcome,
    Registered,
    RunCall,
    ToDriver,
    Value,
    Work,
)
from runtime_core.host.app_services import add_gateway
from runtime_core.host.host import Host
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from tests.simulation.ledger import Ledger
from tests.simulation.processes import LEASE_SECONDS, HandlerProcess
from weft import App

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.scheduler import Scheduler

ENGINES = {"ray": RAY, "spark": SPARK}
PAUSED_SECONDS = 0.2
"""How often a driver looks whether its gateway, which is paused, takes a message."""


@dataclass(eq=False)
class Job:
    """One call of a function on a cluster."""

    work: Work
    callers: list[tuple[SimulatedDriver, int]] = field(default_factory=list)
    outcome: Outcome | None = None
    gone: bool = False
    """Whether it was stopped, or lost with its cluster."""

    @property
    def runs(self) -> bool:
        return self.outcome is None and not self.gone


class Cluster:
    """Runs jobs beside all processes. Where its engine attaches, a job outlives its gateway and is found by its key."""

    def __init__(self, engine: ServedEngine, scheduler: Scheduler, ledger: Ledger) -> None:
        self.engine = engine
        self.drivers: list[SimulatedDriver] = []
        self.jobs: list[Job] = []
        self._scheduler = scheduler
        self._ledger = ledger
        self._started: dict[tuple[str, str], int] = {}

    def run(self, driver: SimulatedDriver, number: int, work: Work) -> None:
        """Begin a call, or attach to the one with this key."""
        job = self._found(work.key) if self.engine.attaches else None
        if job is None:
            job = self._begin(work)
        job.callers.append((driver, number))
        if job.outcome is not None:
            self._tell(job)

    def stop(self, driver: SimulatedDriver, number: int) -> None:
        for job in self.jobs:
            if (driver, number) in job.callers and job.runs:
                job.gone = True
                job.outcome = Error("cancelled", "Cancelled", "it was stopped on request")
                self._tell(job)

    def forget(self, key: str) -> None:
        self.jobs = [job for job in self.jobs if job.work.key != key or job.runs]

    def lose(self, seconds: float) -> None:
        """The cluster is lost with all that runs on it, and comes back after a while."""
        for job in self.jobs:
            job.gone = True
        self.jobs.clear()
        for driver in self.drivers:
            driver.tell(partial(driver.lose, "the cluster is lost", seconds))

    def lose_jobs_of(self, driver: SimulatedDriver) -> None:
        """What ends with a driver, where jobs do not outlive it."""
        if not self.engine.attaches:
            for job in self.jobs:
                job.gone = job.gone or any(caller is driver for caller, _ in job.callers)

    def _found(self, key: str) -> Job | None:
        return next((job for job in self.jobs if job.work.key == key and not job.gone), None)

    def _begin(self, work: Work) -> Job:
        place = work.step.task, work.step.run
        if self.engine.attaches and any(
            (job.work.step.task, job.work.step.run) == place and job.runs for job in self.jobs
        ):
            self._ledger.broken.append(("job beside", f"two jobs of task {place[0]}, run {place[1]} run at once"))
        self._ledger.job_begins(*place)
        count = self._started[place] = self._started.get(place, 0) + 1
        job = Job(work)
        self.jobs.append(job)
        asked = msgspec.json.decode(cast(Registered, work.call).arguments)
        end = partial(self._end, job, count, asked["fails"])
        self._scheduler.loop.call_later(asked["seconds"], end, context=self._scheduler.context)
        return job

    def _end(self, job: Job, count: int, fails: int) -> None:
        alive = self.engine.attaches or any(not driver.process.dead for driver, _ in job.callers)
        if not job.runs or not alive:
            return
        job.outcome = Value(b"%d" % count)
        if count <= fails:
            job.outcome = Error("function", "RuntimeError", f"attempt {count} fails")
        self._tell(job)

    def _tell(self, job: Job) -> None:
        assert job.outcome is not None
        callers, job.callers = job.callers, []
        for driver, number in callers:
            driver.tell(partial(driver.end, number, job.outcome))


class _Connection:
    """What a driver has while it is connected: in place of its process."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self.begun: dict[int, RunningCall] = {}
        self.frames = self
        self._driver = driver

    def send(self, message: ToDriver) -> None:
        cluster = self._driver.cluster
        match message:
            case RunCall(id=number, work=work):
                cluster.run(self._driver, number, work)
            case Cancel(id=number):
                cluster.stop(self._driver, number)
            case Forget(key=key):
                cluster.forget(key)


class SimulatedDriver(Driver):
    """The near end of a driver as it is, without a process at its far end."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        super().__init__(cluster.engine.name, {})
        self.cluster = cluster
        self.process = process
        cluster.drivers.append(self)

    async def start(self) -> None:
        self.connect()

    def connect(self) -> None:
        if not self._stopping:
            self._process = cast(Any, _Connection(self))
            self._set_state(ConnectionState(True))

    async def stop(self) -> None:
        self._stopping = True
        self.lose("its driver process has ended", 0.0)

    def lose(self, reason: str, seconds: float) -> None:
        """The driver's process ends, with what runs through it. Another one connects after a while."""
        connection, self._process = self._process, None
        self._set_state(ConnectionState(False, reason))
        self.cluster.lose_jobs_of(self)
        if connection is not None:
            for begun in list(connection.begun.values()):
                begun.settle(Error("lost", "EngineLost", reason))
            if not self._stopping:
                self.process.scheduler.loop.call_later(seconds, self.connect)

    def end(self, number: int, outcome: Outcome) -> None:
        begun = self._process.begun.pop(number, None) if self._process is not None else None
        if begun is not None:
            begun.settle(outcome)

    def tell(self, message: Callable[[], None]) -> None:
        """Let the gateway's process take a message, once it runs."""
        scheduler = self.process.scheduler
        if self.process.paused:
            scheduler.loop.call_later(PAUSED_SECONDS, self.tell, message, context=scheduler.context)
        elif not self.process.dead:
            self.process.enter(message)


class GatewayProcess(HandlerProcess):
    """A gateway of one engine, on a simulated cluster."""

    def __init__(
        self, scheduler: Scheduler, name: str, cluster: Cluster, app: App, metrics: Metrics, stop_seconds: float
    ) -> None:
        super().__init__(scheduler, name, cluster.engine.name, app, metrics, stop_seconds)
        self._cluster = cluster

    async def wire(self, host: Host, buses: list[EventBus]) -> None:
        settings = Settings(
            data_dir=Path("/"), trajectory_url="", namespace=self.scheduler.namespace, lease_seconds=LEASE_SECONDS
        )
        gateway = EngineGateway(self._cluster.engine, self._app.functions, settings, host.metrics)
        gateway.driver = SimulatedDriver(self._cluster, self)
        add_gateway(host, gateway, buses, settings)
