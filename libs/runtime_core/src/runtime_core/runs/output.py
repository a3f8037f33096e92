"""The output of a run: which pieces its branches have emitted, their rows, and the writer that sends them.

Output is a separate stream, not part of the journal. The broker notes for each branch of the run how many pieces it
has, with a checksum of them. A replay emits them again, and this process skips as many. If the checksums differ, the
code has emitted something else than before: the output starts over, with the next attempt.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from runtime_core.bus.deliveries import BranchOutput, StoredOutput
from runtime_core.errors import OutputChanged
from runtime_core.runs.journal import StepOfRun
from runtime_core.wire.step import BYTES, PIECES

if TYPE_CHECKING:
    from runtime_core.runs.journal import Rows
    from runtime_core.settings import Settings
    from runtime_core.wire.step import Step as Row

RUN_BYTES = 1024 * 1024
"""The most unanswered bytes of a run before `ctx.emit` waits."""
PROCESS_BYTES = 32 * RUN_BYTES
"""The most unanswered bytes of all runs of a process before `ctx.emit` waits."""
PIECE_BYTES = 128
"""The memory that an unanswered piece takes besides its value."""
BATCH_PIECES = 200
"""The most pieces of one write, during which the broker serves no one else."""
BATCH_BYTES = 256 * 1024
"""The size in bytes at which a write takes no further piece."""
ROUND_PIECES = 64
"""After this many pieces, `ctx.emit` lets the rest of the process run."""
KEPT_BYTES = 1024 * 1024
"""How many bytes of a turn's output are kept until its commit, to send them again if the server loses them."""
RECORDED_BYTES = 1024 * 1024
"""The most bytes of output in the rows of a turn. The commit writes all of these rows at once."""
SHORT_BYTES = 100
"""Beyond that limit, a row that begins still has its first piece if it is not larger."""


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """The most unanswered bytes of output before `ctx.emit` waits."""

    run: int = RUN_BYTES
    """Of one run."""
    process: int = PROCESS_BYTES
    """Of all runs of a process."""

    @classmethod
    def of_settings(cls, settings: Settings) -> OutputLimits:
        return cls(settings.output_run_bytes, settings.output_process_bytes)


OUTPUT = "e"
"""The end of the name of a branch's output, after the prefix of the branch's steps."""


class PieceStep(StepOfRun, Protocol):
    after: int
    """How many steps its branch took before it."""
    branch_name: str
    """Of its branch's output: the prefix of the branch's steps, and `OUTPUT`."""


class Piece(NamedTuple):
    """A piece of output that the broker may not have yet."""

    branch: str
    """The name of the branch's output."""
    attempt: int
    """Of the run's output."""
    number: int
    """Of the branch's pieces, from 1."""
    checksum: int
    """Of the branch's output with this piece."""
    step: str
    data: bytes
    """JSON."""
    chunk: bool


class _Streak:
    """The row of pieces that a branch has emitted without another step between them."""

    __slots__ = ("after", "cut", "pieces", "row", "size", "texts", "values")

    def __init__(self, row: Row, after: int, data: bytes) -> None:
        self.row = row
        self.after = after
        """How many steps the branch took before these pieces."""
        self.pieces = 1
        self.size = len(data)
        self.texts = data[:1] == b'"'
        """Whether all pieces are texts."""
        self.values = bytearray(data)
        """The pieces that the row has, with commas between them."""
        self.cut = False

    def close(self) -> None:
        """Write the pieces into the row: a text of all texts, else a list of the values."""
        if self.pieces == 1:
            return
        output = b"[" + bytes(self.values) + b"]"
        if self.texts:
            output = msgspec.json.encode("".join(msgspec.json.decode(output, type=list[str])))
        self.row.output = msgspec.Raw(output)
        self.row.attributes = {**self.row.attributes, PIECES: self.pieces}
        if self.cut:
            self.row.attributes[BYTES] = self.size


class _Branch:
    """The output of one branch in this execution."""

    __slots__ = ("checksum", "count", "streak", "was")

    def __init__(self, was: BranchOutput) -> None:
        self.was = was
        """On the broker, when the run was read."""
        self.count = 0
        self.checksum = 0
        self.streak: _Streak | None = None


_NOTHING = BranchOutput()


class RunOutput:
    """The output of one execution of a run. `stored` is its output on the broker, None if it has none."""

    __slots__ = ("_branches", "_recorded_bytes", "attempt")

    def __init__(self, stored: StoredOutput | None = None) -> None:
        self.attempt = 1 if stored is None else stored.attempt
        self._branches = {} if stored is None else {name: _Branch(was) for name, was in stored.branches.items()}
        self._recorded_bytes = 0

    def add(self, step: PieceStep, rows: Rows) -> Piece | None:
        """Count a piece, and add it to the rows unless it is recorded. Return it unless the broker has it.

        Raises OutputChanged if the pieces so far are not those that the broker has.
        """
        name = step.branch_name
        own = self._branches.get(name)
        if own is None:
            own = self._branches[name] = _Branch(_NOTHING)
        own.count += 1
        own.checksum = zlib.crc32(step.data, own.checksum)
        was = own.was
        if own.count == was.count and was.checksum not in (None, own.checksum):
            raise self._changed(f"the first {own.count} pieces differ")
        if own.count > was.recorded:
            self._note(own, step, rows)
        if own.count <= was.count:
            return None
        return Piece(name, self.attempt, own.count, own.checksum, step.id, step.data, step.name == "chunk")

    def _note(self, own: _Branch, step: PieceStep, rows: Rows) -> None:
        data, streak = step.data, own.streak
        fits = self._recorded_bytes + len(data) <= RECORDED_BYTES
        if streak is None or step.after != streak.after:
            if streak is not None:
                streak.close()
            if fits or len(data) <= SHORT_BYTES:
                self._recorded_bytes += len(data)
            else:
                data = b'"(%d bytes, which are on the task\'s output only)"' % len(data)
            rows.add(step, output=data)
            own.streak = _Streak(rows.collected[-1], step.after, data)
            return
        streak.pieces += 1
        streak.size += len(data)
        streak.row.ended = time.time() * 1000
        if not fits or streak.cut:
            streak.cut = True
            return
        self._recorded_bytes += len(data)
        streak.texts = streak.texts and data[:1] == b'"'
        streak.values += b"," + data

    def close_rows(self) -> None:
        """Complete the rows of this turn, before they are taken."""
        self._recorded_bytes = 0
        for own in self._branches.values():
            if own.streak is not None:
                own.streak.close()
                own.streak = None

    def check_end(self, stopped: Iterable[str]) -> None:
        """Raise OutputChanged if the run has ended with less output than the broker has.

        `stopped` has the prefixes of branches that a replay does not start.
        """
        for name, own in self._branches.items():
            if own.count < own.was.count and not any(name.startswith(prefix) for prefix in stopped):
                raise self._changed(f"there are {own.count} pieces, not {own.was.count}")

    def _changed(self, how: str) -> OutputChanged:
        return OutputChanged(f"a replay has emitted other output: {how}", self.attempt + 1)


class OutputBatch:
    """Pieces that one write sends."""

    __slots__ = ("checksum", "number", "pieces", "size", "step", "target")

    def __init__(self, target: tuple[str, int, str]) -> None:
        self.target = target
        """Of output: the branch, the attempt, and empty. Of a step: its id, the attempt, and `chunk` or `progress`."""
        self.pieces: list[bytes] = []
        """Alternately a mark and a value, as the broker takes them."""
        self.size = 0
        self.number = 0
        """Of the first piece in its branch."""
        self.checksum = 0
        self.step = ""

    @property
    def last(self) -> int:
        """The number of the last piece in its branch."""
        return self.number + len(self.pieces) // 2 - 1


class Outflow:
    """Bounds the unanswered bytes of a run or of a process. Belongs to one event loop."""

    __slots__ = ("_limit", "_waiting", "bytes", "run_bytes")

    def __init__(self, limit: int, run_bytes: int = RUN_BYTES) -> None:
        """`run_bytes`: the limit of each run of a process."""
        self._limit = limit
        self.run_bytes = run_bytes
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes > self._limit

    def begin(self, size: int) -> None:
        self.bytes += size

    def end(self, size: int) -> None:
        self.bytes -= size
        while self._waiting and not self.full:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def room(self) -> None:
        """Wait until the unanswered bytes are below the limit."""
        while self.full:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting


class OutputWriter:
    """Sends the pieces of a turn in order. While a write is unanswered, the next pieces collect for one more."""

    __slots__ = ("_added", "_kept", "_kept_bytes", "_last", "_process", "_queue", "_write", "own")

    def __init__(
        self, write: Callable[[OutputBatch], Awaitable[None]], run_bytes: int, process: Outflow | None = None
    ) -> None:
        """`write` sends a batch. `run_bytes` bounds the unanswered bytes, and `process` those of all runs."""
        self._write = write
        self.own = Outflow(run_bytes)
        self._process = process or Outflow(PROCESS_BYTES)
        self._queue: deque[OutputBatch] = deque()
        self._added = 0
        self._kept: list[OutputBatch] = []
        self._kept_bytes = 0
        self._last: dict[str, OutputBatch] = {}

    def keep(self, batch: OutputBatch) -> None:
        """Keep a batch of output that is sent, until the turn commits."""
        self._kept_bytes += batch.size
        if self._kept_bytes <= KEPT_BYTES:
            self._kept.append(batch)
        self._last[batch.target[0]] = batch

    def kept(self) -> Iterator[OutputBatch]:
        """Yield the turn's output, to send it again: its first pieces, and how far each branch is.

        Pieces that are no longer here are lost with the server's. No replay sends them out of their order.
        """
        yield from self._kept
        for batch in self._last.values():
            end = OutputBatch(batch.target)
            end.number, end.checksum, end.step = batch.last + 1, batch.checksum, batch.step
            yield end

    def forget(self) -> None:
        """Forget the output of a committed turn."""
        self._kept.clear()
        self._kept_bytes = 0
        self._last.clear()

    def ends_round(self) -> bool:
        """Return whether enough pieces were added for others to run now."""
        if self._added < ROUND_PIECES:
            return False
        self._added = 0
        return True

    @property
    def full(self) -> bool:
        return self.own.full or self._process.full

    def begin(self, size: int) -> None:
        """Count bytes that are on their way."""
        self.own.begin(size)
        self._process.begin(size)

    def end(self, size: int) -> None:
        """Forget bytes that have arrived."""
        self.own.end(size)
        self._process.end(size)

    async def room(self) -> None:
        """Wait until there is room in the run and in the process."""
        await self.own.room()
        await self._process.room()

    def add(self, target: tuple[str, int, str], mark: bytes, data: bytes) -> OutputBatch:
        """Add a piece to the last batch, or to a new one. Return the batch."""
        batch = self._queue[-1] if self._queue else None
        if (
            batch is None
            or batch.target != target
            or batch.size >= BATCH_BYTES
            or len(batch.pieces) >= 2 * BATCH_PIECES
        ):
            batch = OutputBatch(target)
            self._queue.append(batch)
        self._added += 1
        batch.pieces += (mark, data)
        size = len(data) + PIECE_BYTES
        batch.size += size
        self.begin(size)
        return batch

    async def send(self) -> None:
        """Send all batches. After an error, drop those that are left, and raise it.

        Batches of one branch are sent one after the other: a write that fails leaves no gap.
        """
        sending: list[OutputBatch] = []
        try:
            while self._queue:
                sending = self._next()
                if len(sending) == 1:
                    await self._write(sending[0])
                else:
                    for done in await asyncio.gather(*map(self._write, sending), return_exceptions=True):
                        if done is not None:
                            raise done
                self._end(sending)
                sending = []
        finally:
            self._end(sending)
            self.drop()

    @property
    def waiting(self) -> bool:
        """Whether pieces wait to be sent."""
        return bool(self._queue)

    def drop(self) -> None:
        """Forget the pieces that wait to be sent."""
        self._end(self._queue)
        self._queue.clear()

    def _next(self) -> list[OutputBatch]:
        """Take the first batches that belong to different branches."""
        batches: dict[tuple[str, int, str], OutputBatch] = {}
        while self._queue and self._queue[0].target not in batches:
            batch = self._queue.popleft()
            batches[batch.target] = batch
        return list(batches.values())

    def _end(self, batches: Iterable[OutputBatch]) -> None:
        for batch in batches:
            self.end(batch.size)
