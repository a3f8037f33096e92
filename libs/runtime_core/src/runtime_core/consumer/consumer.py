"""Takes deliveries, passes each to its handler, tracks those it holds, and reclaims those of dead owners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, group_of
from runtime_core.bus.values import Adopted, Delivery
from runtime_core.consumer.ended_tasks import MOST_TASKS, EndedTasks
from runtime_core.consumer.owner import Owner
from runtime_core.consumer.progress import Health, ProgressWatch
from runtime_core.errors import BusError, BusUnavailable, ConfigurationError, Fenced
from runtime_core.record.step import ENCODER, StepError
from runtime_core.telemetry.logs import HANDLED
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

BLOCK_MS = 500
PROMOTE_SECONDS = 0.1
READ_AT_ONCE = 48
"""Larger batches run in lockstep: while one service works, those behind it wait."""
HEAD_START_SECONDS = 0.02
"""How long an adopted delivery runs before the next one is adopted, unless it ends sooner."""
DEFECT_ATTEMPTS = 20
STOPPED = "the task is over"
"""The message of a handler's CancelledError if its task has ended; without it, others take the delivery."""
WITHDRAWN = "withdrawn:"
"""The prefix of a task in heartbeats if nobody wants its answer, but it continues (`withdraw.lua`)."""
RECALL_AT_ONCE = 1000
DRAIN_PART = 0.25
"""The share of the stop time in which no further step begins: an interrupted step has to run again."""
Place = tuple[str, bytes]
"""A stream and the id of one of its entries."""


class Handler(Protocol):
    """What a service does with a delivery. It settles the delivery itself, through the bus."""

    async def handle(self, delivery: Delivery) -> None:
        """Run and settle one delivery. May raise Fenced or BusError; anything else is a defect of the handler."""
        ...

    def forget(self) -> None:
        """Drop everything kept between deliveries: this owner was declared dead."""
        ...

    def drain(self) -> None:
        """Begin no further step here: this process stops, and another one continues from the journal."""
        ...

    def stop_task(self, task: str) -> None:
        """This task ended early, or nobody wants its answer: inform its running work."""
        ...


class Consumer:
    """One service's consumer on one partition.

    Deliveries come from three places: a read, the adoption of what dead owners held, and entries that the group
    counts as this owner's though it does not know them (a read whose reply was lost). At most `in_flight` are held.
    """

    def __init__(
        self,
        bus: EventBus,
        streams: Sequence[str],
        handler: Handler,
        metrics: Metrics,
        *,
        service: str,
        lease_seconds: float = 3.0,
        in_flight: int = 256,
        finish_seconds: float | None = None,
        let_go_seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        """`finish_seconds`: how long a stop waits for running deliveries before it hands them back; None: until they
        have ended.

        `let_go_seconds`: how long cancelled deliveries may then take to end; None: as long as they need.

        `stall_seconds`: how long the held deliveries may make no progress before the consumer counts as stalled; None:
        30 seconds, or ten leases.
        """
        self._bus = bus
        self._streams = list(streams)
        self._handler = handler
        self._metrics = metrics
        self._lease = lease_seconds
        self._limit = in_flight
        self._finish_seconds = finish_seconds
        self._let_go_seconds = let_go_seconds
        self._owner = Owner(bus, service, lease_seconds)
        self._held: dict[Place, Delivery] = {}
        self._running: dict[Place, asyncio.Task[None]] = {}
        self._stopped_tasks: set[str] = set()
        self._ended = EndedTasks()
        self._room = asyncio.Event()
        self._known = asyncio.Event()
        self._full = False
        self._stop = asyncio.Event()
        self._alone: str | None = None
        """The stream of the entry that should run alone, or does."""
        self._in_read = False
        self._reconciled: set[Place] = set()
        """Entries that reconciling took since the current read began: a late reply must not deliver them again."""
        self._reading: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._burying: set[asyncio.Task[None]] = set()
        self._unreconciled = True
        self._watch = ProgressWatch(max(30.0, 10 * lease_seconds) if stall_seconds is None else stall_seconds)
        self._connected = False
        self._failure: ConfigurationError | None = None

    async def start(self) -> None:
        """Create groups, register, and take the deliveries that earlier owners left."""
        await self._bus.make_groups(self._streams)
        await self._owner.enter()
        await self._recall_ended()
        self._known.set()
        self._connected = True

    async def run(self) -> None:
        """Work until `stop`."""
        self._room.set()
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(self._beating(), name="heartbeat"),
            loop.create_task(self._tending(), name="adopt and reconcile"),
            loop.create_task(self._promoting(), name="promote timers"),
        ]
        self._reading = loop.create_task(self._read(), name="read")
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def add_streams(self, streams: Sequence[str]) -> None:
        """Read these streams too, from now on."""
        new = [stream for stream in streams if stream not in self._streams]
        if not new:
            return
        await self._bus.make_groups(new)
        self._streams += new
        if self._reading is not None and not self._stop.is_set():
            # The waiting read does not include them. Reconciling finds the entries that its reply may have brought.
            self._reading.cancel()
            await asyncio.wait((self._reading,))
            self._unreconciled = True
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="read")

    async def stop(self) -> None:
        """Stop taking, finish running deliveries (for `finish_seconds`), hand back the rest, leave.

        The heartbeat continues until the last settle, so that nobody adopts unfinished deliveries.
        """
        self._stop.set()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        try:
            if self._running:
                await self._finish()
                await self._hand_back()
        finally:
            # An entry that is not buried yet stays with this owner's group: whoever adopts it buries it.
            for task in (*self._loops, *self._running.values(), *self._burying):
                task.cancel()
            if ending := (*self._loops, *self._burying):
                await asyncio.wait(ending)
        # Waits that are kept warm end here, and not by the closing of the loop, which takes each for a defect.
        self._handler.forget()
        with contextlib.suppress(BusError, Fenced, TimeoutError):
            async with asyncio.timeout(2):
                unknown = [
                    item
                    for stream in self._streams
                    for item in (await self._bus.reopen(stream, await self._bus.own_pending(stream)))[0]
                ]
                await self._bus.leave(unknown)

    async def _finish(self) -> None:
        """Let running deliveries end; in the last part of the time they may only finish their current step."""
        seconds = self._finish_seconds
        part = None if seconds is None else seconds * (1 - DRAIN_PART)
        _, left = await asyncio.wait(list(self._running.values()), timeout=part)
        if left and seconds is not None:
            self._handler.drain()
            await asyncio.wait(left, timeout=seconds * DRAIN_PART)

    async def _hand_back(self) -> None:
        """Hand back deliveries that still run; the heartbeat continues, so that nobody adopts them before.

        Code that does not end when it is cancelled is abandoned: once this owner has left, its writes do not count.
        """
        left = list(self._running.values())
        if left:
            logger.info("%d deliveries run still; others go on with them", len(left))
            for task in left:
                task.cancel()
            _, stays = await asyncio.wait(left, timeout=self._let_go_seconds)
            if stays:
                logger.warning("%d of them do not end when they are cancelled: they end with the process", len(stays))

    @property
    def held(self) -> int:
        """The number of held deliveries that are not settled."""
        return len(self._held)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the broker last confirmed the heartbeat."""
        return self._owner.silent_seconds

    @property
    def stalled_seconds(self) -> float:
        """How long the held deliveries have waited without progress."""
        return self._watch.stalled_seconds

    def ready(self) -> bool:
        return self._connected and not self._stop.is_set()

    def progress(self) -> Health:
        return self._watch.health()

    # -- taking ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        backoff = 0.05
        while True:
            await self._room.wait()
            # Reads have a separate connection: one that came before the first beat would be under a name that
            # counts as dead, and others would adopt its entries.
            await self._known.wait()
            self._in_read = True
            self._reconciled.clear()
            owner = self._bus.owner
            count = min(READ_AT_ONCE, self._limit - len(self._held))
            try:
                if self._bus.queued and group_of(self._streams[0]) == GROUPS["agent"]:
                    # Promote timers ten times a second; the reply also says whether new tasks wait for their turns.
                    await self._bus.refill(count, self._streams)
                taken, malformed = await self._bus.read(self._streams, count, BLOCK_MS)
            except BusUnavailable:
                # The reply may have been lost with the connection: reconciling finds its entries.
                self._unreconciled = True
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
                self._take_read(taken, malformed)

    def _take_read(self, taken: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]]) -> None:
        """Take the entries of a read, without those that reconciling took while the reply was on its way."""
        if not self._reconciled:
            self._take(taken, malformed)
            return
        fresh = [delivery for delivery in taken if (delivery.stream, delivery.entry) not in self._reconciled]
        self._metrics.duplicates_suppressed.inc(len(taken) - len(fresh))
        self._take(fresh, [each for each in malformed if each[:2] not in self._reconciled])

    def _take(self, deliveries: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]] = ()) -> None:
        loop = asyncio.get_running_loop()
        # Deliveries that arrive during a stop do not start: they are handed back unchanged.
        for delivery in () if self._stop.is_set() else deliveries:
            place = (delivery.stream, delivery.entry)
            if place in self._held:
                self._metrics.duplicates_suppressed.inc()
                continue
            self._held[place] = delivery
            self._running[place] = task = loop.create_task(self._handle(place, delivery))
            task.add_done_callback(partial(self._drop_unbegun, place))
        for stream, entry, why in malformed:
            burying = loop.create_task(self._bury(stream, entry, why), name="bury")
            self._burying.add(burying)
            burying.add_done_callback(self._buried)
        if len(self._held) >= self._limit or self._alone is not None:
            self._full = True
            self._room.clear()
        self._watch.waiting(bool(self._held))

    def _buried(self, burying: asyncio.Task[None]) -> None:
        self._burying.discard(burying)
        if not burying.cancelled() and (error := burying.exception()) is not None:
            logger.error("could not keep a dead letter: %s", error)

    def _drop_unbegun(self, place: Place, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before its first step has run nothing, not even its clean-up."""
        if self._running.get(place) is task:
            self._let_go(place)
            self._unreconciled = True

    async def _handle(self, place: Place, delivery: Delivery) -> None:
        started = time.perf_counter()
        outcome = "handled"
        HANDLED.set(delivery)  # this task's own: nothing has to be restored
        try:
            if self._may_be_over(delivery) and await self._settle_if_over(delivery):
                outcome = "stopped"
            else:
                await self._handler.handle(delivery)
                if delivery.quarantined:
                    await self._bus.leave_quarantine(delivery)
        except Fenced:
            outcome = "fenced"
            self._metrics.fenced_commits.inc()
            self._on_fenced(self._bus.owner)
        except asyncio.CancelledError:
            if delivery.task not in self._stopped_tasks:
                raise
            # The task is over: settling its delivery acknowledges it and frees its instance.
            outcome = "stopped"
            with contextlib.suppress(Fenced):
                await self._settle(delivery)
        except BusUnavailable as error:
            outcome = "bus_error"
            logger.error("%r stays with this owner: %s", delivery, error)
            self._unreconciled = True
        except Exception:
            outcome = "defect"
            logger.exception("the handler itself failed on %r", delivery)
            try:
                await self._after_defect(delivery)
            except (Fenced, BusError) as error:
                logger.error("%r stays with this owner: %s", delivery, error)
                self._unreconciled = True
        finally:
            self._let_go(place)
        self._metrics.events_handled[outcome].inc()
        self._metrics.handler_seconds.observe(time.perf_counter() - started)
        self._watch.progressed()

    def _may_be_over(self, delivery: Delivery) -> bool:
        """Whether its task has ended early, as far as this process knows, or may have ended before it could know."""
        entry_ms = int(delivery.entry.partition(b"-")[0])
        return delivery.task in self._ended or entry_ms <= self._ended.since_ms

    async def _settle_if_over(self, delivery: Delivery) -> bool:
        """Settle a delivery whose task has ended, without running it. False: its task continues, so run it."""
        if delivery.task not in self._ended and await self._bus.is_live(delivery.task):
            return False
        await self._settle(delivery)
        return True

    async def _settle(self, delivery: Delivery) -> None:
        """Acknowledge a delivery of an ended task and free its instance; the broker decides whether it has ended."""
        if await self._bus.retry(delivery, 0, b"", counts=False):
            # It was reopened, and its work is back on its stream.
            self._ended.forget(delivery.task)

    async def _after_defect(self, delivery: Delivery) -> None:
        """An error of Weft's own code, or of the server: retried occasionally, but not forever."""
        if delivery.attempt < DEFECT_ATTEMPTS:
            await self._bus.retry(delivery, 1000, b"")
        else:
            await self._bury(delivery.stream, delivery.entry, "the handler itself failed on it each time", "defect")

    def _let_go(self, place: Place) -> None:
        self._held.pop(place, None)
        self._running.pop(place, None)
        if not self._held:
            self._stopped_tasks.clear()
            self._watch.waiting(False)
        if self._full and self._alone is None:
            self._full = False
            self._room.set()

    async def _bury(self, stream: str, entry: bytes, why: str, reason: str = "malformed") -> None:
        if reason == "malformed" and await self._bus.namespace_is_newer():
            # Not for this release: end, and leave it to the replicas that can read it.
            self._failure = ConfigurationError(f"an entry of {stream} {why}: update this service")
            self._stop.set()
            return
        error = StepError(reason.capitalize(), why, at=time.time() * 1000)
        await self._bus.dead_letter(
            stream, entry, reason, ENCODER.encode([error]), int(time.time() * 1000), ENCODER.encode(error)
        )
        self._metrics.dead_letters[reason].inc()
        logger.warning("an entry of %s is kept as a dead letter (%s): %s", stream, reason, why)

    # -- keeping -----------------------------------------------------------------------------------------------

    async def _beating(self) -> None:
        """Send the heartbeat, and pass the stopped tasks that it reports to their running work."""
        interval = self._lease / 6
        while True:
            try:
                asked_from_ms = self._owner.at_ms
                self._watch.asks_broker(self)
                told = await self._owner.beat()
                self._watch.broker_answered(self)
                self._ended.heard(told, self._owner.at_ms, asked_from_ms)
                for task in told:
                    if task.startswith(WITHDRAWN):
                        self._handler.stop_task(task.removeprefix(WITHDRAWN))
                    else:
                        self._stop_task(task)
            except Fenced:
                self._on_fenced(self._bus.owner)
            except BusError as error:
                # Wait for a broker that refuses heartbeats, as on a full disk, like for an unreachable one.
                logger.warning("heartbeat: %s", error)
            await asyncio.sleep(interval)

    async def _recall_ended(self) -> None:
        """Ask for the tasks that ended before this process began: their work may still be queued."""
        found: list[tuple[str, int]] = []
        while len(found) < MOST_TASKS:
            page = await self._bus.recently_stopped(len(found), RECALL_AT_ONCE)
            found += page
            if len(page) < RECALL_AT_ONCE:
                break
        else:
            self._ended.since_ms = found[-1][1]
        self._ended.recalled(reversed(found), self._owner.at_ms)

    def _stop_task(self, task: str) -> None:
        self._handler.stop_task(task)
        places = [place for place, delivery in self._held.items() if delivery.task == task]
        if places:
            self._stopped_tasks.add(task)
            for place in places:
                # Two beats report tasks stopped in the millisecond between them; do not disturb their clean-up.
                if not self._running[place].cancelling():
                    self._running[place].cancel(STOPPED)

    def _on_fenced(self, owner: str) -> None:
        """Others have declared this owner dead and own its deliveries: drop them all and come back under a new name."""
        if owner != self._bus.owner or any(task.get_name() == "come back" for task in self._loops if not task.done()):
            return
        logger.warning("declared dead after a silence; dropping %d deliveries and taking a new name", len(self._held))
        current = asyncio.current_task()
        for task in list(self._running.values()):
            if task is not current:
                task.cancel()
        self._handler.forget()
        self._known.clear()
        self._loops.append(asyncio.get_running_loop().create_task(self._come_back(), name="come back"))

    async def _come_back(self) -> None:
        while not self._stop.is_set():
            try:
                await self._owner.enter()
            except BusError:
                await asyncio.sleep(0.1)
            else:
                self._unreconciled = True
                self._known.set()
                break
        self._loops = [task for task in self._loops if not task.done() and task is not asyncio.current_task()]

    async def _tending(self) -> None:
        """Adopt from dead owners. Once per lease and after each reconnect, look for entries that are held without being
        known."""
        loop = asyncio.get_running_loop()
        reconnects, reconciled_at = self._bus.transport.reconnects, 0.0
        while True:
            try:
                if self._bus.transport.reconnects != reconnects:
                    reconnects, self._unreconciled = self._bus.transport.reconnects, True
                if self._unreconciled or loop.time() - reconciled_at > self._lease:
                    self._unreconciled = False
                    await self._reconcile()
                    reconciled_at = loop.time()
                for stream in self._streams:
                    await self._adopt(stream)
            except Fenced:
                self._on_fenced(self._bus.owner)
            except BusError as error:
                logger.warning("adopt: %s", error)
            except Exception:
                logger.exception("adopt: an error that nobody expected")
            await asyncio.sleep(self._lease / 4)

    async def _reconcile(self) -> None:
        for stream in self._streams:
            await self._bus.join(stream)  # again, if the group was lost meanwhile
            before = set(self._held)
            pending = await self._bus.own_pending(stream)
            # Held before or now: settled or taken while the reply was on its way.
            unknown = {
                entry: count
                for entry, count in pending.items()
                if (stream, entry) not in before and (stream, entry) not in self._held
            }
            if not unknown:
                continue
            # A read whose reply is on its way looks the same: take only entries that stay unknown.
            await asyncio.sleep(BLOCK_MS / 1000 / 2)
            still = await self._bus.own_pending(stream)
            lost = {
                entry: count for entry, count in still.items() if entry in unknown and (stream, entry) not in self._held
            }
            if lost:
                logger.info("%d deliveries of %s came with a reply that was lost; taking them", len(lost), stream)
                # First: a late reply of a read may bring them during the look-up, or after it.
                self._reconciled.update((stream, entry) for entry in lost)
                self._take(*await self._bus.reopen(stream, lost))

    async def _adopt(self, stream: str) -> None:
        if self._alone is not None:
            if stream != self._alone:
                return  # do not adopt: this consumer is about to run a quarantined entry alone
            # Nothing may run next to a quarantined entry: no held delivery, and none that a read returns. A turn that
            # waits for others does not run, and may wait for an entry that only this process would take.
            if self._in_read or not all(delivery.waits for delivery in self._held.values()):
                return
            adopted = await self._bus.adopt(stream, 1, empty_handed=True)
            if not adopted.empty_hands and not adopted.deliveries:
                self._alone = None
                self._room.set()
            await self._take_adopted(adopted)
            return
        # One after the other, each with a head start: an entry that kills its process immediately does so before its
        # neighbours are held, and they need not wait for another lease.
        count = 0
        while len(self._held) < self._limit and self._alone is None and not self._stop.is_set():
            adopted = await self._bus.adopt(stream, 1, empty_handed=False)
            if adopted.empty_hands:
                logger.warning("an entry of %s was delivered too often: emptying hands to run it alone", stream)
                self._alone = stream
                self._room.clear()
            taken = await self._take_adopted(adopted)
            if not taken:
                break
            count += taken
        if count:
            logger.info("adopted %d deliveries of %s from dead owners", count, stream)

    async def _take_adopted(self, adopted: Adopted) -> int:
        """Take the adopted entries, and give each a head start. Return how many there were."""
        count = len(adopted.deliveries) + len(adopted.condemned) + len(adopted.malformed)
        self._metrics.adopted_deliveries.inc(count)
        for delivery in adopted.condemned:
            await self._condemn(delivery)
        self._take(adopted.deliveries, adopted.malformed)
        started = [
            self._running[place]
            for delivery in adopted.deliveries
            if (place := (delivery.stream, delivery.entry)) in self._running
        ]
        if started:
            await asyncio.wait(started, timeout=HEAD_START_SECONDS)
        return count

    async def _condemn(self, delivery: Delivery) -> None:
        error = StepError(
            "Poison",
            f"{delivery.name} ended its process, or held its event loop, on {delivery.deliveries - 1} deliveries, "
            "also while it ran alone",
            at=time.time() * 1000,
        )
        await self._bus.dead_letter(
            delivery.stream,
            delivery.entry,
            "poison",
            ENCODER.encode([error]),
            int(time.time() * 1000),
            ENCODER.encode(error),
        )
        await self._bus.leave_quarantine(delivery)
        self._metrics.dead_letters["poison"].inc()
        logger.error("%r ends its process each time: kept as a dead letter", delivery)

    async def _promoting(self) -> None:
        while True:
            try:
                done, _ = await self._bus.promote()
                if done:
                    continue
            except BusError as error:
                logger.warning("timers: %s", error)
            await asyncio.sleep(PROMOTE_SECONDS)
