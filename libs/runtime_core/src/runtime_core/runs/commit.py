"""What a turn writes on the broker, with its commit and before it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from runtime_core.bus.commits import CallBegun
from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Answer, Replies, name_of_step
from runtime_core.consumer.announcements import ManifestCache
from runtime_core.consumer.effects import (
    Completed,
    Effect,
    JournaledStep,
    Suspended,
)
from runtime_core.consumer.settle import WRITE_OVERHEAD_BYTES
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import JournalMoved, LimitExceeded, WeftError
from runtime_core.runs.definition import NO_VERSION, DeclaredApp
from runtime_core.runs.effects import Call
from runtime_core.runs.journal import packed_now
from runtime_core.runs.output import RUN_BYTES, Outflow, OutputBatch, OutputWriter, Piece
from runtime_core.runs.scheduler import ONE_ROUND
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import ATTEMPTS, Step, StepFailure

logger = logging.getLogger(__name__)
UNWAITED = 8
"""How many times the unanswered bytes of a run may exceed their limit in calls that cannot wait: `ModelCall.stream`."""
NO_ATTEMPTS: Mapping[str, int] = {}
_AGAIN, _JOURNALED, _VERSION, _WITHDRAW = "a", "j", "v", "w"
_T = TypeVar("_T")


def parts_of(
    result: Suspended | Completed, delivery: Delivery, app: DeclaredApp, partitions: int = 1, last_output: str = ""
) -> tuple[list[Argument], int]:
    """Return the parts of a commit (see `commit_turn.lua`) and their number.

    `last_output` is the step of the turn's last delta or note. If the broker has it, it has the earlier ones.
    """
    # Sends go first, so that messages to one instance keep the order of the program.
    effects: list[Effect] = [*result.sends, *result.spends]
    if isinstance(result, Suspended):
        effects += result.requests
    names = [each.step for each in result.journaled] if result.journaled else []
    if isinstance(result, Completed):
        names += result.answered
    elif last_output:
        names.append(last_output)
    written = parts(effects, delivery, app, partitions) if effects else []
    count = len(effects) + len(names)
    for name in names:
        written += (_JOURNALED, name)
    if result.withdrawn:
        for name in result.withdrawn:
            written += (_WITHDRAW, name)
        count += len(result.withdrawn)
    if isinstance(result, Completed):
        if delivery.trace:
            written += answer_parts(delivery)
            count += 1
        return written, count
    for step, wait in result.again:
        written += (_AGAIN, step, wait)
    if app.version != NO_VERSION and delivery.turn == 0 and delivery.run == ROOT_RUN:
        return [*written, _VERSION, app.version], count + len(result.again) + 1
    return written, count + len(result.again)


def parts(effects: Sequence[Effect], delivery: Delivery, app: DeclaredApp, partitions: int = 1) -> list[Argument]:
    """Return the parts of a commit for these effects, in this order."""
    turn = _Turn(delivery, app, partitions)
    written: list[Argument] = []
    for effect in effects:
        written += effect.part(turn)
    return written


class _Turn(NamedTuple):
    """The turn, and what decides where its events go."""

    delivery: Delivery
    app: DeclaredApp
    partitions: int

    def stream_of(self, kind: str, name: str, pool: str) -> str:
        """Return a call's work stream. The commit looks up a name that this app lacks among all apps."""
        app, known = self.app, True
        if kind == "tool":
            known = app.tools.get(name) is not None
            server = None if known else app.functions.mcp_server_of(name)
            if server is not None:
                # The server's tools may not be listed yet; the tool-handler that runs it knows them.
                return f"tool:{server.pool}" if server.pool else "tool"
        elif kind == "agent":
            known = app.agents.get(name) is not None
        # Steps for an engine wait on its stream even if no gateway serves it yet.
        if not known:
            return f"?{kind}"
        return f"{kind}:{pool}" if pool else kind


def answer_parts(delivery: Delivery) -> list[Argument]:
    """Return the part with the span that ended this run, for the waiting run; empty if nothing is traced."""
    return ["l", delivery.trace] if delivery.trace else []


def row_of_run(
    delivery: Delivery, status: str, started: float, ended: float, owner: str, attempts: Mapping[str, int] = NO_ATTEMPTS
) -> Step:
    """Return the row of an agent's run for the trajectory. `attempts`: what `ctx.attempt` has returned, by place."""
    row = Step(delivery.run, "agent", delivery.name, status, started, ended)
    row.attempt = delivery.attempt
    row.key = delivery.key
    row.owner = owner
    if delivery.kind == "start" and delivery.data:
        row.input = msgspec.Raw(delivery.data)
    if attempts and (delivery.attempt > 1 or max(attempts.values()) > 1):
        row.attributes = {ATTEMPTS: [f"{place}={attempt}" for place, attempt in attempts.items()]}
    if delivery.errors:
        row.errors = msgspec.json.decode(delivery.errors, type=list[StepFailure])
    return row


class TurnGone(WeftError):
    """The turn no longer belongs to this delivery: another owner continues the run."""


class HandedBack(WeftError):
    """This process is stopping and starts no further step: another process continues the run."""


class TurnPort:
    """Writes on the broker in mid-turn. `RunPort` documents the methods."""

    __slots__ = (
        "_app",
        "_asked",
        "_bus",
        "_confirmed_at",
        "_draining",
        "_failed",
        "_journal",
        "_known",
        "_knows_output",
        "_manifest_cache",
        "_marking",
        "_marks",
        "_newest",
        "_newest_asked",
        "_notes",
        "_output_attempt",
        "_over",
        "_partitions",
        "_process",
        "_replies",
        "_run_bytes",
        "_sending",
        "_storing",
        "_writer",
        "_writes",
        "anyway",
        "delivery",
        "last_output",
        "wrote",
    )

    def __init__(
        self,
        bus: EventBus,
        delivery: Delivery,
        app: DeclaredApp,
        partitions: int = 1,
        replies: Replies | None = None,
        manifest_cache: ManifestCache | None = None,
        *,
        loaded: bool = False,
        output_attempt: int = 1,
        draining: asyncio.Event | None = None,
        process: Outflow | None = None,
    ) -> None:
        """`loaded`: the run came from the broker's journal, including requests in mid-turn.

        `output_attempt`: that of the output which the run continues.

        `draining`: set when this process starts no further step.

        `process`: bounds the unanswered writes of each run and of all runs of this process; None: of each run only.
        """
        self._draining = draining
        self._bus = bus
        self._app = app
        self._manifest_cache = manifest_cache or ManifestCache(bus)
        self._partitions = partitions
        self._replies = replies
        self.delivery = delivery
        self._writes: set[asyncio.Task[object]] = set()
        self._run_bytes = RUN_BYTES if process is None else process.run_bytes
        self._process = process
        self._over: LimitExceeded | None = None
        self._failed: Exception | None = None
        self._marks: list[JournaledStep] = []
        """Marks that no write has followed yet: a run that ends in this turn needs none."""
        self._marking: asyncio.Task[None] | None = None
        self._known: Container[str] = ()
        self._storing: set[asyncio.Task[Any]] = set()  # Any: results of several types
        self._confirmed_at = -1
        """The number of the connection over which the broker confirmed that this process is in the turn; -1: none."""
        self._asked = loaded
        self._output_attempt = output_attempt
        self._knows_output = loaded
        """Whether this process knows all output of the current turn on the broker."""
        self.last_output = ""
        """This turn's last note, or its last piece of output as `@<branch> <number>`."""
        self._notes: list[Callable[[], Coroutine[None, None, object]]] = []
        self._writer: OutputWriter | None = None
        self._sending: asyncio.Task[None] | None = None
        self._journal: Container[str] = ()
        """The steps that the run knows."""
        self._newest = ""
        """The newest step of this turn that the broker had; empty: none."""
        self._newest_asked = ""
        """As `_newest`, of calls and messages in mid-turn."""
        self.anyway = False
        """Begin the turn although the broker reports another live owner in it."""
        self.wrote = False
        """Whether `flush` has anything to wait for."""

    def resume(self, delivery: Delivery) -> None:
        """Prepare for the next turn of a warm run, which other processes may have begun before."""
        self.delivery = delivery
        self._confirmed_at = -1
        self._knows_output = False
        self.last_output = self._newest = ""
        self._marking = None
        self._notes.clear()
        if self._writer is not None:
            self._writer.forget()

    async def confirm(self, known: Container[str]) -> None:
        """Check that the broker's journal holds no step beyond `known`, and that no other process is in this turn.

        A turn checks before its first own step. It checks again after a reconnect, since the server may have lost its
        last writes, and when its last heartbeat is so old that others may have declared this owner dead. Delivery
        counts cannot show this, since a graceful stop resets them.
        """
        if self._draining is not None and self._draining.is_set():
            raise HandedBack(f"{self.delivery!r} is handed back: this process is stopping")
        await self._begin_if_unsure(known)

    async def _begin_if_unsure(self, known: Container[str]) -> None:
        if self._confirmed_at != self._bus.transport.reconnects or time.monotonic() >= self._bus.alive_until:
            await self.begin(known)
        await self._write_marks()

    def mark(self, mark: JournaledStep, known: Iterable[str]) -> None:
        if not self._marks:
            # As of now: a step that this process adds until the mark is written may be another process's, too.
            self._known = frozenset(known)
        self._marks.append(mark)
        self.wrote = True

    async def _write_marks(self) -> None:
        """Journal the marks, once this process is known to be in the turn. Raises as `confirm`."""
        if self._marks:
            marks, self._marks = self._marks, []
            self._marking = asyncio.get_running_loop().create_task(self._journal_marks(marks, self._marking))
            self._storing.add(self._marking)
            self._marking.add_done_callback(self._stored)
        if self._marking is not None:
            await asyncio.shield(self._marking)

    async def _journal_marks(self, marks: Sequence[JournaledStep], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        if self._confirmed_at != self._bus.transport.reconnects:
            await self.begin(self._known)
        for step, value, kind, name, *_ in marks:
            if await self._bus.record(self.delivery, step, value, kind, name) is None:
                raise TurnGone(f"{self.delivery!r} is handled by another owner")

    @property
    def begun(self) -> bool:
        """Whether the broker has confirmed once that this process is in the turn."""
        return self._confirmed_at >= 0

    async def begin(self, known: Container[str]) -> None:
        """Tell the broker that this process is in the turn. Raises as `confirm`."""
        reconnects = self._bus.transport.reconnects
        found = await self._bus.begin_turn(self.delivery, anyway=self.anyway)
        if found is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        if (found.called and not self._asked) or any(step not in known for step in found.steps):
            raise JournalMoved(f"another process has journaled steps of {self.delivery!r}")
        if found.emitted and not self._knows_output:
            raise JournalMoved(f"another process has emitted output of {self.delivery!r}")
        if found.output_attempt != self._output_attempt:
            raise JournalMoved(f"another process has started the output of {self.delivery!r} over")
        self._newest = self._newest or (found.steps[-1] if found.steps else "")
        self._confirmed_at = reconnects

    async def _check_answers(self, steps: Sequence[str]) -> None:
        """Raise JournalMoved if the broker has lost the answers to these requests: the requested runs run again."""
        found = await self._bus.results(self.delivery.task, self.delivery.run, steps)
        if None in found:
            raise JournalMoved(f"the broker has lost an answer that {self.delivery!r} has used")

    async def store_again(
        self, journaled: Sequence[JournaledStep], known: Container[str], answered: Sequence[str] = ()
    ) -> str:
        await self.begin(known)
        if answered:
            await self._check_answers(answered)
        bus, delivery, over = self._bus, self.delivery, ""
        if messages := [each.message for each in journaled if each.message is not None]:
            await self._ask(messages, b"")
        for step, value, kind, name, usage, message in journaled:
            stored: bytes | None
            if message is not None:
                continue
            if usage:
                settled = await bus.settle_call(delivery, step, value, usage, name)
                stored, over = settled or (None, over)
            else:
                stored = await bus.record(delivery, step, value, kind, name)
            if stored is None:
                raise TurnGone(f"{delivery!r} is handled by another owner")
            if stored != value:
                raise JournalMoved(f"another process has journaled step {step} of {delivery!r} with another result")
        for note in self._notes:
            await note()
        for batch in self._writer.kept() if self._writer is not None else ():
            with contextlib.suppress(LimitExceeded):  # it was within its limit before
                await self._send(batch)
        return over

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        value = packed_now(digest, status, payload)
        stored = await self._persist(self._bus.record(self.delivery, step, value, kind, name, after=self._newest))
        if stored is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        if stored != value:
            self._confirmed_at = -1  # another process is in this turn
        self._newest = step
        return stored

    async def _persist(self, write: Coroutine[None, None, _T]) -> _T:
        """Store the result of a finished step, even if the turn is cancelled meanwhile."""
        storing = asyncio.get_running_loop().create_task(write)
        self._storing.add(storing)
        storing.add_done_callback(self._stored)
        return await asyncio.shield(storing)

    def _stored(self, storing: asyncio.Task[Any]) -> None:
        self._storing.discard(storing)
        # Retrieve the error: nobody awaits the write of a turn that was dropped.
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
        # Readers of the stream get the streamed pieces before the result.
        await self.flush()
        value = packed_now(digest, status, payload)
        settling = self._bus.settle_call(self.delivery, step, value, usage, name, after=self._newest)
        settled = await self._persist(settling)
        if settled is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        self._newest = step
        return settled

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        if self._over is not None:
            raise self._over
        waiting, most = self._writing().own.bytes, UNWAITED * self._run_bytes
        if waiting > most:
            raise LimitExceeded(
                f"the model's answer arrives faster than the broker accepts it: {waiting:,} bytes are "
                f"waiting, over the limit of {most:,}"
            )
        self._add((step, attempt, "chunk"), b"chunk", data)

    async def usage(self) -> bytes:
        return await self._bus.usage(self.delivery.task)

    async def manifests(self) -> Sequence[Manifest]:
        return await self._manifest_cache.manifests()

    def progress(self, step: str, data: bytes) -> None:
        if not self._writing().own.full:  # otherwise drop it: a later report supersedes it
            self._add((step, self.delivery.attempt, "progress"), b"progress", data)

    def emit(self, piece: Piece, known: Container[str]) -> None:
        if self._failed is not None:
            return  # a piece after one that may be lost would leave a gap; the error ends the run
        self._journal = known
        batch = self._add((piece.branch, piece.attempt, ""), b"chunk" if piece.chunk else b"", piece.data)
        if not batch.number:
            batch.number, batch.step = piece.number, piece.step
        batch.checksum = piece.checksum
        self.last_output = f"@{piece.branch} {piece.number}"

    def _add(self, target: tuple[str, int, str], mark: bytes, data: bytes) -> OutputBatch:
        writer = self._writing()
        batch = writer.add(target, mark, data)
        if self._sending is None:
            self._start_sending(writer)
        return batch

    def _writing(self) -> OutputWriter:
        """Return the writer, which most turns do not need."""
        if self._writer is None:
            self._writer = OutputWriter(self._write_batch, self._run_bytes, self._process)
        return self._writer

    def _start_sending(self, writer: OutputWriter) -> None:
        self._sending = asyncio.get_running_loop().create_task(writer.send())
        self._sending.add_done_callback(partial(self._all_sent, writer))
        self._writes.add(self._sending)
        self.wrote = True

    async def _write_batch(self, batch: OutputBatch) -> None:
        if not batch.number:
            await self._send(batch)
            return
        # Before the turn's first output, since another process may have emitted it and handed the run back.
        await self._begin_if_unsure(self._journal)
        await self._write_marks()
        self._knows_output = True
        self._writing().keep(batch)
        await self._send(batch)

    async def _send(self, batch: OutputBatch) -> None:
        place, attempt, _ = batch.target
        if batch.number:
            await self._bus.emit(self.delivery, place, attempt, batch.number, batch.checksum, batch.step, batch.pieces)
        else:
            await self._bus.stream(self.delivery, place, attempt, batch.pieces)

    def _all_sent(self, writer: OutputWriter, sending: asyncio.Task[None]) -> None:
        self._sending = None
        self._written(0, sending)
        if sending.cancelled() or sending.exception() is not None:
            writer.drop()
        elif writer.waiting:  # added after the task had looked for the last time
            self._start_sending(writer)

    def room(self) -> Awaitable[None] | None:
        flow = self._process if self._writer is None else self._writer
        if self._over is None and self._failed is None and (flow is None or not flow.full):
            return ONE_ROUND if self._writer is not None and self._writer.ends_round() else None
        return self._room()

    async def _room(self) -> None:
        if self._over is None and self._failed is None:
            await self._writing().room()
        if self._over is not None:
            raise self._over
        if self._failed is not None:
            raise self._failed

    def note(self, step: str, digest: str, name: str = "") -> None:
        write = partial(self._bus.record, self.delivery, step, packed_now(digest), "message", name)
        self.last_output = step
        self._notes.append(write)
        self._write(write(), 0)

    def _write(self, writing: Coroutine[None, None, object], size: int) -> None:
        if self._marks or self._marking is not None:
            writing = self._after_marks(writing)
        task = asyncio.get_running_loop().create_task(writing)
        size += WRITE_OVERHEAD_BYTES
        self._writing().begin(size)
        task.add_done_callback(partial(self._written, size))
        self._writes.add(task)
        self.wrote = True

    async def _after_marks(self, writing: Coroutine[None, None, object]) -> None:
        try:
            await self._write_marks()
        except BaseException:
            writing.close()
            raise
        await writing

    def _written(self, size: int, task: asyncio.Task[object]) -> None:
        self._writing().end(size)
        self._writes.discard(task)
        # Keep the first error for the commit. Nobody waits for the writes of a dropped turn.
        if not task.cancelled():
            match task.exception():
                case LimitExceeded() as over:
                    self._over = self._over or over
                case Exception() as failed:
                    self._failed = self._failed or failed

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b"", *, answered: str = ""
    ) -> dict[str, asyncio.Future[Answer]]:
        if self._replies is None:
            raise WeftError("this handler has no reply stream, so its agents cannot call others in mid-turn")
        self._asked = True
        delivery, replies = self.delivery, self._replies
        names = {call.step: name_of_step(delivery.task, delivery.run, call.step) for call in calls}
        futures = {step: replies.expect(name) for step, name in names.items()}
        for step, future in futures.items():
            delivery.waits += 1
            future.add_done_callback(partial(self._answered, delivery, names[step]))
        try:
            requested = [*sends, *calls]
            known = await self._ask(requested, state, self._newest_asked, answered)
            self._newest_asked = requested[-1].step
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise
        for step, (value, state_now) in known.items():
            replies.hand_out(names[step], Answer(value, state_now))
        replies.mark_requested(names.values())
        if delivery.deliveries > 1 and not all(future.done() for future in futures.values()):
            delivery.deliveries, delivery.quarantined = 1, False  # `ask` has cleared its deaths, since it waits
        return futures

    async def _ask(
        self, requested: Sequence[Effect], state: bytes, asked: str = "", answered: str = ""
    ) -> dict[str, tuple[bytes, bytes]]:
        """Send messages and calls, as `EventBus.ask`."""
        assert self._replies is not None
        effects = parts(requested, self.delivery, self._app, self._partitions)
        known = await self._bus.ask(
            self.delivery, time.time_ns() // 1_000_000, self._replies.name, state, effects, len(requested),
            asked=asked, answered=answered,
        )  # fmt: skip
        if known is None:
            raise TurnGone(f"{self.delivery!r} is handled by another owner")
        return known

    def _answered(self, delivery: Delivery, name: str, future: asyncio.Future[Answer]) -> None:
        delivery.waits -= 1
        if self._replies is not None:
            self._replies.forget(name, future)

    async def flush(self, *, ends: bool = False) -> None:
        """Wait for unanswered deltas, notes and marks, so that the commit does not overtake them. Raises their first
        error. A run that `ends` needs no mark that nothing has followed.
        """
        self.wrote = self._over is not None  # it ends the run, whichever turn awaits it
        if ends:
            self._marks.clear()
        await self._write_marks()
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._over is not None:
            raise self._over
