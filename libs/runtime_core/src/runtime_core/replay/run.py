"""A run on recorded results: its code runs, and nothing that it asks for happens."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime_core import codec
from runtime_core.aworld.events.message import Message, message_id
from runtime_core.bus.replies import Answer
from runtime_core.bus.values import CallBegun, RunFields
from runtime_core.client.fork import RecordedRun, RecordedStep
from runtime_core.consumer.effects import COMPLETED, Call, Failed, Publish, Send
from runtime_core.ids import any_digest
from runtime_core.runs.journal import pack
from runtime_core.runs.ports import Attempt, Definition, Functions, Meta, Workplace
from runtime_core.runs.run import Run
from runtime_core.runs.step import Step, from_json

_SAID = ("emit", "send", "publish", "message", "usage")
"""Steps without a result: where they are not recorded, nothing is missing."""


@dataclass(frozen=True, slots=True)
class DivergedStep:
    """A step at which code and record differ."""

    run: str
    step: str
    recorded: str
    """What the record holds there."""
    asked: str
    """What the code asks for."""

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run}: recorded is {self.recorded}, the code asks for {self.asked}"


class _NoBroker:
    """What a replay writes: nothing. It never comes here, since unrecorded steps end it before."""

    async def confirm(self, known: Container[str]) -> None:
        raise AssertionError("a replay has begun a step by itself")

    async def record(
        self, step: str, digest: str, status: bytes, payload: bytes, kind: str = "step", name: str = ""
    ) -> bytes:
        raise AssertionError(f"a replay has done step {step}")

    async def begin_call(self, step: str, reserve: bytes) -> CallBegun:
        raise AssertionError(f"a replay has called the model of step {step}")

    async def settle_call(
        self, step: str, digest: str, status: bytes, payload: bytes, usage: bytes, name: str = ""
    ) -> tuple[bytes, str]:
        raise AssertionError(f"a replay has called the model of step {step}")

    def stream(self, step: str, attempt: int, data: bytes) -> None:
        raise AssertionError(f"a replay has called the model of step {step}")

    def progress(self, step: str, data: bytes) -> None:
        raise AssertionError(f"a replay has done step {step}")

    async def usage(self) -> bytes:
        return b""

    async def manifests(self) -> None:
        return None

    def emit(self, step: str, digest: str, data: bytes) -> None:
        raise AssertionError(f"a replay has emitted step {step}")

    def room(self) -> None:
        return None

    def note(self, step: str, digest: str, name: str = "") -> None:
        raise AssertionError(f"a replay has kept step {step}")

    async def ask(
        self, calls: Sequence[Call], sends: Sequence[Send | Publish] = (), state: bytes = b""
    ) -> Mapping[str, asyncio.Future[Answer]]:
        raise AssertionError("a replay has asked in mid-turn")


class ReplayRun(Run):
    """A run whose steps get what `recorded` holds for them, by their place or by what they ask for.

    It ends before step `until`, at a step of which no result is recorded, and at a step that is not the recorded
    one; `stopped_at` and `diverged` then say which. With `by_place` False a step gets the first recorded result of
    the same question that no other has had: for other code than that which was recorded.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        definition: Definition,
        functions: Functions,
        *,
        task_id: str,
        meta: Meta,
        until: str | None = None,
        by_place: bool = True,
    ) -> None:
        journal = {step.id: step.wildcard for step in recorded.steps.values()} if by_place else {}
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
        self.diverged_at: DivergedStep | None = None
        self.emitted: list[Any] = []
        """Values of `ctx.emit`, in order. (Any: JSON.)"""
        self.messages: list[Message] = []
        """Messages that were emitted, in order."""
        self._by_question: Mapping[str, deque[RecordedStep]] | None = None if by_place else _questions(recorded)

    def find(self, step: Step[Any]) -> bytes | None:  # Any: steps of all result types
        first = step.id in self.unawaited
        self.unawaited.pop(step.id, None)
        if step.id == self.until:
            raise self._stop(step)
        if self._by_question is not None and step.id not in self.journal.values:
            self._answer(step, self._by_question)
        value = self.journal.values.get(step.id)
        if value is None:
            raise self._stop(step)
        there = self.recorded.steps.get(step.id)
        if self._by_question is None and there is not None and not _fits(step, there):
            raise self._diverge(step, there)
        if first:
            self._note_said(step)
        return value

    def _answer(self, step: Step[Any], questions: Mapping[str, deque[RecordedStep]]) -> None:  # Any: see find
        for digest in (step.digest, any_digest(step.kind, step.name)):
            if waiting := questions.get(digest):
                self.journal.add(step.id, waiting.popleft().wildcard)
                return
        if step.kind in _SAID:
            self.journal.add(step.id, pack(step.digest, COMPLETED, self.recorded.started_ms, b"null"))

    def _stop(self, step: Step[Any]) -> asyncio.CancelledError:  # Any: see find
        if self.stopped_at is None and self.diverged_at is None:
            self.stopped_at = step.id
        why = f"step {step.id} of run {self.run_id} ({_asked(step)}) has no recorded result, or the replay ends there"
        return self.flow.end(Failed("ReplayStopped", why, retryable=False), why)

    def _diverge(self, step: Step[Any], there: RecordedStep) -> asyncio.CancelledError:  # Any: see find
        diverged = DivergedStep(self.run_id, step.id, _shown(there.kind, there.name, there.asked), _asked(step))
        if self.stopped_at is None and self.diverged_at is None:
            self.diverged_at = diverged
        return self.flow.end(Failed("Divergence", str(diverged), retryable=False), str(diverged))

    def _note_said(self, step: Step[Any]) -> None:  # Any: see find
        if step.kind == "emit":
            self.emitted.append(from_json(step.data))
        elif step.kind == "message":
            told = from_json(step.data)
            if Message.is_message(told):
                assert isinstance(told, dict)  # is_message says so
                message = Message.from_dict(told)
                self.messages.append(message.replace(id=message.id or message_id(self.task_id, self.run_id, step.id)))


def _questions(recorded: RecordedRun) -> dict[str, deque[RecordedStep]]:
    """Recorded steps by the digest of what was asked, in the order of the program."""
    found: dict[str, deque[RecordedStep]] = defaultdict(deque)
    for step in recorded.before(None):
        found[step.digest].append(step)
    return found


def _fits(step: Step[Any], there: RecordedStep) -> bool:  # Any: steps of all result types
    return not there.kind or there.digest in (step.digest, any_digest(step.kind, step.name))


def _asked(step: Step[Any]) -> str:  # Any: steps of all result types
    return _shown(step.kind, step.name, step.data)


def _shown(kind: str, name: str, data: bytes) -> str:
    told = codec.quoted(from_json(data), 120) if data else ""
    return f"{kind} {name} {told}".strip()
