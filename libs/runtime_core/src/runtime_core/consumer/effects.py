"""How a turn ends, and what it requests from its commit, as values. Nothing here uses the broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from runtime_core.wire.step import Step, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime_core.bus.connection import Argument
    from runtime_core.bus.deliveries import Delivery
    from runtime_core.errors import Divergence


WAKE = "!"
"""This step's result alone wakes the run."""
NO_WAKE = "0"
"""This step's result does not wake the run; another step's does."""


class CommittedTurn(Protocol):
    """The turn that a commit ends, as its parts see it."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def partitions(self) -> int: ...

    def stream_of(self, kind: str, name: str, pool: str) -> str:
        """Return the work stream of a call in this partition."""
        ...


class Effect(Protocol):
    """A step that a turn requests from its commit. `runs/effects.py` defines one class for each kind."""

    step: str
    """The step's path id in the run, as in `2` or `3.0.1`."""
    digest: str
    """Eight hexadecimal digits over the request. A replay compares them with the journal's."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        """Return its part of the commit, as `commit_turn.lua` describes it."""
        ...


class UsageEffect(Effect, Protocol):
    """An effect that adds to the task's usage."""

    usage: Usage


class StepRequest(Effect, Protocol):
    """An effect with a result that the run waits for."""

    wait: str
    """`!`: its result wakes the run; `0`: it does not; `g<n>`: the last result of group n does."""


class JournaledStep(NamedTuple):
    """A step that was journaled in mid-turn, in a turn that has not committed yet."""

    step: str
    value: bytes
    """The journal value; empty for a message."""
    kind: str
    name: str
    usage: bytes = b""
    """JSON; empty: none. The write that journals the step adds it to the task's usage."""
    message: Effect | None = None
    """The message that the step has sent in the same write."""


class Suspended(msgspec.Struct):
    """The turn ends and the run waits: for the steps in `requests`, and again for those in `again`."""

    requests: list[StepRequest] = []
    """In the order of the program."""
    sends: list[Effect] = []
    again: list[tuple[str, str]] = []
    """(step, wait) of steps that an earlier turn requested and that have no result yet."""
    spends: list[UsageEffect] = []
    steps: list[Step] = []
    """Steps that this turn performed itself, for the record."""
    journaled: list[JournaledStep] = []
    """Steps that the journal must hold, so that a replay continues as this turn did."""
    working_state: bytes | None = None
    withdrawn: list[str] = []
    """Steps of earlier turns whose results the run no longer wants: their calls and child runs stop."""


class Completed(msgspec.Struct):
    """The run ends with a result."""

    output: bytes
    """JSON."""
    answer: bytes | None = None
    """The result of the calling run's step, if it contains more than the output."""
    sends: list[Effect] = []
    spends: list[UsageEffect] = []
    steps: list[Step] = []
    state: bytes | None = None
    """The instance's new state (JSON); None: unchanged."""
    journaled: list[JournaledStep] = []
    """Steps of this turn whose usage the task must hold, and the messages that it has sent."""
    answered: list[str] = []
    """Requests of this turn whose answers the journal must hold."""
    withdrawn: list[str] = []
    """As in `Suspended`."""


@dataclass(slots=True)
class Failed:
    """The attempt ended with an error; the policy decides whether it is retried."""

    type: str
    message: str
    traceback: str = ""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """The delay that the code requested; None: the policy's."""
    counts: bool = True
    """False: a requirement was missing, so this was no attempt."""
    parked: bool = False
    """The code differs from the journal: the run waits for a rollback or a fix."""
    divergence: Divergence | None = None
    """Where it differs."""
    rejected: bool = False
    """The code gave up: fail without a dead letter."""
    cancelled: bool = False
    """The code cancelled the task. If this is the task's first run, the task ends as cancelled."""
    defect: bool = False
    """The error is a mistake in the code, such as a wrong name: another attempt meets it again."""
    ends_task: bool = False
    """The task exceeded a limit: the whole task ends, whichever of its runs this is."""
    output: bytes = b""
    """The result so far (JSON); empty: none."""
    spends: list[UsageEffect] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    journaled: list[JournaledStep] = field(default_factory=list)
    """Steps of this turn, which the next attempt or a redrive replays."""


TurnResult = Suspended | Completed | Failed


def finished_steps(steps: list[Step], sends: Sequence[Effect]) -> list[Step]:
    """Return the rows of a turn that fails. Its messages in `sends` never leave, so they have no rows."""
    if not sends:
        return steps
    unsent = {send.step for send in sends}
    return [step for step in steps if step.step not in unsent]
