"""Reads deliveries, keeps their owner alive, and reclaims those of dead owners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from runtime_core.bus.connection import Transport
from runtime_core.bus.deliveries import Adopted, Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, group_of
from runtime_core.consumer.heartbeat import BEATS_PER_LEASE, MAX_ENDED_TASKS, Owner
from runtime_core.consumer.in_flight import DeliveryHandler, InFlight, Place
from runtime_core.consumer.progress import Health, ProgressWatch
from runtime_core.errors import BusError, BusLost, BusUnavailable, ConfigurationError, Fenced
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 500
PROMOTE_SECONDS = 0.1
READ_AT_ONCE = 48
"""Larger batches run in lockstep: while one service works, the services behind it wait."""
HEAD_START_SECONDS = 0.02
"""How long a reclaimed delivery runs before the next one is reclaimed, unless it ends earlier."""
WITHDRAWN = "withdrawn:"
"""The prefix of a task in a heartbeat's reply if nobody wants its answer, but it continues (`withdraw_request.lua`)."""
RECALL_PAGE = 1000
_REFILLED = (GROUPS["agent"], GROUPS["tool"])
"""The groups whose streams have queues of waiting tasks and calls."""


class Consumer:
    """One service's consumer on one partition.

    Deliveries come from reads, from dead owners (`adopt` reclaims them), and from reads whose reply was lost: the group
    counts their entries as this owner's (reconciliation). At most `in_flight` are held.
    """

    def __init__(
        self,
        bus: EventBus,
        streams: Sequence[str],
        handler: DeliveryHandler,
        metrics: Metrics,
        *,
        service: str,
        lease_seconds: float = 3.0,
        in_flight: int = 256,
        finish_seconds: float | None = None,
        cancel_grace_seconds: float | None = None,
        stall_seconds: float | None = None,
        work_seconds: float = 0.0,
    ) -> None:
        """`finish_seconds`: how long a stop waits for running deliveries before it hands them back; None: until they
        have ended.

        `cancel_grace_seconds`: how long cancelled deliveries may then take to end; None: no limit.

        `stall_seconds`: how long the held deliveries may make no progress before the consumer counts as stalled; None:
        the longer of 30 seconds and ten leases.

        `work_seconds`: how long one delivery may run. That time does not count as a stall.
        """
        self._bus = bus
        self._streams = list(streams)
        self._handler = handler
        self._metrics = metrics
        self._lease = lease_seconds
        self._limit = in_flight
        self._finish_seconds = finish_seconds
        self._cancel_grace_seconds = cancel_grace_seconds
        self._owner = Owner(bus, service, lease_seconds)
        self._watch = ProgressWatch(
            max(30.0, 10 * lease_seconds) if stall_seconds is None else stall_seconds, work_seconds=work_seconds
        )
        self._in_flight = InFlight(
            bus, handler, metrics, self._watch, limit=in_flight, on_fenced=self._on_fenced, on_failure=self._fail
        )
        self._held = self._in_flight.held
        self._rejoining = False
        """Whether this owner was declared dead and has no new name yet."""
        self._stop = asyncio.Event()
        self._alone: str | None = None
        """The stream of a quarantined entry that runs alone, or is about to."""
        self._alone_since = 0.0
        self._in_read = False
        self._reconciled: set[Place] = set()
        """Entries that reconciliation took during the current read. The read's reply must not deliver them again."""
        self._reading: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._connected = False
        self._failure: ConfigurationError | BusLost | None = None

    async def start(self) -> None:
        """Create the consumer groups, register the owner, and learn which tasks have ended."""
        await self._bus.make_groups(self._streams)
        await self._owner.enter()
        await self._owner.alive_until(self._recall_ended())
        self._connected = True

    async def run(self) -> None:
        """Work until `stop`."""
        if self._stop.is_set():
            return  # stopped before this task began: nothing would end its loops
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(self._send_heartbeats(), name="heartbeat"),
            loop.create_task(self._adopt_and_reconcile(), name="adopt and reconcile"),
            loop.create_task(self._promote_timers(), name="promote timers"),
        ]
        self._reading = loop.create_task(self._read(), name="read")
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def add_streams(self, streams: Sequence[str]) -> None:
        """Read these streams as well."""
        new = [stream for stream in streams if stream not in self._streams]
        if not new:
            return
        await self._bus.make_groups(new)
        self._streams += new
        if self._reading is not None and not self._stop.is_set():
            # The pending read does not include them. Reconciliation finds the entries that its reply would deliver.
            self._reading.cancel()
            await asyncio.wait((self._reading,))
            self._in_flight.unreconciled = True
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="read")

    async def stop(self) -> None:
        """Stop taking, wait for running deliveries (`finish_seconds`), hand back the rest, leave.

        The heartbeat continues until the last settle, so that nobody reclaims unfinished deliveries.
        """
        self._close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        flight = self._in_flight
        try:
            if flight.running:
                await flight.finish(self._finish_seconds)
                await flight.hand_back(self._cancel_grace_seconds)
        finally:
            # A malformed entry that is not a dead letter yet stays pending: its next owner makes it one.
            for task in (*self._loops, *flight.running.values(), *flight.burying):
                task.cancel()
            if ending := (*self._loops, *flight.burying):
                await asyncio.wait(ending)
        # Ends warm runs. The closing of the event loop would report each of them as a defect.
        self._handler.forget()
        with contextlib.suppress(BusError, Fenced, TimeoutError):
            async with asyncio.timeout(2):
                unknown = [
                    item
                    for stream in self._streams
                    for item in (await self._bus.reopen(stream, await self._bus.own_pending(stream)))[0]
                ]
                await self._bus.leave(unknown)

    async def beat_beside(self, connect: Callable[[], Awaitable[Transport]], lasts: Callable[[], bool]) -> None:
        """Send heartbeats from the loop of another thread while `lasts` returns True, over a separate connection."""
        transport = await connect()
        try:
            await self._owner.beat_beside(EventBus(transport, self._bus.keys), lasts)
        finally:
            await transport.close()

    @property
    def held(self) -> int:
        """The number of deliveries that this consumer holds."""
        return len(self._held)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the broker last confirmed the heartbeat."""
        return self._owner.silent_seconds

    @property
    def stalled_seconds(self) -> float:
        """How long the held deliveries have waited without progress."""
        return self._watch.stalled_seconds

    @property
    def alone_seconds(self) -> float:
        """How long this consumer has taken nothing but quarantined entries; 0 if it takes others."""
        return time.monotonic() - self._alone_since if self._alone is not None else 0.0

    def ready(self) -> bool:
        return self._connected and not self._stop.is_set()

    def progress(self) -> Health:
        return self._watch.health()

    def _close(self) -> None:
        self._in_flight.closed = True
        self._stop.set()

    def _fail(self, error: ConfigurationError | BusLost) -> None:
        """Stop, and let `run` raise the error."""
        self._failure = error
        self._close()

    # -- taking ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        backoff = 0.05
        while True:
            # Reads have a separate connection. A read before the first heartbeat would use a name that counts as
            # dead, and others would reclaim its entries.
            while len(self._held) >= self._limit or self._alone is not None or self._rejoining:
                if not self._held:
                    self._in_flight.became_idle.set()
                self._in_flight.has_room.clear()
                await self._in_flight.has_room.wait()
            self._in_read = True
            self._reconciled.clear()
            owner = self._bus.owner
            count = min(READ_AT_ONCE, self._limit - len(self._held))
            try:
                if self._bus.queued and group_of(self._streams[0]) in _REFILLED:
                    # `promote` runs ten times a second, and its reply says whether tasks or calls wait for their turn.
                    await self._bus.refill(count, self._streams)
                taken, malformed = await self._bus.read(self._streams, count, READ_BLOCK_MS)
            except BusLost as lost:
                self._fail(lost)
                for task in self._loops:
                    task.cancel()
                return
            except BusUnavailable:
                # The reply may have been lost with the connection. Reconciliation finds its entries.
                self._in_flight.unreconciled = True
                self._connected = False
                await asyncio.sleep(backoff)
                backoff = min(1.0, backoff * 2)
                continue
            except BusError:
                logger.exception("cannot read %s", ", ".join(self._streams))
                await asyncio.sleep(backoff)
                backoff = min(1.0, backoff * 2)
                continue
            finally:
                self._in_read = False
            backoff = 0.05
            self._connected = True
            if owner == self._bus.owner:
                if self._reconciled:
                    taken, malformed = self._not_reconciled(taken, malformed)
                self._in_flight.take(taken, malformed)

    def _not_reconciled(
        self, taken: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]]
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        """Return the entries of a read without those that reconciliation took while the reply was on its way."""
        fresh = [delivery for delivery in taken if (delivery.stream, delivery.entry) not in self._reconciled]
        self._metrics.duplicates_suppressed.inc(len(taken) - len(fresh))
        return fresh, [each for each in malformed if each[:2] not in self._reconciled]

    # -- keeping -----------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and stop running work of the tasks that they report."""
        interval = self._lease / BEATS_PER_LEASE
        while True:
            try:
                since_ms = self._owner.at_ms
                self._watch.asks_broker(self)
                stopped = await self._owner.beat()
                self._watch.broker_answered(self)
                self._in_flight.ended.add_reported(stopped, self._owner.at_ms, since_ms)
                for task in stopped:
                    if task.startswith(WITHDRAWN):
                        self._handler.stop_task(task.removeprefix(WITHDRAWN))
                    else:
                        self._in_flight.stop_task(task)
            except Fenced:
                self._on_fenced()
            except BusError as error:
                # A broker that refuses heartbeats, as with a full disk, is like an unreachable one: wait for it.
                logger.warning("heartbeat: %s", error)
            await asyncio.sleep(interval)

    async def _recall_ended(self) -> None:
        """Learn which tasks ended before this process began: their work may still be queued."""
        found: list[tuple[str, int]] = []
        while len(found) < MAX_ENDED_TASKS:
            page = await self._bus.recently_stopped(len(found), RECALL_PAGE)
            found += page
            if len(page) < RECALL_PAGE:
                break
        else:
            self._in_flight.ended.since_ms = found[-1][1]
        self._in_flight.ended.add_remembered(reversed(found), self._owner.at_ms)

    def _on_fenced(self) -> None:
        """Drop all deliveries, since this owner was declared dead and others own them, and rejoin under a new name."""
        if any(task.get_name() == "rejoin" for task in self._loops if not task.done()):
            return
        logger.warning(
            "this owner was declared dead: its heartbeat was late; dropping %d deliveries and rejoining",
            len(self._held),
        )
        self._in_flight.drop()
        self._rejoining = True
        self._loops.append(asyncio.get_running_loop().create_task(self._rejoin(), name="rejoin"))

    async def _rejoin(self) -> None:
        while not self._stop.is_set():
            try:
                await self._owner.enter()
            except BusError:
                await asyncio.sleep(0.1)
            else:
                self._in_flight.unreconciled = True
                self._rejoining = False
                self._in_flight.has_room.set()
                break
        self._loops = [task for task in self._loops if not task.done() and task is not asyncio.current_task()]

    async def _adopt_and_reconcile(self) -> None:
        """Reclaim from dead owners. Each lease, and after each reconnect, reconcile with the group's pending list."""
        loop = asyncio.get_running_loop()
        reconnects, reconciled_at = self._bus.transport.reconnects, 0.0
        while True:
            try:
                if self._bus.transport.reconnects != reconnects:
                    reconnects, self._in_flight.unreconciled = self._bus.transport.reconnects, True
                if self._in_flight.unreconciled or loop.time() - reconciled_at > self._lease:
                    self._in_flight.unreconciled = False
                    await self._reconcile()
                    reconciled_at = loop.time()
                for stream in self._streams:
                    await self._adopt(stream)
            except Fenced:
                self._on_fenced()
            except BusError as error:
                logger.warning("reclaiming deliveries: %s", error)
            except Exception:
                logger.exception("reclaiming deliveries: unexpected error")
            if self._alone is None:
                await asyncio.sleep(self._lease / 4)
            else:
                # All other work waits for the quarantined entries: begin each of them as soon as nothing else runs.
                self._in_flight.became_idle.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._lease / 4):
                        await self._in_flight.became_idle.wait()

    async def _reconcile(self) -> None:
        for stream in self._streams:
            await self._bus.join(stream)  # the group may have been lost
            before = set(self._held)
            pending = await self._bus.own_pending(stream)
            # Entries held before or now were settled or taken while the reply was on its way.
            unknown = {
                entry: count
                for entry, count in pending.items()
                if (stream, entry) not in before and (stream, entry) not in self._held
            }
            if not unknown:
                continue
            # A read with its reply on the way looks the same: take only entries that stay unknown.
            await asyncio.sleep(READ_BLOCK_MS / 1000 / 2)
            still = await self._bus.own_pending(stream)
            lost = {
                entry: count for entry, count in still.items() if entry in unknown and (stream, entry) not in self._held
            }
            if lost:
                logger.info("taking %d deliveries of %s whose reply was lost", len(lost), stream)
                # First, since a late reply of a read may deliver them during `reopen` or after it.
                self._reconciled.update((stream, entry) for entry in lost)
                self._in_flight.take_pending(*await self._bus.reopen(stream, lost))

    async def _adopt(self, stream: str) -> None:
        if self._alone is not None:
            if stream != self._alone:
                return  # this consumer is about to run a quarantined entry alone
            # Nothing may run beside a quarantined entry: no held delivery, and none that a read returns. A turn that
            # waits in the middle does not run, and may wait for an entry that only this process takes.
            while not self._in_read and not self._stop.is_set() and all(each.waits for each in self._held.values()):
                adopted = await self._bus.adopt(stream, 1, idle=True)
                if not adopted.must_be_idle and not adopted.deliveries:
                    logger.info("reading on: nothing of %s runs alone after %.1f s", stream, self.alone_seconds)
                    self._alone = None
                    self._in_flight.has_room.set()
                if not await self._take_adopted(adopted) or self._alone is None or self._in_flight.unreconciled:
                    break  # an unreconciled entry may still be this owner's
            return
        # One by one, each with a head start: an entry that kills its process immediately does so before others are
        # reclaimed, so they need not wait for another lease.
        count = 0
        while len(self._held) < self._limit and not self._stop.is_set():
            adopted = await self._bus.adopt(stream, 1, idle=False)
            if adopted.must_be_idle:
                logger.warning(
                    "an entry of %s was delivered too often: waiting for other deliveries to end, to run it alone",
                    stream,
                )
                self._alone, self._alone_since = stream, time.monotonic()
            taken = await self._take_adopted(adopted)
            if not taken:
                break
            count += taken
        if count:
            logger.info("reclaimed %d deliveries of %s from dead owners", count, stream)

    async def _take_adopted(self, adopted: Adopted) -> int:
        """Take the reclaimed entries and give each a head start. Return their number."""
        count = len(adopted.deliveries) + len(adopted.condemned) + len(adopted.malformed)
        self._metrics.adopted_deliveries.inc(count)
        for delivery in adopted.condemned:
            await self._condemn(delivery)
        self._in_flight.take_pending(adopted.deliveries, adopted.malformed)
        started = [
            self._in_flight.running[place]
            for delivery in adopted.deliveries
            if (place := (delivery.stream, delivery.entry)) in self._in_flight.running
        ]
        if started:
            await asyncio.wait(started, timeout=HEAD_START_SECONDS)
        return count

    async def _condemn(self, delivery: Delivery) -> None:
        why = (
            f"{delivery.name} ended its process, or blocked its event loop, on {delivery.deliveries - 1} deliveries, "
            "even while it ran alone"
        )
        await self._in_flight.bury(delivery.stream, delivery.entry, why, "poison")
        await self._bus.leave_quarantine(delivery)

    async def _promote_timers(self) -> None:
        while True:
            try:
                done, _ = await self._bus.promote()
                if done:
                    continue
            except BusError as error:
                logger.warning("timers: %s", error)
            await asyncio.sleep(PROMOTE_SECONDS)
