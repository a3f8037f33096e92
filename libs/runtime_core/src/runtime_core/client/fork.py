"""A fork: a new task that begins with results of another, and goes its own way from a step on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.client.recorded_runs import RecordedRun, RecordedStep, on_broker
from runtime_core.codec import quoted
from runtime_core.consumer.effects import COMPLETED
from runtime_core.declare.encoding import encode
from runtime_core.errors import InvalidInput
from runtime_core.hooks.selection import STEP, named_before
from runtime_core.runs.journal import MAX_JOURNAL_BYTES
from runtime_core.wire.commands import NO_OPTIONS, SUBMIT, Begun, Submission, SubmitOptions, digest, new_submission
from runtime_core.wire.envelope import ANONYMOUS
from runtime_core.wire.streaming import StreamingMode

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.trajectory.store import TrajectoryStore

_STEP = re.compile(r"[1-9][0-9]*(\.(0|[1-9][0-9]*))*")


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork takes over."""

    run: RecordedRun
    input: bytes
    context: dict[str, object]
    begun: Begun

    def submission(
        self,
        *,
        task_id: str,
        session_id: str | None = None,
        stream: bool | StreamingMode | str = False,
        options: SubmitOptions = NO_OPTIONS,
    ) -> Submission:
        """The submit of the fork: session, tenant, hooks and metadata are the origin's where known and not given.

        Raises InvalidInput.
        """
        metadata: Any = self.context.get("metadata")  # Any: as the origin's submit has said
        hooks = named_before(self.run.steps[STEP].payload) if STEP in self.run.steps else None
        new = new_submission(
            self.run.agent,
            msgspec.json.decode(self.input),
            source=ANONYMOUS,
            event_id=task_id,
            key=self.run.key or None,
            task_id=task_id,
            session_id=(self.context.get("session_id") if session_id is None else session_id) or None,
            stream=stream,
            options=replace(
                options,
                tenant=options.tenant or str(self.context.get("tenant", "")),
                hooks=hooks if options.hooks is None else options.hooks,
                metadata=metadata if options.metadata is None else options.metadata,
            ),
        )
        # Two forks are equal where what they begin with is.
        values = {step: value.decode(errors="replace") for step, value in self.begun.journal.items()}
        new.digest = digest(SUBMIT, [new.digest, self.begun.task, self.begun.step, values])
        new.begun = self.begun
        return new


async def plan_fork(
    bus: EventBus,
    namespace: str,
    origin: str,
    *,
    at: str | None,
    input: object,
    store: TrajectoryStore | None,
) -> ForkPlan:
    """See `Client.fork`; `bus` is the origin's partition."""
    if at is not None and not (isinstance(at, str) and _STEP.fullmatch(at)):
        raise InvalidInput(
            "at",
            f"{quoted(at)} is not a step of the task's first run, as 3 or 3.0.1; `weft trajectory show` lists them",
        )
    known = await store.task(namespace, origin) if store is not None else None
    run, context = await on_broker(bus, namespace, origin, known)
    new_input = run.input
    journal: dict[str, bytes] = {}
    result = b""
    if at is None:
        if not isinstance(input, EllipsisType):
            new_input = encode(input, "input")
    else:
        last = max((int(first) for step in run.steps if (first := step.partition(".")[0]).isdigit()), default=0)
        if int(at.partition(".")[0]) > last + 1:
            raise InvalidInput(
                "at", f"step {at} does not follow from what task {origin!r} has done: its last is {last}"
            )
        journal = {step.id: step.wildcard for step in run.before(at)}
        if not isinstance(input, EllipsisType):
            result = encode(input, "input")
            journal[at] = _replaced(run, at, result).wildcard
    if not new_input:
        # A run's row, which has its input, is written when it ends by itself.
        raise InvalidInput(
            "input", f"of task {origin!r} is not recorded, since it was cancelled or ran out of time: give it"
        )
    if sum(map(len, journal.values())) > MAX_JOURNAL_BYTES:
        raise InvalidInput("at", f"the results before step {at} are more than {MAX_JOURNAL_BYTES} bytes together")
    return ForkPlan(run, new_input, context, Begun(origin, at or "", journal, result))


def _replaced(run: RecordedRun, at: str, result: bytes) -> RecordedStep:
    there = run.steps.get(at)
    if there is None:
        raise InvalidInput(
            "at",
            f"step {at} has no recorded result that `input` could replace: name one that `weft trajectory show` lists",
        )
    return RecordedStep(at, there.kind, there.name, there.key, b"", COMPLETED, result, there.ended_ms)
