"""Leader election for a role: one owner leads at a time, under an epoch that fences the previous one."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.heartbeat import BEATS_PER_LEASE, Owner
from runtime_core.consumer.progress import Health, ProgressWatch
from runtime_core.errors import BusError, BusLost, Fenced, WeftError
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

REPEAT_LOG_SECONDS = 60.0
"""How long the same error of a leader's work is not logged again."""


class Leader:
    """Stands by for a role on one partition, and runs `work(epoch)` while it leads.

    When the lead is lost, `work` is cancelled. It writes under its epoch, so a late write changes nothing.
    """

    def __init__(
        self,
        bus: EventBus,
        role: str,
        service: str,
        lease_seconds: float,
        work: Callable[[int], Awaitable[None]],
        watch: ProgressWatch | None = None,
    ) -> None:
        """`watch` is notified when a heartbeat is sent and answered."""
        self._bus = bus
        self._watch = watch or ProgressWatch(math.inf)
        self._role = role
        self._lease = lease_seconds
        self._owner = Owner(bus, service, lease_seconds)
        self._work = work
        self._working: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._warned = ""
        self._warned_at = 0.0
        self._logged_epoch = 0
        self.epoch = 0
        self.floor = 0
        """The highest epoch that `work` has seen elsewhere. The next epoch is above it."""

    @property
    def silent_seconds(self) -> float:
        return self._owner.silent_seconds

    @property
    def leads(self) -> bool:
        """Whether this process leads: the broker has confirmed it within the lease."""
        return self.epoch > 0 and self.silent_seconds < self._lease

    async def start(self) -> None:
        await self._owner.enter()
        self._keeping = asyncio.create_task(self._keep(), name=f"lead {self._role}")

    async def stop(self) -> None:
        """Give up the lead, so that another process need not wait for the lease to expire."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        await self._end_work()
        try:
            async with asyncio.timeout(2):
                await self._bus.leave(())
        except (BusError, TimeoutError):
            logger.warning("could not give up the lead: another process takes it when the lease expires")

    async def _keep(self) -> None:
        while True:
            try:
                self._watch.asks_broker(self)
                await self._owner.beat()
                epoch = await self._owner.alive_until(self._bus.lead(self._role, self.floor))
                self._watch.broker_answered(self)
            except Fenced:
                logger.warning("this owner was declared dead: its heartbeat was late; rejoining under a new name")
                await self._end_work()
                try:
                    await self._owner.enter()
                except BusError as error:
                    logger.warning("%s", error)
                continue
            except BusLost:
                return
            except BusError as error:
                logger.warning("heartbeat: %s", error)
                epoch = self.epoch
            if epoch != self.epoch or self._working is None or self._working.done():
                await self._change(epoch)
            await asyncio.sleep(self._lease / BEATS_PER_LEASE)

    async def _change(self, epoch: int) -> None:
        if self._working is not None and self._working.done() and not self._working.cancelled():
            error = self._working.exception()
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # the first error ended the others
            if isinstance(error, WeftError):
                self._warn(f"{self._role}: {error}; restarting")
            elif error is not None:
                logger.error("%s: %s; restarting", self._role, error, exc_info=error)
        await self._end_work()
        if epoch and epoch != self._logged_epoch:
            logger.info("leads %s of partition %d (epoch %d)", self._role, self._bus.keys.partition, epoch)
        self._logged_epoch = epoch
        self.epoch = epoch
        if epoch:
            self._working = asyncio.create_task(self._run(epoch), name=self._role)

    def _warn(self, reason: str) -> None:
        """Log a reason, but not several times a second for as long as a disk is full."""
        now = time.monotonic()
        if reason != self._warned or now - self._warned_at > REPEAT_LOG_SECONDS:
            self._warned, self._warned_at = reason, now
            logger.warning("%s", reason)

    async def _run(self, epoch: int) -> None:
        await self._work(epoch)

    async def _end_work(self) -> None:
        if self._working is not None and not self._working.done():
            self._working.cancel()
            await asyncio.wait((self._working,))
        self.epoch = 0


class Leaders(ABC):
    """A role that one process leads on each partition, while others stand by."""

    def __init__(
        self, buses: Sequence[EventBus], roles: Sequence[str], service: str, lease_seconds: float, metrics: Metrics
    ) -> None:
        """`roles` names the role to lead on each of `buses`."""
        self._buses = buses
        self._lease = lease_seconds
        self._metrics = metrics
        self._stop = asyncio.Event()
        self._watch = ProgressWatch(limit_seconds=max(30.0, 10 * lease_seconds))
        self._leaders = [self._leader(bus, role, service) for bus, role in zip(buses, roles, strict=True)]
        metrics.show_owner(self._silent_seconds, lease_seconds)
        metrics.stalled.set_function(lambda: self._watch.stalled_seconds)
        for bus, leader in zip(buses, self._leaders, strict=True):
            metrics.show_lead(bus.keys.partition, leader)

    @abstractmethod
    async def _lead(self, bus: EventBus, leader: Leader, epoch: int) -> None:
        """Do the role's work on this partition. Cancelled when the lead is lost."""

    def _leader(self, bus: EventBus, role: str, service: str) -> Leader:
        leader = Leader(bus, role, service, self._lease, lambda epoch: self._lead(bus, leader, epoch), self._watch)
        return leader

    async def start(self) -> None:
        for bus in self._buses:
            await bus.make_groups(())
        for leader in self._leaders:
            await leader.start()

    async def run(self) -> None:
        await self._stop.wait()

    async def stop(self) -> None:
        self._stop.set()
        for leader in self._leaders:
            await leader.stop()

    def ready(self) -> bool:
        return self._silent_seconds() < self._lease

    def progress(self) -> Health:
        return self._watch.health()

    def _silent_seconds(self) -> float:
        return max(leader.silent_seconds for leader in self._leaders)
