"""Rows of the trajectory: what the steps that a turn has finished look like on the record."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import msgspec

from runtime_core.consumer.effects import COMPLETED
from runtime_core.record.step import DIGEST, NOTHING
from runtime_core.record.step import Step as Row
from runtime_core.record.step import StepError as RowError
from runtime_core.runs.journal import payload_of, status_of, time_of
from runtime_core.runs.step import Step, recorded_error
from runtime_core.trajectory.model_call import told_by

EMITTED_BYTES = 1024 * 1024
"""How much of what a run has emitted its rows hold: they wait for the commit, and go on the record in one write."""
SHORT_BYTES = 100
"""A delta up to this size is kept all the same."""


class Rows:
    """Collects a turn's rows. Only steps that the run does by itself have one here: who answers a tool call, a
    question or a timer records it.

    `unrecorded` names journaled steps whose rows no commit has written, since the process died in between.
    """

    __slots__ = ("_attempt", "_emitted", "_owner", "_rows", "_run", "_unrecorded")

    def __init__(self, run: str, attempt: int, owner: str, unrecorded: Collection[str]) -> None:
        self._run = run
        self._attempt = attempt
        self._owner = owner
        self._unrecorded = set(unrecorded)
        self._rows: list[Row] = []
        self._emitted = 0

    def add(
        self,
        step: Step[Any],  # Any: steps of all result types
        *,
        started: float = 0.0,
        ended: float = 0.0,
        input: bytes = b"",
        output: bytes = b"",
        error: RowError | None = None,
        usage: dict[str, float] | None = None,
        attributes: dict[str, Any] | None = None,  # Any: texts, numbers, lists of them
    ) -> None:
        """Note a finished step. Times are epoch milliseconds; 0: now."""
        ended = ended or time.time() * 1000
        cut = False
        if step.kind == "emit":
            self._emitted += len(output)
            cut = self._emitted > EMITTED_BYTES and len(output) > SHORT_BYTES
        if cut:
            output = b'"(%d bytes, which are on the task\'s output only)"' % len(output)
        if cut or step.identified:
            attributes = {**(attributes or {}), DIGEST: step.digest}
        self._rows.append(
            Row(
                run=self._run,
                kind=step.kind,
                name=step.name,
                status="completed" if error is None else "failed",
                started=started or ended,
                ended=ended,
                step=step.id,
                attempt=self._attempt,
                key=step.key,
                input=msgspec.Raw(input) if input else NOTHING,
                output=msgspec.Raw(output) if output else NOTHING,
                error=error,
                usage=usage or {},
                attributes=attributes or {},
                owner=self._owner,
            )
        )

    def replayed(self, step: Step[Any], value: bytes) -> None:  # Any: steps of all result types
        """Note a step that the journal held, where its row is still to be written."""
        if step.id in self._unrecorded:
            self._unrecorded.discard(step.id)
            self.journaled(step, value)

    def journaled(self, step: Step[Any], value: bytes) -> None:  # Any: steps of all result types
        """Note a step that another process has done, by its journal value."""
        ended = float(time_of(value))
        if step.kind == "emit":
            self.add(step, ended=ended, output=step.data)
        elif step.kind in ("send", "publish", "message"):
            self.add(step, ended=ended, input=step.data)
        elif status_of(value) == COMPLETED:
            answer = payload_of(value)
            usage, attributes = told_by(answer) if step.kind == "model" else ({}, {})
            self.add(step, ended=ended, input=step.data, output=answer, usage=usage, attributes=attributes)
        else:
            kind, message = recorded_error(value)
            self.add(step, ended=ended, input=step.data, error=RowError(kind, message, at=ended))

    def take(self) -> list[Row]:
        """The rows so far, for the turn's result; starts over."""
        rows, self._rows = self._rows, []
        return rows
