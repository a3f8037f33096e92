"""What a running turn reads and writes on the broker before its commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Container, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Answer, Replies, name_of_step
from runtime_core.bus.values import CallBegun, Delivery
from runtime_core.consumer.effects import Call, Publish, Send
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import BusError, Fenced, InvalidInput, JournalMoved, LimitExceeded, WeftError
from runtime_core.runs.calls import PIECE_BYTES, PROCESS_BYTES, RUN_BYTES, RUN_MAX_BYTES, Outflow
from runtime_core.runs.commit import parts
from runtime_core.runs.journal import packed_now
from runtime_core.runs.ports import DeclaredApp

FRESH_SECONDS = 2.0
"""How long what was read counts; who offers something new is seen that much later."""


class Offers:
    """The manifests of one partition's broker, read when they are asked for and kept for some seconds."""

    __slots__ = ("_bus", "_manifests", "_raw", "_read_at")

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._raw: list[bytes] = []
        self._manifests: Sequence[Manifest] = ()
        self._read_at = -FRESH_SECONDS

    async def manifests(self) -> Sequence[Manifest]:
        """One for each app, by its name; the same object while nothing has changed. Raises BusError."""
        if time.monotonic() - self._read_at < FRESH_SECONDS:
            return self._manifests
        raw = sorted(cast(list[bytes], await self._bus.transport.call("HVALS", self._bus.keys.manifests)))
        self._read_at = time.monotonic()
        if raw != self._raw:
            self._raw = raw
            self._manifests = tuple(sorted(_read(raw), key=lambda manifest: manifest.app))
        return self._manifests


def _read(raw: Sequence[bytes]) -> list[Manifest]:
    found = []
    for data in raw:
        try:
            found.append(Manifest.from_json(data))
        except InvalidInput:
            continue  # a newer release's; its own handlers read it
    return found


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class TurnGone(WeftError):
    """The turn is no longer this delivery's: another owner continues the run."""


class HandedBack(WeftError):
    """This process is stopping and begins no further step: another one continues the run."""


class TurnPort:
    """What a running turn writes on the broker before its commit, for the delivery that it handles now."""

    __slots__ = (
        "_app",
        "_asked",
        "_bus",
        "_confirmed",
        "_draining",
        "_failed",
        "_offers",
        "_outflow",
        "_over",
        "_partitions",
        "_process",
        "_replies",
        "_storing",
        "_writes",
        "delivery",
    )

    def __init__(
        self,
        bus: EventBus,
        delivery: Delivery,
        app: DeclaredApp,
        partitions: int = 1,
        replies: Replies | None = None,
        offers: Offers | None = None,
        *,
        loaded: bool = False,
        draining: asyncio.Event | None = None,
        process: Outflow | None = None,
    ) -> None:
        """`loaded`: the run was made from the broker's journal, what it asked in mid-turn included.

        `draining`: set when this process begins no further step.

        `process`: counts what all runs of this process have on its way; None: nobody counts.
        """
        self._draining = draining
        self._bus = bus
        self._app = app
        self._offers = offers or Offers(bus)
        self._partitions = partitions
        self._replies = replies
        self.delivery = delivery
        self._writes: set[asyncio.Task[object]] = set()
        self._outflow = Outflow(RUN_BYTES)
        self._process = process or Outflow(PROCESS_BYTES)
        self._over: LimitExceeded | None = None
        self._failed: BusError | Fenced | None = None
        self._storing: set[asyncio.Task[Any]] = set()  # Any: results of several functions
        self._confirmed = False
        self._asked = loaded

    def resume(self, delivery: Delivery) -> None:
        """Serve the next turn of a run that was kept in memory. Other processes may have had this turn before."""
        self.delivery = delivery
        self._confirmed = False

    async def confirm(self, known: Container[str]) -> None:
        """Make sure that the broker's journal holds no step beyond `known`, and that nobody else is in this turn.

        One call in each turn that does a step by itself, and again whenever the last heartbeat is so old that others
        may have declared this owner dead. Delivery counts say nothing: a graceful stop resets them.
        """
        if self._draining is not None and self._draining.is_set():
            raise HandedBack(f"{self.delivery!r} is handed back")
        if self._confirmed and time.monotonic() < self._bus.alive_until:
            return
        found = await self._bus.begin_turn(self.delivery)
        if found is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        if (found.asked and not self._asked) or any(step not in known for step in found.steps):
            raise JournalMoved(f"another process has journaled steps of {self.delivery!r}")
        self._confirmed = True

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        value = packed_now(digest, status, payload)
        stored = await self._persist(self._bus.record(self.delivery, step, value, kind, name))
        if stored is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        if stored != value:
            self._confirmed = False  # another process is in this turn, too
        return stored

    async def _persist(self, write: Coroutine[None, None, _T]) -> _T:
        """Store the result of a step that has run: a cancel of the turn does not stop the write."""
        storing = asyncio.get_running_loop().create_task(write)
        self._storing.add(storing)
        storing.add_done_callback(self._stored)
        return await asyncio.shield(storing)

    def _stored(self, storing: asyncio.Task[Any]) -> None:
        self._storing.discard(storing)
        # Nobody waits for it where the turn was dropped meanwhile.
        if not storing.cancelled():
            storing.exception()

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        begun = await self._bus.begin_call(self.delivery, step, reserve)
        if begun is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        return begun

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        # What was streamed comes before the result, for who reads the stream and the final event.
        await self.flush()
        value = packed_now(digest, status, payload)
        settled = await self._persist(self._bus.settle_call(self.delivery, step, value, usage, name))
        if settled is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        return settled

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        if self._over is not None:
            raise self._over
        if self._outflow.bytes > RUN_MAX_BYTES:
            raise LimitExceeded(
                f"the model's answer comes faster than the broker takes it: {self._outflow.bytes:,} bytes are on their "
                f"way, over the limit of {RUN_MAX_BYTES:,}"
            )
        self._write(self._bus.stream(self.delivery, step, attempt, data), len(data))

    async def usage(self) -> bytes:
        return await self._bus.usage(self.delivery.task)

    async def manifests(self) -> Sequence[Manifest]:
        return await self._offers.manifests()

    def progress(self, step: str, data: bytes) -> None:
        if not self._outflow.full:  # else dropped: a later one says more
            self._write(self._bus.stream(self.delivery, step, self.delivery.attempt, data, progress=True), len(data))

    def emit(self, step: str, digest: str, data: bytes) -> None:
        self._write(self._bus.emit(self.delivery, step, packed_now(digest), data), len(data))

    def room(self) -> Awaitable[None] | None:
        if self._over is None and not self._outflow.full and not self._process.full:
            return None
        return self._room()

    async def _room(self) -> None:
        await self._outflow.room()
        await self._process.room()
        if self._over is not None:
            raise self._over

    def note(self, step: str, digest: str, name: str = "") -> None:
        self._write(self._bus.record(self.delivery, step, packed_now(digest), "message", name), 0)

    def _write(self, writing: Coroutine[None, None, object], size: int) -> None:
        task = asyncio.get_running_loop().create_task(writing)
        size += PIECE_BYTES
        self._outflow.begin(size)
        self._process.begin(size)
        task.add_done_callback(partial(self._written, size))
        self._writes.add(task)

    def _written(self, size: int, task: asyncio.Task[object]) -> None:
        self._outflow.end(size)
        self._process.end(size)
        self._writes.discard(task)
        # A turn that is dropped does not wait for its writes: it is lost, and whoever dropped it knows why.
        if not task.cancelled():
            match task.exception():
                case LimitExceeded() as over:
                    self._over = self._over or over
                case Fenced() | BusError() as failed:
                    self._failed = self._failed or failed

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Send | Publish] = (), state: bytes = b""
    ) -> dict[str, asyncio.Future[Answer]]:
        if self._replies is None:
            raise WeftError("nothing can be asked in mid-turn here: this handler has no reply stream")
        self._asked = True
        delivery, replies = self.delivery, self._replies
        names = {call.step: name_of_step(delivery.task, delivery.run, call.step) for call in calls}
        futures = {step: replies.expect(name) for step, name in names.items()}
        for step, future in futures.items():
            delivery.waits += 1
            future.add_done_callback(partial(self._answered, delivery, names[step]))
        asked = [*sends, *calls]
        effects = parts(asked, delivery, self._app, self._partitions)
        try:
            known = await self._bus.ask(delivery, time.time_ns() // 1_000_000, replies.name, state, effects, len(asked))
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        if known is None:
            for future in futures.values():
                future.cancel()
            raise TurnGone(f"{delivery!r} is handled by another owner")
        for step, value in known.items():
            replies.hand_out(names[step], Answer(value))
        if delivery.quarantined and not all(future.done() for future in futures.values()):
            # The agent that it asked may need this very process. This turn has lived until here. Once its answers are
            # recorded, a replay comes to whatever follows without a wait, so a death there still counts against it.
            delivery.quarantined = False
            await self._bus.leave_quarantine(delivery)
        return futures

    def _answered(self, delivery: Delivery, name: str, future: asyncio.Future[Answer]) -> None:
        delivery.waits -= 1
        if self._replies is not None:
            self._replies.forget(name, future)

    async def flush(self) -> None:
        """Wait for the deltas and notes on their way: the commit must not overtake them. Raises what they raised."""
        if self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._over is not None:
            raise self._over
