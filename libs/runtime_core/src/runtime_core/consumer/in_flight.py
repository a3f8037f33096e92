"""The deliveries that a consumer holds, from their first step to the last."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Protocol

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.heartbeat import EndedPart, EndedTasks
from runtime_core.consumer.progress import SILENCED, ProgressWatch, handles_delivery, silenced_by
from runtime_core.errors import BusError, BusUnavailable, ConfigurationError, Fenced, ServerError, is_temporary
from runtime_core.telemetry.logs import HANDLED
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.step import ENCODER, StepFailure

logger = logging.getLogger(__name__)

DEFECT_ATTEMPTS = 20
STOPPED = "the task is over"
"""The message of a handler's CancelledError if its task has ended. Without it, another owner gets the delivery."""
DRAIN_PART = 0.25
"""The last share of the stop time. No step begins in it, since an interrupted step has to run again."""
Place = tuple[str, bytes]
"""A stream and the id of one of its entries."""


class DeliveryHandler(Protocol):
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
        """Tell running work that its task ended early, or that nobody wants its answer.

        `task` may also be a part of a task: see `EndedPart.of`.
        """
        ...


class Handling(asyncio.Task[None]):
    """Handles one delivery. Tells cancellations by Weft from those by the delivery's own code."""

    withdrawn = False
    """Whether Weft has cancelled it."""

    def cancel(self, msg: object | None = None) -> bool:
        if HANDLED.get() is None:
            self.withdrawn = True
        return super().cancel(msg)

    def withdraw(self, why: str | None) -> None:
        """Cancel it for Weft, even from the context of another delivery."""
        self.withdrawn = True
        super().cancel(why)


def cancelled_by_code() -> bool:
    """Whether the running task handles a delivery whose own code has cancelled it."""
    task = asyncio.current_task()
    return isinstance(task, Handling) and task.cancelling() > 0 and not task.withdrawn


class InFlight:
    """Runs each delivery's handler, settles the deliveries of ended tasks, and releases each one at its end."""

    def __init__(
        self,
        bus: EventBus,
        handler: DeliveryHandler,
        metrics: Metrics,
        watch: ProgressWatch,
        *,
        limit: int,
        on_fenced: Callable[[], None],
        on_failure: Callable[[ConfigurationError], None],
    ) -> None:
        """`on_fenced` is called when a delivery shows that this owner was declared dead; `on_failure` with an error
        that ends the consumer.
        """
        self._bus = bus
        self._handler = handler
        self._metrics = metrics
        self._watch = watch
        self._limit = limit
        self._on_fenced = on_fenced
        self._on_failure = on_failure
        self.held: dict[Place, Delivery] = {}
        self.running: dict[Place, Handling] = {}
        self.burying: set[asyncio.Task[None]] = set()
        """Malformed entries that are becoming dead letters."""
        self.ended = EndedTasks()
        self.unreconciled = True
        """Whether the group may count entries as this owner's that are not held."""
        self.has_room = asyncio.Event()
        """Set at each change after which the next read may be allowed."""
        self.became_idle = asyncio.Event()
        """Set when the last held delivery is released, and when a read ends without any."""
        self.closed = False
        """Whether the consumer stops. Deliveries that arrive now do not start: they are handed back."""
        self._stopped: set[Place] = set()
        """Deliveries that are cancelled since their task, or a part of it, has ended."""

    def take(self, deliveries: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]] = ()) -> None:
        loop = asyncio.get_running_loop()
        for delivery in () if self.closed else deliveries:
            place = (delivery.stream, delivery.entry)
            if place in self.held:
                self._metrics.duplicates_suppressed.inc()
                continue
            self.held[place] = delivery
            self.running[place] = Handling(self._handle(place, delivery), loop=loop)
        for stream, entry, why in malformed:
            burying = loop.create_task(self.bury(stream, entry, why), name="bury")
            self.burying.add(burying)
            burying.add_done_callback(self._buried)
        self._watch.waiting(bool(self.held))

    def take_pending(self, deliveries: Sequence[Delivery], malformed: Sequence[tuple[str, bytes, str]] = ()) -> None:
        """Take what the group already counts as this owner's, but no call that runs here from another entry.

        A server that has lost its last writes lists an earlier attempt as pending while the next one runs. Later
        reconciliations find what this leaves.
        """
        calls = {(held.task, held.run) for held in self.held.values() if held.kind == "call"}
        self.take([each for each in deliveries if (each.task, each.run) not in calls], malformed)

    def _buried(self, burying: asyncio.Task[None]) -> None:
        self.burying.discard(burying)
        if not burying.cancelled() and (error := burying.exception()) is not None:
            logger.error("could not write a dead letter: %s", error)

    def cancel(self, place: Place, why: str | None = None) -> None:
        """Cancel the handling of a delivery, and release the delivery if that has not begun and so runs no clean-up."""
        task = self.running[place]
        coroutine = task.get_coro()
        assert isinstance(coroutine, CoroutineType)
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            task.add_done_callback(partial(self._drop_unbegun, place))
        task.withdraw(why)

    def _drop_unbegun(self, place: Place, task: asyncio.Task[None]) -> None:
        self._release(place)
        self.unreconciled = True

    @handles_delivery
    async def _handle(self, place: Place, delivery: Delivery) -> None:
        started = time.perf_counter()
        outcome = "handled"
        HANDLED.set(delivery)  # in this task's own context, so nothing restores it
        ended, entry_ms = self.ended, int(delivery.entry.partition(b"-")[0])
        if SILENCED:
            delivery.silenced = silenced_by(delivery, delivery.deliveries)
        try:
            # Its task has ended early, or may have ended before this process kept track. A repeated call may be a copy:
            # a server that has lost its last writes promotes it again, or still lists it as pending, and its result may
            # have come meanwhile.
            may_be_over = entry_ms <= ended.since_ms or (ended.concern(delivery.task) if ended.ended_ms else False)
            repeated_call = (delivery.attempt > 1 or delivery.reopened) and delivery.kind == "call"
            if (may_be_over or repeated_call) and await self._settle_if_over(delivery):
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
            if place in self._stopped:
                # The task has ended: settling its delivery acknowledges it and frees its instance.
                outcome = "stopped"
                with contextlib.suppress(Fenced):
                    await self._settle(delivery)
            elif cancelled_by_code():
                outcome = "defect"
                logger.error("%r: its code has cancelled the task of asyncio that handles it", delivery)
                await self._retry_after_defect(delivery)
            else:
                raise
        except BusUnavailable as error:
            outcome = "bus_error"
            logger.error("%r stays with this owner: %s", delivery, error)
            self.unreconciled = True
        except Exception as error:
            if isinstance(error, ServerError) and is_temporary(error):
                outcome = "bus_error"
                logger.error("%r is delayed: %s", delivery, error)
                await self._retry_after_defect(delivery, counts=False)
            else:
                outcome = "defect"
                logger.exception("the handler failed on %r", delivery)
                await self._retry_after_defect(delivery)
        finally:
            self._release(place)
        self._metrics.events_handled[outcome].value += 1
        self._metrics.handler_seconds.observe(time.perf_counter() - started)
        self._watch.progressed()

    async def _settle_if_over(self, delivery: Delivery) -> bool:
        """Settle, without running it, a delivery whose task has ended, or whose result nobody awaits.

        Return False if it must be handled.
        """
        live = delivery.task not in self.ended.ended_ms and await self._bus.is_live(delivery.task)
        if live and await self._bus.is_awaited(delivery):
            return False
        await self._settle(delivery)
        return True

    async def _settle(self, delivery: Delivery) -> None:
        """Acknowledge a delivery of an ended task and free its instance. The broker checks that the task has ended."""
        if await self._bus.retry(delivery, 0, b"", counts=False):
            # The task was reopened, and its work is back on its stream.
            self.ended.forget(delivery.task)

    async def _retry_after_defect(self, delivery: Delivery, *, counts: bool = True) -> None:
        """Retry after a defect of Weft or an error of the server, but not forever unless the error is temporary."""
        try:
            if not counts or delivery.attempt < DEFECT_ATTEMPTS:
                await self._bus.retry(delivery, 1000, b"", counts=counts)
            else:
                await self.bury(delivery.stream, delivery.entry, "the handler failed on it each time", "defect")
        except (Fenced, BusError) as error:
            logger.error("%r stays with this owner: %s", delivery, error)
            self.unreconciled = True

    def _release(self, place: Place) -> None:
        self.held.pop(place, None)
        self.running.pop(place, None)
        self._stopped.discard(place)
        if not self.held:
            self._watch.waiting(False)
            self.became_idle.set()
        if len(self.held) == self._limit - 1:
            self.has_room.set()

    async def bury(self, stream: str, entry: bytes, why: str, reason: str = "malformed") -> None:
        if reason == "malformed" and await self._bus.namespace_is_newer():
            # A newer release wrote it: stop, and leave it to the replicas that can read it.
            self._on_failure(ConfigurationError(f"an entry of {stream} {why}: update this service"))
            return
        error = StepFailure(reason.capitalize(), why, at=time.time() * 1000)
        await self._bus.dead_letter(
            stream, entry, reason, ENCODER.encode([error]), int(time.time() * 1000), ENCODER.encode(error)
        )
        self._metrics.dead_letters[reason].inc()
        logger.error("an entry of %s became a dead letter (%s): %s", stream, reason, why)

    async def finish(self, seconds: float | None) -> None:
        """Wait `seconds` for running deliveries; None: until they end. In the last part they only finish their step."""
        part = None if seconds is None else seconds * (1 - DRAIN_PART)
        _, left = await asyncio.wait(list(self.running.values()), timeout=part)
        if left and seconds is not None:
            self._handler.drain()
            await asyncio.wait(left, timeout=seconds * DRAIN_PART)

    async def hand_back(self, grace_seconds: float | None) -> None:
        """Cancel the deliveries that still run and hand them back. Until then the heartbeat keeps them from others.

        Code that ignores its cancellation is abandoned: when this owner has left, its writes do not count.
        """
        left = list(self.running.values())
        if left:
            logger.info("%d deliveries still running; handing them back", len(left))
            for place in list(self.running):
                self.cancel(place)
            _, stays = await asyncio.wait(left, timeout=grace_seconds)
            if stays:
                logger.warning("%d deliveries ignored their cancellation; they end with the process", len(stays))

    def stop_task(self, name: str) -> None:
        """Stop the work of a task that has ended, or of a part of it, as heartbeats name it."""
        self._handler.stop_task(name)
        ended = EndedPart.of(name)
        for place in [place for place, each in self.held.items() if each.task == ended.task and ended.has(each.run)]:
            self._stopped.add(place)
            # Two heartbeats may report the same task: a second cancel would disturb its clean-up.
            if not self.running[place].cancelling():
                self.cancel(place, STOPPED)

    def drop(self) -> None:
        """Cancel all deliveries but that of the current task, and forget their runs: others own them."""
        current = asyncio.current_task()
        for place, task in list(self.running.items()):
            if task is not current:
                self.cancel(place)
        self._handler.forget()
