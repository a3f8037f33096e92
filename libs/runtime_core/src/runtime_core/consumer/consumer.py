"""Takes deliveries, passes each to its handler, tracks those it holds, and reclaims those of dead owners."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Sequence
from functools import partial
from types import CoroutineType
from typing import Protocol

from runtime_core.bus.deliveries import Adopted, Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, group_of
from runtime_core.consumer.heartbeat import BEATS_PER_LEASE, MAX_ENDED_TASKS, EndedTasks, Owner
from runtime_core.consumer.progress import Health, ProgressWatch
from runtime_core.errors import BusError, BusLost, BusUnavailable, ConfigurationError, Fenced
from runtime_core.record.step import ENCODER, StepError
from runtime_core.telemetry.logs import HANDLED
from runtime_core.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

READ_BLOCK_MS = 500
PROMOTE_SECONDS = 0.1
READ_AT_ONCE = 48
"""Larger batches run in lockstep: while one service works, the services behind it wait."""
HEAD_START_SECONDS = 0.02
"""How long an adopted delivery runs before the next one is adopted, unless it ends earlier."""
DEFECT_ATTEMPTS = 20
STOPPED = "the task is over"
"""The message of a handler's CancelledError if its task has ended. Without it, another owner gets the delivery."""
WITHDRAWN = "withdrawn:"
"""The prefix of a task in a heartbeat's reply if nobody wants its answer, but it continues (`withdraw_request.lua`)."""
RECALL_PAGE = 1000
DRAIN_PART = 0.25
"""The last share of the stop time. No step begins in it, since an interrupted step has to run again."""
Place = tuple[str, bytes]
"""A stream and the id of one of its entries."""


class Handler(Protocol):
    """Handles and settles deliveries for a service."""

    async def handle(self, delivery: Delivery) -> None:
        """Run and settle one delivery. Any error but Fenced and BusError is a defect of the handler."""
        ...

    def forget(self) -> None:
        """Drop all state kept between deliveries: this owner was declared dead."""
        ...

    def drain(self) -> None:
        """Begin no further step: this process stops, and another one continues from the journal."""
        ...

    def stop_task(self, task: str) -> None:
        """Tell running work that its task ended early, or that nobody wants its answer."""
        ...


class Consumer:
    """One service's consumer on one partition.

    Deliveries come from reads, from dead owners (adoption), and from reads whose reply was lost: the group counts
    their entries as this owner's (reconciliation). At most `in_flight` are held.
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
        cancel_grace_seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        """`finish_seconds`: how long a stop waits for running deliveries before it hands them back; None: until they
        have ended.

        `cancel_grace_seconds`: how long cancelled deliveries may then take to end; None: no limit.

        `stall_seconds`: how long the held deliveries may make no progress before the consumer counts as stalled; None:
        the longer of 30 seconds and ten leases.
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
        self._held: dict[Place, Delivery] = {}
        self._running: dict[Place, asyncio.Task[None]] = {}
        self._stopped_tasks: set[str] = set()
        self._ended = EndedTasks()
        self._rejoining = False
        """Whether this owner was declared dead and has no new name yet."""
        self._may_read = asyncio.Event()
        """Set at each change after which the next read may be allowed."""
        self._stop = asyncio.Event()
        self._alone: str | None = None
        """The stream of a quarantined entry that runs alone, or is about to."""
        self._in_read = False
        self._reconciled: set[Place] = set()
        """Entries that reconciliation took during the current read. The read's reply must not deliver them again."""
        self._reading: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._burying: set[asyncio.Task[None]] = set()
        self._unreconciled = True
        self._watch = ProgressWatch(max(30.0, 10 * lease_seconds) if stall_seconds is None else stall_seconds)
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
            return  # before this task began: nothing would end its loops
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
        """Read these streams, too."""
        new = [stream for stream in streams if stream not in self._streams]
        if not new:
            return
        await self._bus.make_groups(new)
        self._streams += new
        if self._reading is not None and not self._stop.is_set():
            # The pending read does not include them. Reconciliation finds the entries that its reply would deliver.
            self._reading.cancel()
            await asyncio.wait((self._reading,))
            self._unreconciled = True
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="read")

    async def stop(self) -> None:
        """Stop taking, wait for running deliveries (`finish_seconds`), hand back the rest, leave.

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
            # A malformed entry that is not a dead letter yet stays pending: its next owner makes it one.
            for task in (*self._loops, *self._running.values(), *self._burying):
                task.cancel()
            if ending := (*self._loops, *self._burying):
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

    async def _finish(self) -> None:
        """Wait for running deliveries. In the last part of the time they only finish their current step."""
        seconds = self._finish_seconds
        part = None if seconds is None else seconds * (1 - DRAIN_PART)
        _, left = await asyncio.wait(list(self._running.values()), timeout=part)
        if left and seconds is not None:
            self._handler.drain()
            await asyncio.wait(left, timeout=seconds * DRAIN_PART)

    async def _hand_back(self) -> None:
        """Cancel the deliveries that still run and hand them back. Meanwhile the heartbeat prevents their adoption.

        Code that ignores its cancellation is abandoned: when this owner has left, its writes do not count.
        """
        left = list(self._running.values())
        if left:
            logger.info("%d deliveries still running; handing them back", len(left))
            for place in list(self._running):
                self._cancel(place)
            _, stays = await asyncio.wait(left, timeout=self._cancel_grace_seconds)
            if stays:
                logger.warning("%d deliveries ignored their cancellation; they end with the process", len(stays))

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

    def ready(self) -> bool:
        return self._connected and not self._stop.is_set()

    def progress(self) -> Health:
        return self._watch.health()

    # -- taking ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        backoff = 0.05
        while True:
            # Reads have a separate connection. A read before the first heartbeat would use a name that counts as
            # dead, and others would adopt its entries.
            while len(self._held) >= self._limit or self._alone is not None or self._rejoining:
                self._may_read.clear()
                await self._may_read.wait()
            self._in_read = True
            self._reconciled.clear()
            owner = self._bus.owner
            count = min(READ_AT_ONCE, self._limit - len(self._held))
            try:
                if self._bus.queued and group_of(self._streams[0]) == GROUPS["agent"]:
                    # `promote` runs ten times a second, and its reply says whether queued tasks wait for their turn.
                    await self._bus.refill(count, self._streams)
                taken, malformed = await self._bus.read(self._streams, count, READ_BLOCK_MS)
            except BusLost as lost:
                self._failure = lost
                self._stop.set()
                for task in self._loops:
                    task.cancel()
                return
            except BusUnavailable:
                # The reply may have been lost with the connection. Reconciliation finds its entries.
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
                if self._reconciled:
                    taken, malformed = self._not_reconciled(taken, malformed)
                self._take(taken, malformed)

    def _not_reconciled(
        self, taken: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]]
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        """Return the entries of a read without those that reconciliation took while the reply was on its way."""
        fresh = [delivery for delivery in taken if (delivery.stream, delivery.entry) not in self._reconciled]
        self._metrics.duplicates_suppressed.inc(len(taken) - len(fresh))
        return fresh, [each for each in malformed if each[:2] not in self._reconciled]

    def _take(self, deliveries: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]] = ()) -> None:
        loop = asyncio.get_running_loop()
        # Deliveries that arrive during a stop do not start: they are handed back.
        for delivery in () if self._stop.is_set() else deliveries:
            place = (delivery.stream, delivery.entry)
            if place in self._held:
                self._metrics.duplicates_suppressed.inc()
                continue
            self._held[place] = delivery
            self._running[place] = loop.create_task(self._handle(place, delivery))
        for stream, entry, why in malformed:
            burying = loop.create_task(self._bury(stream, entry, why), name="bury")
            self._burying.add(burying)
            burying.add_done_callback(self._buried)
        self._watch.waiting(bool(self._held))

    def _buried(self, burying: asyncio.Task[None]) -> None:
        self._burying.discard(burying)
        if not burying.cancelled() and (error := burying.exception()) is not None:
            logger.error("could not write a dead letter: %s", error)

    def _cancel(self, place: Place, why: str | None = None) -> None:
        """Cancel the handling of a delivery, and release the delivery if that has not begun and so runs no clean-up."""
        task = self._running[place]
        coroutine = task.get_coro()
        assert isinstance(coroutine, CoroutineType)
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            task.add_done_callback(partial(self._drop_unbegun, place))
        task.cancel(why)

    def _drop_unbegun(self, place: Place, task: asyncio.Task[None]) -> None:
        if self._running.get(place) is task:
            self._release(place)
            self._unreconciled = True

    async def _handle(self, place: Place, delivery: Delivery) -> None:
        started = time.perf_counter()
        outcome = "handled"
        HANDLED.set(delivery)  # in this task's own context, so nothing restores it
        ended, entry_ms = self._ended, int(delivery.entry.partition(b"-")[0])
        try:
            # Its task has ended early, or may have ended before this process kept track. A repeated call may be a copy:
            # a server that has lost its last writes promotes it again, and its result may have come meanwhile.
            may_be_over = delivery.task in ended.ended_ms or entry_ms <= ended.since_ms
            repeated_call = delivery.attempt > 1 and delivery.kind == "call"
            if (may_be_over or repeated_call) and await self._settle_if_over(delivery, repeated_call):
                outcome = "stopped"
            else:
                await self._handler.handle(delivery)
                if delivery.quarantined:
                    await self._bus.leave_quarantine(delivery)
        except Fenced:
            outcome = "fenced"
            self._metrics.fenced_commits.inc()
            self._on_fenced()
        except asyncio.CancelledError:
            if delivery.task not in self._stopped_tasks:
                raise
            # The task has ended: settling its delivery acknowledges it and frees its instance.
            outcome = "stopped"
            with contextlib.suppress(Fenced):
                await self._settle(delivery)
        except BusUnavailable as error:
            outcome = "bus_error"
            logger.error("%r stays with this owner: %s", delivery, error)
            self._unreconciled = True
        except Exception:
            outcome = "defect"
            logger.exception("the handler failed on %r", delivery)
            try:
                await self._after_defect(delivery)
            except (Fenced, BusError) as error:
                logger.error("%r stays with this owner: %s", delivery, error)
                self._unreconciled = True
        finally:
            self._release(place)
        self._metrics.events_handled[outcome].value += 1
        self._metrics.handler_seconds.observe(time.perf_counter() - started)
        self._watch.progressed()

    async def _settle_if_over(self, delivery: Delivery, repeated_call: bool) -> bool:
        """Settle, without running it, a delivery whose task has ended, or a repeated call that has its result.

        Return False if it must be handled.
        """
        live = delivery.task not in self._ended.ended_ms and await self._bus.is_live(delivery.task)
        if live and (not repeated_call or await self._bus.is_awaited(delivery)):
            return False
        await self._settle(delivery)
        return True

    async def _settle(self, delivery: Delivery) -> None:
        """Acknowledge a delivery of an ended task and free its instance. The broker checks that the task has ended."""
        if await self._bus.retry(delivery, 0, b"", counts=False):
            # The task was reopened, and its work is back on its stream.
            self._ended.forget(delivery.task)

    async def _after_defect(self, delivery: Delivery) -> None:
        """Retry after a defect of Weft or an error of the server, but not forever."""
        if delivery.attempt < DEFECT_ATTEMPTS:
            await self._bus.retry(delivery, 1000, b"")
        else:
            await self._bury(delivery.stream, delivery.entry, "the handler failed on it each time", "defect")

    def _release(self, place: Place) -> None:
        self._held.pop(place, None)
        self._running.pop(place, None)
        if not self._held:
            self._stopped_tasks.clear()
            self._watch.waiting(False)
        if len(self._held) == self._limit - 1:
            self._may_read.set()

    async def _bury(self, stream: str, entry: bytes, why: str, reason: str = "malformed") -> None:
        if reason == "malformed" and await self._bus.namespace_is_newer():
            # A newer release wrote it: stop, and leave it to the replicas that can read it.
            self._failure = ConfigurationError(f"an entry of {stream} {why}: update this service")
            self._stop.set()
            return
        error = StepError(reason.capitalize(), why, at=time.time() * 1000)
        await self._bus.dead_letter(
            stream, entry, reason, ENCODER.encode([error]), int(time.time() * 1000), ENCODER.encode(error)
        )
        self._metrics.dead_letters[reason].inc()
        logger.error("an entry of %s became a dead letter (%s): %s", stream, reason, why)

    # -- keeping -----------------------------------------------------------------------------------------------

    async def _beating(self) -> None:
        """Send heartbeats, and stop running work of the tasks that they report."""
        interval = self._lease / BEATS_PER_LEASE
        while True:
            try:
                since_ms = self._owner.at_ms
                self._watch.asks_broker(self)
                stopped = await self._owner.beat()
                self._watch.broker_answered(self)
                self._ended.add_reported(stopped, self._owner.at_ms, since_ms)
                for task in stopped:
                    if task.startswith(WITHDRAWN):
                        self._handler.stop_task(task.removeprefix(WITHDRAWN))
                    else:
                        self._stop_task(task)
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
            self._ended.since_ms = found[-1][1]
        self._ended.add_remembered(reversed(found), self._owner.at_ms)

    def _stop_task(self, task: str) -> None:
        self._handler.stop_task(task)
        places = [place for place, delivery in self._held.items() if delivery.task == task]
        if places:
            self._stopped_tasks.add(task)
            for place in places:
                # Two heartbeats may report the same task: a second cancel would disturb its clean-up.
                if not self._running[place].cancelling():
                    self._cancel(place, STOPPED)

    def _on_fenced(self) -> None:
        """Drop all deliveries, since this owner was declared dead and others own them, and rejoin under a new name."""
        if any(task.get_name() == "rejoin" for task in self._loops if not task.done()):
            return
        logger.warning(
            "this owner was declared dead: its heartbeat was late; dropping %d deliveries and rejoining",
            len(self._held),
        )
        current = asyncio.current_task()
        for place, task in list(self._running.items()):
            if task is not current:
                self._cancel(place)
        self._handler.forget()
        self._rejoining = True
        self._loops.append(asyncio.get_running_loop().create_task(self._rejoin(), name="rejoin"))

    async def _rejoin(self) -> None:
        while not self._stop.is_set():
            try:
                await self._owner.enter()
            except BusError:
                await asyncio.sleep(0.1)
            else:
                self._unreconciled = True
                self._rejoining = False
                self._may_read.set()
                break
        self._loops = [task for task in self._loops if not task.done() and task is not asyncio.current_task()]

    async def _tending(self) -> None:
        """Adopt from dead owners. Once per lease, and after each reconnect, reconcile with the group's pending list."""
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
                self._on_fenced()
            except BusError as error:
                logger.warning("adopt: %s", error)
            except Exception:
                logger.exception("adopt: unexpected error")
            await asyncio.sleep(self._lease / 4)

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
                self._take(*await self._bus.reopen(stream, lost))

    async def _adopt(self, stream: str) -> None:
        if self._alone is not None:
            if stream != self._alone:
                return  # this consumer is about to run a quarantined entry alone
            # Nothing may run beside a quarantined entry: no held delivery, and none that a read returns. A turn that
            # waits in the middle does not run, and may wait for an entry that only this process takes.
            if self._in_read or not all(delivery.waits for delivery in self._held.values()):
                return
            adopted = await self._bus.adopt(stream, 1, idle=True)
            if not adopted.must_be_idle and not adopted.deliveries:
                self._alone = None
                self._may_read.set()
            await self._take_adopted(adopted)
            return
        # One by one, each with a head start: an entry that kills its process immediately does so before others are
        # adopted, so they need not wait for another lease.
        count = 0
        while len(self._held) < self._limit and not self._stop.is_set():
            adopted = await self._bus.adopt(stream, 1, idle=False)
            if adopted.must_be_idle:
                logger.warning(
                    "an entry of %s was delivered too often: waiting for other deliveries to end, to run it alone",
                    stream,
                )
                self._alone = stream
            taken = await self._take_adopted(adopted)
            if not taken:
                break
            count += taken
        if count:
            logger.info("adopted %d deliveries of %s from dead owners", count, stream)

    async def _take_adopted(self, adopted: Adopted) -> int:
        """Take the adopted entries and give each a head start. Return their number."""
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
        why = (
            f"{delivery.name} ended its process, or blocked its event loop, on {delivery.deliveries - 1} deliveries, "
            "even while it ran alone"
        )
        await self._bury(delivery.stream, delivery.entry, why, "poison")
        await self._bus.leave_quarantine(delivery)

    async def _promoting(self) -> None:
        while True:
            try:
                done, _ = await self._bus.promote()
                if done:
                    continue
            except BusError as error:
                logger.warning("timers: %s", error)
            await asyncio.sleep(PROMOTE_SECONDS)
