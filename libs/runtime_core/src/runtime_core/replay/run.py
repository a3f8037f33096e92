"""A run with recorded results: its code runs, but its steps are not executed."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime_core.aworld.events.message import Message, message_id
from runtime_core.bus.commits import JOURNAL_LIMIT, CallBegun
from runtime_core.bus.deliveries import RunFields
from runtime_core.bus.replies import Answer
from runtime_core.client.fork import RecordedRun, RecordedStep
from runtime_core.consumer.effects import COMPLETED, Effect, Failed, JournaledStep
from runtime_core.consumer.settle import place_in_code
from runtime_core.ids import any_digest, attempt_in_digest, digest_in_attempt, step_digest
from runtime_core.record.step import as_call
from runtime_core.runs.calls import RequestStep
from runtime_core.runs.effects import Call
from runtime_core.runs.journal import StepOfRun, canonical, from_json, pack
from runtime_core.runs.output import Piece, PieceStep
from runtime_core.runs.ports import Attempt, Functions, Meta, Workplace
from runtime_core.runs.run import Run, RunDefinition
from runtime_core.runs.scheduler import Branch

_SAID = ("send", "publish", "message", "usage", "release")
"""Kinds of steps without a result, which a record need not have."""


@dataclass(frozen=True, slots=True)
class DivergedStep:
    """A step at which code and record differ."""

    run: str
    step: str
    recorded: str
    """The recorded step."""
    asked: str
    """The step that the code requests."""
    line: str = ""
    """The line of the user's code, as `app.py:12 in report`; empty if that is not known."""

    def __str__(self) -> str:
        where = f"step {self.step} of run {self.run}{f' ({self.line})' if self.line else ''}"
        return f"{where}: the record has {self.recorded}, but the code requests {self.asked}"


class _NoBroker:
    """A port that must not be called: an unrecorded step ends the replay first."""

    async def confirm(self, known: Container[str]) -> None:
        raise AssertionError("a replay must not start a step")

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        raise AssertionError(f"a replay must not execute step {step}")

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        raise AssertionError(f"a replay must not call the model of step {step}")

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        raise AssertionError(f"a replay must not call the model of step {step}")

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        raise AssertionError(f"a replay must not call the model of step {step}")

    def progress(self, step: str, data: bytes) -> None:
        raise AssertionError(f"a replay must not execute step {step}")

    async def usage(self) -> bytes:
        return b""

    async def manifests(self) -> None:
        return None

    def emit(self, piece: Piece, known: Container[str]) -> None:
        raise AssertionError(f"a replay must not emit piece {piece.number}")

    def room(self) -> None:
        return None

    def note(self, step: str, digest: str, name: str = "") -> None:
        raise AssertionError(f"a replay must not store step {step}")

    def mark(self, mark: JournaledStep, known: Iterable[str]) -> None:
        """An open run reaches a patch: the replay ends at the next step."""

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Effect] = (), state: bytes = b""
    ) -> Mapping[str, asyncio.Future[Answer]]:
        raise AssertionError("a replay must not send requests")


class ReplayRun(Run):
    """A run whose steps get their results from `recorded`, by place or by request.

    It ends before step `until`, at a step without a recorded result, and at a step that differs from the recorded
    one; then `stopped_at` or `diverged` is set. If `by_place` is False, a step gets the first unused result of an
    equal request, so that other code than the recorded code can run.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        definition: RunDefinition,
        functions: Functions,
        *,
        task_id: str,
        meta: Meta,
        until: str | None = None,
        by_place: bool = True,
    ) -> None:
        steps = recorded.steps.values() if by_place else ()
        journal = {step.id: step.wildcard for step in steps if step.kind != "emit"}
        super().__init__(
            definition,
            Attempt(task_id, recorded.id, recorded.key, recorded.attempt),
            RunFields(data=recorded.input, started_ms=recorded.started_ms, journal=journal),
            _NoBroker(),
            Workplace(functions),
            meta,
        )
        self.recorded = recorded
        self.until = until
        self.stopped_at: str | None = None
        self.unrecorded: DivergedStep | None = None
        """The step without a recorded result at which it stopped."""
        self.asked: set[str] = set()
        """The steps that the code has requested."""
        self.diverged_at: DivergedStep | None = None
        self.emitted: list[Any] = []
        """Values of `ctx.emit`, in order. Any: JSON."""
        self.messages: list[Message] = []
        """The emitted messages, in order."""
        self._pieces_left = sum(recorded.emitted_before(None).values()) + (0 if by_place else JOURNAL_LIMIT)
        """How many pieces of output the code may emit: as many as recorded, and other code some more."""
        self._by_question: Mapping[str, deque[RecordedStep]] | None = None if by_place else _questions(recorded)

    def find(self, step: StepOfRun) -> bytes | None:
        first = step.id in self.unawaited
        self.unawaited.pop(step.id, None)
        if step.id == self.until:
            raise self._stop(step)
        if self._by_question is not None and step.id not in self.journal.values:
            self._answer(step, self._by_question)
        self.asked.add(step.id)
        value = self.journal.values.get(step.id)
        if value is None:
            if self.recorded.status and isinstance(step, RequestStep) and self._in_job():
                return None  # the run ended before the step did: the job waits until the run ends
            raise self._stop(step)
        there = self.recorded.steps.get(step.id)
        if self._by_question is None and there is not None and not _fits(step, there):
            raise self._diverge(step, there)
        if first:
            self._note_said(step)
        return value

    def patch(self, branch: Branch, name: str) -> str | None:
        """As `Run.patch`. Empty: the branch takes the patch, and there is no mark to look for."""
        if self._by_question is None:
            return super().patch(branch, name)
        taken = any(step.kind == "patch" and step.name == name for step in self.recorded.steps.values())
        return "" if taken else None

    def passed(self, branch: Branch) -> bool:
        """As `Run.passed`. A run that has ended has passed every place."""
        return bool(self.recorded.status) or super().passed(branch)

    def emit(self, step: PieceStep, branch: Branch) -> None:
        there = self.recorded.steps.get(step.id)
        if step.id == self.until or not self._pieces_left:
            raise self._stop(step)
        self.asked.add(step.id)
        if self._by_question is None and there is not None and there.pieces == 1:
            step.digest = step_digest(step.kind, step.name, step.key, canonical(step.data))
            if not _fits(step, there):
                raise self._diverge(step, there)
        self._pieces_left -= 1
        self.emitted.append(from_json(step.data))

    def read_attempt(self) -> int:
        """Return `ctx.attempt` as the recorded run saw it; its last attempt if its record does not say."""
        branch, read = self.flow.here, self.recorded.attempts
        if branch is None or read is None:
            return self.attempt
        earlier = (read.get(f"{branch.prefix}{count}") for count in range(branch.count, -1, -1))
        return next((attempt for attempt in earlier if attempt is not None), 1)

    def _in_job(self) -> bool:
        branch = self.flow.here
        while branch is not None and not branch.beside:
            branch = branch.parent
        return branch is not None

    def _answer(self, step: StepOfRun, questions: Mapping[str, deque[RecordedStep]]) -> None:
        for digest in (step.digest, any_digest(step.kind, step.name)):
            if waiting := questions.get(digest):
                self.journal.add(step.id, waiting.popleft().wildcard)
                return
        if step.kind in _SAID:
            self.journal.add(step.id, pack(step.digest, COMPLETED, self.recorded.started_ms, b"null"))

    def _stop(self, step: StepOfRun) -> asyncio.CancelledError:
        if self.stopped_at is None and self.diverged_at is None:
            self.stopped_at = step.id
            if step.id != self.until:
                self.unrecorded = DivergedStep(self.run_id, step.id, "", _asked(step), _line())
        why = f"step {step.id} of run {self.run_id} ({_asked(step)}) has no recorded result, or the replay ends there"
        return self.flow.end(Failed("ReplayStopped", why, retryable=False), why)

    def _diverge(self, step: StepOfRun, there: RecordedStep) -> asyncio.CancelledError:
        recorded = as_call(there.kind, there.name, there.key, there.request)
        diverged = DivergedStep(self.run_id, step.id, recorded, _asked(step), _line())
        if self.stopped_at is None and self.diverged_at is None:
            self.diverged_at = diverged
        return self.flow.end(Failed("Divergence", str(diverged), retryable=False), str(diverged))

    def _note_said(self, step: StepOfRun) -> None:
        if step.kind == "message":
            data = from_json(step.data)
            if Message.is_message(data):
                assert isinstance(data, dict)  # is_message has checked it
                message = Message.from_dict(data)
                self.messages.append(message.replace(id=message.id or message_id(self.task_id, self.run_id, step.id)))


def _questions(recorded: RecordedRun) -> dict[str, deque[RecordedStep]]:
    """Return the recorded steps by digest of their request, in program order."""
    found: dict[str, deque[RecordedStep]] = defaultdict(deque)
    for step in recorded.before(None):
        found[step.digest].append(step)
    return found


def _fits(step: StepOfRun, there: RecordedStep) -> bool:
    asked = step.digest
    if (attempt := attempt_in_digest(there.digest)) > 1:
        asked = digest_in_attempt(asked, attempt)
    return not there.kind or there.digest in (asked, any_digest(step.kind, step.name))


def _asked(step: StepOfRun) -> str:
    return as_call(step.kind, step.name, step.key, step.data)


def _line() -> str:
    return place_in_code(sys._getframe(1))[0]
