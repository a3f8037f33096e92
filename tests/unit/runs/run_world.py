"""A broker for runs, in memory: it journals, wakes runs by the rules of `Suspended`, and crashes on request."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime_core.app.app import App
from runtime_core.app.registry import Registry
from runtime_core.bus.commits import CallBegun
from runtime_core.bus.deliveries import BranchOutput, RunFields, StoredOutput
from runtime_core.bus.replies import Answer
from runtime_core.consumer.effects import NO_WAKE, WAKE, Completed, Effect, Failed, JournaledStep, Suspended, TurnResult
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import OutputChanged
from runtime_core.runs.context import AgentContext
from runtime_core.runs.effects import Call, Question, Send, Timer
from runtime_core.runs.journal import pack
from runtime_core.runs.output import Piece
from runtime_core.runs.ports import Attempt, Meta, Workplace
from runtime_core.runs.run import Run
from runtime_core.wire.step import RESULT_ERROR, RESULT_OK, Usage, total_usage

STARTED_MS = 1_700_000_000_000
Code = Callable[..., Coroutine[Any, Any, object]]  # Any: what programs of tests take and give


class Crash(Exception):
    """The process dies here."""


class Program:
    """The definition of an agent around a test's function."""

    def __init__(self, code: Code, timeout_seconds: float = 30.0) -> None:
        self.code = code
        self.name = "agent-under-test"
        self.timeout_seconds = timeout_seconds
        self.own_tools: Sequence[object] = ()

    def decode_input(self, data: bytes, /) -> object:
        return json.loads(data)

    def encode_output(self, value: object, /) -> bytes:
        from runtime_core.declare.schema import encode

        return encode(value, "output")

    def start(self, ctx: AgentContext, value: object, /) -> Coroutine[Any, Any, object]:  # Any: asyncio's own
        return self.code(ctx, value)


def calls_of(turn: TurnResult) -> list[Call]:
    """Return the calls of a suspended turn, in the order of the program."""
    assert isinstance(turn, Suspended), turn
    return [asked for asked in turn.requests if isinstance(asked, Call)]


def answer(kind: str, name: str, data: object) -> object:
    """Answers a call; an Exception is an error. Depends only on the call."""
    if name.startswith("bad"):
        return ValueError(f"{name} is bad")
    return {"of": name, "got": data}


@dataclass
class World:
    """One task's run on a broker, with its requests, messages and rows. The journal survives crashes."""

    functions: Registry = field(default_factory=lambda: App("test").functions)
    order: random.Random | None = None
    """Selects the open step to answer next; None: the oldest."""
    cold: bool = False
    """Whether each turn replays from the journal instead of continuing in memory."""
    crash_at: int = 0
    """The number of the write or commit at which the process dies; 0: never."""
    crash_before: bool = False
    """Whether it dies before that write reaches the broker."""
    state: bytes = b""
    unanswered: frozenset[str] = frozenset()
    """Steps without an answer until `answer_all`."""

    offers: Sequence[Manifest] = ()
    """The manifests of all apps."""

    journal: dict[str, bytes] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    open: dict[str, tuple[str, str, object]] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str, object]] = field(default_factory=list)
    emitted: list[tuple[str, object]] = field(default_factory=list)
    output: dict[str, BranchOutput] = field(default_factory=dict)
    output_attempt: int = 1
    streamed: list[tuple[str, int, object]] = field(default_factory=list)
    progressed: list[tuple[str, object]] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    """How often each model call has begun."""
    recorded: list[str] = field(default_factory=list)
    marks: list[JournaledStep] = field(default_factory=list)
    """Marks that no write has followed yet."""
    sent: list[tuple[str, str, object]] = field(default_factory=list)
    used: list[Usage] = field(default_factory=list)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    turns: int = 0
    writes: int = 0
    clock: int = STARTED_MS
    run: Run | None = None

    # ---- the port

    async def confirm(self, known: Container[str]) -> None:
        """No other process runs here."""
        self._write_marks()

    async def record(
        self,
        step: str,
        digest: str,
        status: bytes,
        payload: bytes,
        kind: str = "step",
        name: str = "",
        usage: bytes = b"",
    ) -> bytes:
        self._dies(before=True)
        if step not in self.journal:
            self.recorded.append(step)
            if usage:
                self.used.append(Usage.from_json(usage))
            self.journal[step] = pack(digest, status, self._tick(), payload)
        self._dies(before=False)
        return self.journal[step]

    async def store_again(
        self, journaled: Sequence[JournaledStep], known: Container[str], answered: Sequence[str] = ()
    ) -> str:
        raise AssertionError("nothing is lost here")

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        self._dies(before=True)
        self.begun[step] = self.begun.get(step, 0) + 1
        self._dies(before=False)
        wanted: dict[str, tuple[float, float]] = json.loads(reserve) if reserve else {}
        return CallBegun(self.begun[step], {name: amounts[1] for name, amounts in wanted.items()})

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        return await self.record(step, digest, status, payload, usage=usage), ""

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        self.streamed.append((step, attempt, json.loads(data)))

    def progress(self, step: str, data: bytes) -> None:
        self.progressed.append((step, json.loads(data)))

    async def usage(self) -> bytes:
        return total_usage(self.used).to_json()

    async def manifests(self) -> Sequence[Manifest]:
        return self.offers

    def emit(self, piece: Piece, known: Container[str]) -> None:
        self._write_marks()
        self._dies(before=True)
        branch = self.output.setdefault(piece.branch, BranchOutput())
        if piece.number > branch.count:
            branch.count, branch.checksum = piece.number, piece.checksum
            self.emitted.append((piece.step, json.loads(piece.data)))
        self._dies(before=False)

    def room(self) -> None:
        """The broker accepts everything at once."""

    def note(self, step: str, digest: str, name: str = "") -> None:
        self._write_marks()
        self._dies(before=True)
        if step not in self.journal:
            self.journal[step] = pack(digest, RESULT_OK, self._tick(), b"null")
        self._dies(before=False)

    def mark(self, mark: JournaledStep, known: Iterable[str]) -> None:
        self.marks.append(mark)

    def _write_marks(self) -> None:
        marks, self.marks = self.marks, []
        for mark in marks:
            self._dies(before=True)
            self.journal.setdefault(mark.step, mark.value)
            self._dies(before=False)

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b"", *, answered: str = ""
    ) -> dict[str, asyncio.Future[Answer]]:
        raise AssertionError("programs of this world ask by the commit of their turns")

    def _dies(self, *, before: bool) -> None:
        if before:
            self.writes += 1
        if self.writes == self.crash_at and before == self.crash_before:
            raise Crash

    def _tick(self) -> int:
        self.clock += 1000
        return self.clock

    # ---- driving

    def new_run(
        self, program: Program, input: object = None, *, attempt: int = 1, unrecorded: Collection[str] = ()
    ) -> Run:
        stored = RunFields(
            data=json.dumps(input).encode(),
            started_ms=STARTED_MS,
            journal=self.journal,
            pending=self.pending,
            state=self.state,
            unrecorded=dict.fromkeys(unrecorded, b""),
            output=self.stored_output(),
        )
        meta = Meta(session_id="s-1", metadata={"tenant": "a"})
        return Run(program, Attempt("t-1", "r", number=attempt), stored, self, Workplace(self.functions), meta)

    def stored_output(self) -> StoredOutput | None:
        """Return how far the output is, as a run is read."""
        branches = {name: copy.copy(branch) for name, branch in self.output.items()}
        return StoredOutput(self.output_attempt, branches) if branches else None

    async def play(self, code: Code | Program, input: object = None) -> Completed | Failed:
        """Run the program to its end, through crashes."""
        program = code if isinstance(code, Program) else Program(code)
        while True:
            try:
                result = await self.turn(program, input)
            except OutputChanged as changed:
                self.output_attempt = changed.attempt
                self.output = {name: BranchOutput(recorded=was.recorded) for name, was in self.output.items()}
                assert self.run is not None
                await self.run.aclose()
                self.run = None
                continue
            except Crash:
                self.crash_at = 0
                assert self.run is not None
                await self.run.aclose()
                self.run = None
                continue
            if not isinstance(result, Suspended):
                return result
            if self.cold:
                assert self.run is not None
                await self.run.aclose()
                self.run = None
            while not self.awake():
                self.answer_one()

    async def turn(self, program: Program, input: object = None) -> TurnResult:
        self.turns += 1
        assert self.turns < 500, "the program does not end"
        if self.run is None:
            self.run = self.new_run(program, input)
        self.marks.clear()
        result = await self.run.advance()
        if isinstance(result, Suspended):
            self._write_marks()
        self._dies(before=True)
        self.commit(result)
        self._dies(before=False)
        return result

    def commit(self, result: TurnResult) -> None:
        self.rows += [(row.kind, row.step, row.name, row.status) for row in result.steps]
        self.used += [spend.usage for spend in result.spends]
        if not isinstance(result, Failed):
            for branch in self.output.values():
                branch.recorded = branch.count
            for spend in result.spends:
                assert spend.step not in self.journal, "counted twice"
                self.journal[spend.step] = pack(spend.digest, RESULT_OK, self._tick(), b"null")
            for send in result.sends:
                assert isinstance(send, Send), "this world has no topics"
                assert send.step not in self.journal, "sent twice"
                self.journal[send.step] = pack(send.digest, RESULT_OK, self._tick(), b"null")
                self.sent.append((send.agent, send.key, json.loads(send.data)))
        if not isinstance(result, Suspended):
            self.run = None
            return
        waits = dict(result.again)
        for asked in result.requests:
            match asked:
                case Call():
                    self._ask(asked.step, asked.digest, asked.kind, asked.name, json.loads(asked.data))
                case Timer():
                    self._ask(asked.step, asked.digest, "timer", "sleep", asked)
                case Question():
                    self._ask(asked.step, asked.digest, "human", asked.prompt, asked)
            waits[asked.step] = asked.wait
        assert set(waits) <= set(self.pending) | set(self.journal)
        self.waits = waits
        assert waits, "a suspended run must wait for something"

    def _ask(self, step: str, digest: str, kind: str, name: str, data: object) -> None:
        assert step not in self.pending, f"{step} is asked twice"
        assert step not in self.journal, f"{step} has an answer and is asked"
        self.pending[step] = digest
        self.open[step] = (kind, name, data)
        shown = "…" if isinstance(data, (Timer, Question)) else data
        self.asked.append((step, kind, name, shown))

    def awake(self) -> bool:
        """Apply the broker's rule for waking a suspended run."""
        missing = {step for step in self.waits if step not in self.journal}
        for step, wait in self.waits.items():
            if wait == WAKE and step not in missing:
                return True
            if wait not in (WAKE, NO_WAKE) and not any(self.waits[other] == wait for other in missing):
                return True
        return False

    def answer_one(self, step: str = "") -> None:
        choices = [name for name in self.open if name not in self.unanswered]
        assert choices, f"nothing is left to answer and the run sleeps: waits {self.waits}"
        step = step or (self.order.choice(choices) if self.order else choices[0])
        kind, name, data = self.open.pop(step)
        digest = self.pending.pop(step)
        result: object
        if isinstance(data, Timer):
            self.journal[step] = pack(digest, RESULT_OK, self._tick(), b"null")
        else:
            if isinstance(data, Question) and data.expects:
                result = True
            elif isinstance(data, Question):
                result = answer(kind, name, json.loads(data.data))
            else:
                result = answer(kind, name, data)
            if isinstance(result, Exception):
                error = {"type": type(result).__name__, "message": str(result)}
                self.journal[step] = pack(digest, RESULT_ERROR, self._tick(), json.dumps(error).encode())
            else:
                self.journal[step] = pack(digest, RESULT_OK, self._tick(), json.dumps(result).encode())
        if self.run is not None:
            self.run.deliver(step, self.journal[step])


async def suspended(world: World, code: Code) -> Suspended:
    """Run one turn of the code, which must wait then."""
    result = await world.turn(Program(code))
    assert isinstance(result, Suspended), result
    return result


async def failed(code: Code | Program, world: World | None = None) -> Failed:
    """Run the code to its end, which must be an error."""
    result = await (world or World()).play(code)
    assert isinstance(result, Failed), result
    return result


def counting(calls: list[str], result: object = None) -> Callable[[str], Awaitable[object]]:
    """Return an async body that counts its executions."""

    async def body(name: str) -> object:
        calls.append(name)
        return result if result is not None else {"made": name}

    return body
